r"""Tells whether choosing step by step pays, family by family: experiments/RESULTS.md.

    python -m experiments.studies.sequence --config experiments/configs/shapes_hard.py \
        --workdir runs/shapes_hard --json sequence.json \
        --scorer runs/shapes_hard_autoselect/policy.safetensors

The policy's step-by-step selection is compared with the best tokens of its own first step, with
one-shot scorers, and with an oracle that keeps the tokens an answer depends on, all at exact
budgets. The answers are those of eval.py and are kept in the same place.

`--workdir` takes several runs, and `--scorer` a file for each: the result has means over runs.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from experiments.datasets.scenes import Scene, read_scenes
from experiments.report.records import Records, percent, read_records
from experiments.report.statistics import families, image_numbers, paired_difference
from experiments.studies.command import read_study, study_parser
from experiments.studies.oracle import make_oracle
from stepprune_jax import policy as functions
from stepprune_jax.benchmarks import BenchmarkQuestion
from stepprune_jax.benchmarks.answer_files import ANSWERS, digest
from stepprune_jax.benchmarks.folder import BENCHMARK
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.cli.command_line import exit_with
from stepprune_jax.data.json_files import write_json
from stepprune_jax.data.llava import Question
from stepprune_jax.evaluation.calibrate import Biases
from stepprune_jax.evaluation.cells import markdown_rows
from stepprune_jax.evaluation.generate_stage import Task, answer_tasks, load_model
from stepprune_jax.evaluation.names import ALL, DEFAULT
from stepprune_jax.evaluation.rows import Conditions, TableRow
from stepprune_jax.evaluation.settings import (
    EvaluationRun,
    check_policies,
    read_policies,
)
from stepprune_jax.evaluation.split import read_split
from stepprune_jax.inference.encode import EncodedQuestions, encode_chunks
from stepprune_jax.inference.pipeline import place_pruner, see
from stepprune_jax.inference.sets import batches
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.placement import fetch
from stepprune_jax.policy import FeatureStats
from stepprune_jax.policy.noise import standardise
from stepprune_jax.pruning import Budget, View
from stepprune_jax.trained import Policy
from stepprune_jax.user_input import UserError, expect
from stepprune_jax.workdir.lock import locked

SCORER = "AutoSelect-like"
EVERY = "all"
# Rows that only this study has: the best tokens of the default policy's first step, and the tokens
# that are known to matter.
FIRST_STEP, ORACLE = "first step", "oracle"
_MOST_TOKENS = 1 << 20  # more than any image has


@dataclasses.dataclass(frozen=True)
class _WithOracle(Conditions):
    """Conditions of the rows of the settings, and those of the oracle."""

    oracle: Sequence[TableRow]

    def rows(self, biases: Biases) -> list[TableRow]:
        """Plans the rows."""
        return [*super().rows(biases), *self.oracle]


def compare(run: EvaluationRun, workdir: str | Path) -> dict[str, Any]:
    """Compares ways of choosing on the test split of the shapes world, or of data in its format."""
    workdir, shares = Path(workdir), [b for b in run.eval.budgets if isinstance(b, str)]
    if shares:
        raise UserError(f"config.eval.budgets holds {shares[0]}, expected numbers of tokens")
    data = run.root(BENCHMARK.name)
    scorers = [*run.eval.rows]
    methods = ",".join([ALL, *scorers, DEFAULT])
    settings = dataclasses.replace(run.eval, benchmarks=BENCHMARK.name, methods=methods)
    source = run.model.inspect()
    policies = read_policies(settings, workdir, source=source)
    check_policies(policies, source.config, settings)
    policies[FIRST_STEP] = first_step(policies[DEFAULT])
    # The rows of this study are named; what is left out are rows without training.
    rows = dict.fromkeys([*scorers, FIRST_STEP], "")
    settings = dataclasses.replace(settings, rows=rows, methods=",".join([ALL, *policies]))
    run = dataclasses.replace(run, eval=settings)
    questions, folder = read_split(data, "test").questions, workdir / ANSWERS
    scenes = read_scenes(data / "test_scenes.jsonl", questions)
    model = load_model(run)
    asked = [BenchmarkQuestion(q.question_id, q.text, q.text, q.image) for q in questions]
    oracle = oracle_rows(settings.budgets, scenes, run.seed)
    conditions = _WithOracle(run, source, policies, folder, oracle)
    answer_tasks([Task(conditions, BENCHMARK, asked)], lambda: model)
    wanted, ids = {ALL, ORACLE, *policies}, [question.question_id for question in questions]
    labels = [*scorers, FIRST_STEP, DEFAULT]
    records = [
        row
        for row in read_records(folder / BENCHMARK.name, data, labels, ids)
        if row.method in wanted and row.mode == "exact"
    ]
    records = [row for row in records if row.method == ALL or row.budget in settings.budgets]
    rows = {(row.method, row.budget): row for row in records}
    family = {EVERY: np.ones(len(questions), bool)} | families(questions)
    choices, entropy = describe_choices(
        model,
        policies[DEFAULT],
        questions,
        scenes,
        records,
        run.model.execution,
        settings.batch_size,
    )
    pairs = [(DEFAULT, other) for other in (FIRST_STEP, *(n for n in scorers if n in policies))]
    image = image_numbers(questions)
    return {
        "questions": {name: int(at.sum()) for name, at in family.items()},
        "accuracy": [
            {"family": name, "method": m, "budget": b, "accuracy": percent(row.correct[at])}
            for name, at in family.items()
            for (m, b), row in rows.items()
        ],
        "differences": [
            {"family": name, "budget": budget, "first": one, "second": two}
            | paired_difference(
                rows[one, budget].correct[at], rows[two, budget].correct[at], image[at]
            )
            for name, at in family.items()
            for budget in settings.budgets
            for one, two in [*pairs, (ORACLE, DEFAULT)]
        ],
        "choices": [
            {"family": name, "method": row.method, "budget": row.budget}
            | {field: _mean(values[at]) for field, values in described.items()}
            for name, at in family.items()
            for row, described in zip(records, choices, strict=True)
        ],
        "entropy": {name: _mean(entropy[at]) for name, at in family.items()},
    }


def first_step(policy: Policy) -> Policy:
    """Returns a policy that takes all its tokens from its first pointer distribution."""
    if policy.pointer_steps(1) is None:
        raise UserError(f"the row {FIRST_STEP!r} needs a policy with steps, not {policy.name!r}")
    return policy.replace(config=dataclasses.replace(policy.config, group=_MOST_TOKENS))


def oracle_rows(budgets: Sequence[int], scenes: Sequence[Scene], seed: int) -> list[TableRow]:
    """Plans a row of the oracle at each budget."""
    relevant = [scene.relevant for scene in scenes]
    known = digest([" ".join(map(str, tokens)) for tokens in relevant])
    counts = [Budget("count", budget) for budget in budgets]
    return [TableRow(ORACLE, b, make_oracle(b, relevant, known, seed)) for b in counts]


def _mean(values: Float[np.ndarray, "q"]) -> float | None:
    """Averages what is defined; None if nothing is."""
    values = values[np.isfinite(values)]
    return round(float(values.mean()), 4) if len(values) else None


_KEYS = ("family", "method", "budget", "first", "second")


def over_runs(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Averages the comparisons of several runs on the same questions."""

    def rows(part: str, field: str = "", error: str = "", divisor: float = 1.0) -> list[dict]:
        merged = []
        for same in zip(*(result[part] for result in results), strict=True):
            key = {name: same[0][name] for name in _KEYS if name in same[0]}
            if any(row[name] != key[name] for row in same for name in key):
                raise UserError("the runs to compare differ in their rows")
            fields = [field] if field else [name for name in same[0] if name not in key]
            values = {name: np.array([row[name] for row in same], float) for name in fields}
            row = key | {name: _mean(found) for name, found in values.items()}
            if error:
                row[error] = round(float(values[field].std(ddof=1)) / divisor, 3)
            merged.append(row)
        return merged

    asked, runs = results[0]["questions"], len(results)
    if any(result["questions"] != asked for result in results):
        raise UserError("the runs to compare answered different questions")
    error = "standard_error_over_runs"
    return {
        "runs": runs,
        "questions": asked,
        "accuracy": rows("accuracy", "accuracy", "standard_deviation"),
        "differences": rows("differences", "difference", error, math.sqrt(runs)),
        "choices": rows("choices"),
        "entropy": {name: _mean(np.array([r["entropy"][name] for r in results])) for name in asked},
    }


def describe_choices(
    model: VLM,
    policy: Policy,
    questions: Sequence[Question],
    scenes: Sequence[Scene],
    records: Sequence[Records],
    execution: Execution,
    size: int,
) -> tuple[list[dict[str, Float[np.ndarray, "q"]]], Float[np.ndarray, "q"]]:
    """Describes what is kept for each question, and how sharp the policy's first step is."""
    pruner = place_pruner(model, policy)
    described: list[list[dict[str, float]]] = [[] for _ in records]
    entropies = []
    chunks = encode_chunks(model, questions, batch_size=size, execution=execution)
    for first, encoded in chunks:
        entropies.append(_entropies(model, pruner, encoded, size))
        images = _directions(encoded.images.features, policy.stats)
        for at, image in enumerate(encoded.prompts.image_of[:, 0].tolist()):
            number = first + at
            for into, row in zip(described, records, strict=True):
                order = row.order[number][: row.count[number]]
                into.append(_describe(images[image], order, scenes[number]))
    columns = [
        {name: np.array([line[name] for line in lines]) for name in lines[0]} for lines in described
    ]
    return columns, np.concatenate(entropies)


def _directions(
    features: Float[np.ndarray, "i n d"], stats: FeatureStats | None
) -> Float[np.ndarray, "i n d"]:
    """Returns standardised features of length one."""
    standard = np.asarray(standardise(jnp.asarray(features, jnp.float32), stats))
    return standard / np.maximum(np.linalg.norm(standard, axis=-1, keepdims=True), 1e-9)


def _describe(
    image: Float[np.ndarray, "n d"], order: Int[np.ndarray, "k"], scene: Scene
) -> dict[str, float]:
    """Describes the tokens kept for one question; NaN where a figure is undefined."""
    kept, similarity = image[order], np.nan
    if len(order) > 1:
        cosine = kept @ kept.T
        np.fill_diagonal(cosine, -np.inf)
        similarity = float(cosine.max(axis=1).mean())
    relevant = np.isin(scene.relevant, order).mean() if scene.relevant else np.nan
    shown = [int(np.isin(group, order).sum()) for group in scene.alike]
    looks = sum(count > 0 for count in shown) if scene.alike else np.nan
    repeats = (sum(shown) - looks) / max(1, len(order))
    return {
        "similarity": similarity,
        "relevant": 100 * float(relevant),
        "looks": float(looks),
        "repeats": 100 * float(repeats),
    }


def _entropies(
    model: VLM, pruner: Policy, encoded: EncodedQuestions, size: int
) -> Float[np.ndarray, "q"]:
    """Computes the entropy of a policy's first pointer distribution for each question, in nats."""
    run, parts = jax.jit(_first_entropy), []
    for rows, count in batches(len(encoded.prompts.length), size):
        view = see(model, pruner, encoded.prompts.take(rows), encoded.images)
        parts.append(np.asarray(fetch(run(pruner, view)))[:count])
    return np.concatenate(parts)


def _first_entropy(pruner: Any, view: View) -> Float[Array, "r"]:
    limits = functions.Limits(max_steps=1, min_tokens=1)
    steps = functions.select(pruner.params, pruner.config, pruner.inputs(view), limits)
    log_prob = jax.nn.log_softmax(steps.log_prob[:, 0].astype(jnp.float32))
    return -jnp.sum(jnp.exp(log_prob) * log_prob, axis=-1)


def as_markdown(result: Mapping[str, Any]) -> str:
    """Formats the tables of a comparison."""
    found = {(r["family"], r["method"], r["budget"]): _shown(r) for r in result["accuracy"]}
    methods = list(dict.fromkeys(row["method"] for row in result["accuracy"]))
    methods.sort(key=lambda name: (name != ALL, name == ORACLE))
    whole = next(row["budget"] for row in result["accuracy"] if row["method"] == ALL)
    gaps: dict[Any, dict[str, str]] = {}
    for row in result["differences"]:
        error = row.get("standard_error_over_runs", row.get("standard_error_by_image"))
        shown = f"{row['difference']:+.1f} +- " + ("?" if error is None else f"{error:.1f}")
        name = f"{row['first']} - {row['second']}"
        gaps.setdefault((row["family"], row["budget"]), {})[name] = shown
    parts = []
    for budget in dict.fromkeys(row["budget"] for row in result["differences"]):
        lines = []
        for name, questions in result["questions"].items():
            own = [found[name, m, whole if m == ALL else budget] for m in methods]
            entropy = result["entropy"][name]
            lines.append([name, questions, entropy, *own, *gaps[name, budget].values()])
        header = ["family", "questions", "entropy", *methods, *gaps[EVERY, budget]]
        parts.append(f"Accuracy in percent at {budget} tokens\n\n{markdown_rows(header, lines)}")
    kept = [row for row in result["choices"] if row["family"] == EVERY and row["method"] != ALL]
    fields = ["budget", "method", "similarity", "relevant", "looks", "repeats"]
    kept.sort(key=lambda row: (-row["budget"], methods.index(row["method"])))
    lines = [[row[field] for field in fields] for row in kept]
    parts.append(f"What is kept\n\n{markdown_rows(fields, lines)}")
    return "\n".join(parts)


def _shown(row: Mapping[str, Any]) -> str:
    """An accuracy, with its standard deviation over runs, if there are several."""
    deviation = row.get("standard_deviation")
    return f"{row['accuracy']:.1f}" + ("" if deviation is None else f" +- {deviation:.1f}")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = study_parser(__doc__)
    parser.add_argument(
        "--workdir", required=True, nargs="+", help="folder of the run that trained the policy"
    )
    parser.add_argument(
        "--scorer", nargs="+", help=f"policy file of the one-shot row {SCORER!r}, for each folder"
    )
    parser.add_argument("--json", help="file for all figures")
    given = parser.parse_args(argv)
    scorers, results = given.scorer or [None] * len(given.workdir), []
    fits = len(scorers) == len(given.workdir)
    expect("--scorer", scorers, fits, "a file for each folder of --workdir")
    run, json_file = read_study(given)
    for workdir, scorer in zip(given.workdir, scorers, strict=True):
        rows = run.eval.rows | ({SCORER: scorer} if scorer else {})
        one = dataclasses.replace(run, eval=dataclasses.replace(run.eval, rows=rows))
        with locked(Path(workdir)):
            results.append(compare(one, workdir))
    result = over_runs(results) if len(results) > 1 else results[0]
    print(as_markdown(result), end="")
    if json_file:
        write_json(json_file, result)


if __name__ == "__main__":
    exit_with("experiments.studies.sequence", main)
