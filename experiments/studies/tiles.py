r"""Where the answers of a model with tiles come from, and where a policy's tokens do.

    python -m experiments.studies.tiles --config experiments/configs/shapes_next.py \
        --budgets 160 80 40 20 --policy shapes --limit 300 --json tiles.json

Nothing is trained. The model answers validation questions from all tokens, from those of the whole
image alone and from those of the tiles alone, family by family. Each policy orders all tokens, as
it is, whatever it was trained on; besides the accuracy of its choices, their shares are given
that show the whole image, tiles, or end a row, and for its own stop the rank correlation of its
counts with the number of patches that the answer depends on.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from experiments.datasets.scenes import read_scenes
from experiments.report.statistics import families, spearman
from experiments.studies.command import read_study, study_parser
from stepprune_jax.benchmarks.folder import BENCHMARK, is_right
from stepprune_jax.checkpoints.policy import load_policy
from stepprune_jax.cli.command_line import exit_with, integer_from
from stepprune_jax.data.json_files import write_json
from stepprune_jax.evaluation.cells import markdown_rows
from stepprune_jax.evaluation.generate_stage import load_model
from stepprune_jax.evaluation.settings import EvaluationRun
from stepprune_jax.evaluation.split import Split, read_split, spread_over, thin
from stepprune_jax.inference.base import RunOptions
from stepprune_jax.inference.encode import encode_questions
from stepprune_jax.inference.generate import Generator
from stepprune_jax.inference.sets import Batching
from stepprune_jax.pruners import build_pruner
from stepprune_jax.pruning import Pruner, Ranker, Ranking, View
from stepprune_jax.trained import Policy
from stepprune_jax.user_input import require

PARTS = ("all tokens", "the whole image alone", "the tiles alone")


@dataclasses.dataclass(frozen=True)
class InOrder(Ranker):
    """Keeps the first tokens of an image, or the last."""

    last: bool = False

    name = "in order"
    label = "in order"

    def rank(self, view: View, steps: int) -> Ranking:
        """Returns the order that tokens have, or its reverse; padding comes last."""
        r, n = view.tokens.shape[:2]
        place = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (r, n))
        if self.last:
            size = n if view.valid is None else view.valid.sum(1, keepdims=True)
            place = jnp.where(place < size, size - 1 - place, place)
        return Ranking(place[:, :steps])


def origins(kept: Sequence[Int[np.ndarray, "k"]], whole: int, columns: int) -> dict[str, float]:
    """Returns the shares of kept tokens, in percent, of each part of an image."""
    index = np.concatenate(kept)
    end = (index >= whole) & ((index - whole) % (columns + 1) == columns)
    parts = {"whole image": index < whole, "tiles": (index >= whole) & ~end, "row ends": end}
    return {name: percent(at) for name, at in parts.items()}


def compare(
    run: EvaluationRun,
    split: Split,
    needed: Int[np.ndarray, "q"],
    names: Sequence[str],
    policies: Mapping[str, Policy],
    budgets: Sequence[int],
) -> list[dict[str, Any]]:
    """Answers questions from the named parts, and from what each policy keeps.

    Args:
        run: model and batches.
        split: the questions.
        needed: number of patches that each answer depends on.
        names: some of `PARTS`.
        policies: policies by name.
        budgets: exact numbers of tokens; a learned stop is evaluated besides.
    """
    model = load_model(run)
    require(model.config.is_tiled, f"{run.model.folder}: its images are not seen in tiles")
    execution = run.model.execution
    encoded = encode_questions(
        model, split.questions, batch_size=run.eval.batch_size, execution=execution
    )
    options = RunOptions(execution=execution, max_tokens=run.eval.longest_answer(BENCHMARK))
    n, whole = model.config.max_image_tokens, model.config.vision.num_patches
    plain = (build_pruner("all", None), InOrder(whole), InOrder(n - whole, last=True))
    parts: dict[str, list[Pruner]] = {
        name: [pruner] for name, pruner in zip(PARTS, plain, strict=True) if name in names
    }
    for name, policy in policies.items():
        own = ["own"] if policy.has_stop else []
        parts[name] = [policy.with_budget(budget) for budget in [*budgets, *own]]
    (columns,) = {int(grid[1]) for grid in encoded.images.grid}
    rows = []
    for name, pruners in parts.items():
        generator = Generator(model, pruners[0], options=options)
        variants = [(pruner, None) for pruner in pruners]
        batching = Batching(run.eval.batch_size)
        for pruner, answers in zip(
            pruners, generator.answer_set(encoded, batching, variants), strict=True
        ):
            right = np.array(list(map(is_right, answers.texts, split.answers)))
            row = {"tokens": name, "budget": str(pruner.budget), "kept": float(answers.kept.mean())}
            row |= {"accuracy": percent(right), "questions": len(right)}
            row["families"] = {
                family: percent(right[at]) for family, at in families(split.questions).items()
            }
            if name in policies:
                row["origins"] = origins(answers.order, whole, columns)
            if pruner.budget.kind == "own":
                row["spearman"] = spearman(answers.kept, needed)
            rows.append(row)
            print(as_markdown([row]), end="", flush=True)
    return rows


def percent(right: Bool[np.ndarray, "q"]) -> float:
    """Returns the share of right answers in percent."""
    return float(100 * right.mean())


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats a row for each part and each policy's choice."""
    names = list(rows[0]["families"])
    lines = []
    for row in rows:
        found = row.get("origins") or {}
        shares = [f"{value:.0f}" for value in found.values()] or ["-"] * 3
        shares.append(f"{row['spearman']:.2f}" if row.get("spearman") is not None else "-")
        values = (row["kept"], row["accuracy"], *row["families"].values())
        lines.append([row["tokens"], *(f"{value:.1f}" for value in values), *shares])
    heads = [
        "tokens",
        "kept",
        "accuracy",
        *names,
        "% of whole image",
        "tiles",
        "row ends",
        "Spearman",
    ]
    return markdown_rows(heads, lines, texts=1)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = study_parser(__doc__)
    add = parser.add_argument
    add("--policy", nargs="*", default=[], help="policy files, or names of shipped ones")
    add("--budgets", type=integer_from(1), nargs="+", default=[160, 80, 40, 20], help="tokens")
    add("--limit", type=integer_from(0), default=0, help="most questions; 0 for all")
    add("--split", choices=("validation", "test"), default="validation", help="of the data")
    add("--parts", nargs="*", choices=PARTS, default=PARTS, help="tokens without a policy")
    add("--json", help="file for all figures")
    given = parser.parse_args(argv)
    run, json_file = read_study(given)
    folder = run.root(BENCHMARK.name)
    split = read_split(folder, given.split)
    scenes = read_scenes(folder / f"{given.split}_scenes.jsonl", split.questions)
    chosen = spread_over(len(scenes), given.limit)
    needed = np.array([len(scenes[at].relevant) for at in chosen])
    policies = {name: load_policy(name) for name in given.policy}
    split = thin(split, given.limit)
    rows = compare(run, split, needed, given.parts, policies, given.budgets)
    if json_file:
        write_json(json_file, rows)


if __name__ == "__main__":
    exit_with("experiments.studies.tiles", main)
