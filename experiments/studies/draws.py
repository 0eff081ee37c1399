r"""How a set of tokens should be taken from the same trained policy: argmax, draws, soft scores.

    python -m experiments.studies.draws --config configs/shapes.py --set data.folder=data/shapes \
        --policy shapes experiments/policies/autoselect.safetensors --json draws.json

Nothing is trained. Each policy orders the tokens of the validation questions by its argmax, by
draws at several temperatures and of several seeds, and, if it is a pointer, by the soft scores that
training opens; the model answers from each prefix. Settings of a policy are chosen by this table,
and never on test questions.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from experiments.studies.command import read_study, study_parser
from stepprune_jax import policy as functions
from stepprune_jax.benchmarks.folder import BENCHMARK, is_right
from stepprune_jax.checkpoints.policy import load_policy
from stepprune_jax.cli.command_line import exit_with, integer_from
from stepprune_jax.data.json_files import write_json
from stepprune_jax.evaluation.cells import markdown_rows
from stepprune_jax.evaluation.generate_stage import load_model
from stepprune_jax.evaluation.settings import EvaluationRun
from stepprune_jax.evaluation.split import Split, read_split, thin
from stepprune_jax.inference.base import RunOptions
from stepprune_jax.inference.encode import encode_questions
from stepprune_jax.inference.generate import Generator
from stepprune_jax.inference.sets import Batching
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.policy.buckets import bucket_ladder
from stepprune_jax.pruning import Ranking, View
from stepprune_jax.trained import Policy, StepPrune

_TEMPERATURES = (0.3, 1.0)


class Way(NamedTuple):
    """A way of taking sets from a policy, and its seeds."""

    label: str
    policy: Policy
    seeds: Sequence[int] = (0,)
    soft: bool = False


@dataclasses.dataclass(frozen=True)
class SoftScores(StepPrune):
    """Keeps the tokens of the highest soft scores of the greedy rollout, Eq. (11)."""

    def rank(self, view: View, steps: int) -> Ranking:
        """Orders tokens by score."""
        trajectory = functions.select(self.params, self.config, self.inputs(view))
        scores = functions.trajectory_scores(self.config, trajectory)
        return Ranking(jax.lax.top_k(scores, steps)[1].astype(jnp.int32))


def ways(policy: Policy, seeds: Sequence[int]) -> Iterator[Way]:
    """Yields the ways of a policy."""
    at = functools.partial(dataclasses.replace, policy.config)
    yield Way("argmax", policy.replace(config=at(draw=0.0)))
    if isinstance(policy.config, PolicyConfig):
        yield Way("soft scores", policy.replace(config=at(draw=0.0)), soft=True)
        first = {"group": 1 << 20}  # more tokens than any image has
        yield Way("first step's argmax", policy.replace(config=at(draw=0.0, **first)))
        yield Way("first step's draw", policy.replace(config=at(draw=1.0, **first)), seeds)
    for temperature in _TEMPERATURES:
        yield Way(f"draw at {temperature}", policy.replace(config=at(draw=temperature)), seeds)


def compare(
    run: EvaluationRun,
    split: Split,
    policies: Mapping[str, Policy],
    budgets: Sequence[int],
    seeds: Sequence[int],
) -> list[dict[str, Any]]:
    """Answers questions in every way; accuracy in percent, with its deviation over seeds."""
    model = load_model(run)
    size, execution = run.eval.batch_size, run.model.execution
    encoded = encode_questions(model, split.questions, batch_size=size, execution=execution)
    options = RunOptions(execution=execution, max_tokens=run.eval.longest_answer(BENCHMARK))
    most = max(budgets)

    def answers(way: Way, seed: int) -> list[float]:
        def pruner(budget: int):
            made = way.policy.with_budget(budget)
            if "seed" in {field.name for field in dataclasses.fields(made)}:
                made = made.replace(seed=seed)
            if way.soft:
                fields = ("budget", "params", "config", "stats")
                made = SoftScores(**{name: getattr(made, name) for name in fields})
            return made

        variants = [(pruner(budget), None) for budget in budgets]
        generator = Generator(model, variants[-1][0], options=options)
        batching = Batching(size, bucket_ladder(most))
        return [
            100 * np.mean(list(map(is_right, answers.texts, split.answers)))
            for answers in generator.answer_set(encoded, batching, variants)
        ]

    rows = []
    planned = [(name, way) for name, policy in policies.items() for way in ways(policy, seeds)]
    with tqdm(total=sum(len(way.seeds) for _, way in planned), unit="set") as bar:
        for name, way in planned:
            table = []
            for seed in way.seeds:
                table.append(answers(way, seed))
                bar.update()
            for budget, runs in zip(budgets, np.transpose(table), strict=True):
                deviation = float(runs.std(ddof=1)) if len(runs) > 1 else None
                row = {"policy": name, "way": way.label, "budget": budget, "seeds": len(runs)}
                rows.append(row | {"accuracy": float(runs.mean()), "deviation": deviation})
    return rows


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats a row for each way, and a column for each budget."""
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    cells = {
        (row["policy"], row["way"], row["budget"]): f"{row['accuracy']:.1f}"
        + ("" if row["deviation"] is None else f" +- {row['deviation']:.1f}")
        for row in rows
    }
    names = dict.fromkeys((policy, way) for policy, way, _ in cells)
    lines = [[*name, *(cells[(*name, budget)] for budget in budgets)] for name in names]
    return markdown_rows(["policy", "way", *map(str, budgets)], lines, texts=2)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = study_parser(__doc__)
    add = parser.add_argument
    add("--policy", nargs="+", required=True, help="policy files, or names of shipped ones")
    add("--budgets", type=integer_from(1), nargs="+", default=[4, 8, 16, 32], help="tokens")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the draws")
    add("--limit", type=integer_from(0), default=0, help="most questions; 0 for all")
    add("--json", help="file for all figures")
    given = parser.parse_args(argv)
    run, json_file = read_study(given)
    split = thin(read_split(run.root(BENCHMARK.name), "validation"), given.limit)
    policies = {name: load_policy(name) for name in given.policy}
    rows = compare(run, split, policies, given.budgets, given.seeds)
    print(as_markdown(rows), end="")
    if json_file:
        write_json(json_file, rows)


if __name__ == "__main__":
    exit_with("experiments.studies.draws", main)
