"""From policies and questions to answered rows; everything that is shared is computed once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool

from stepprune_jax.benchmarks import shapes
from stepprune_jax.benchmarks.answer_files import (
    AnswerFile,
    AnswerLine,
    Provenance,
    questions_digest,
    write_whole,
)
from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.checkpoints.policy import Policy
from stepprune_jax.evaluation.answers import Answered, Answering, answer, check_lengths
from stepprune_jax.evaluation.names import ALL, CLS, DEFAULT, GRID, RANDOM
from stepprune_jax.evaluation.orders import Ordering, trained_order
from stepprune_jax.evaluation.progress import Progress
from stepprune_jax.evaluation.records import Records, trimmed
from stepprune_jax.evaluation.rows import (
    Row,
    adaptive_rows,
    exact_rows,
    own_stop_row,
    untrained_row,
)
from stepprune_jax.evaluation.settings import Settings
from stepprune_jax.evaluation.split import Encoded, Split, encode_split
from stepprune_jax.pruning import random_order

# Guesses of what a picture costs in the tower, and a question in a rollout, in embeddings of a
# prefill: for the time that is left only.
_PICTURE, _ROLLOUT = 300, 100


class Files(NamedTuple):
    """Where answers go and how they are scored.

    Attributes:
        folder: for an answer file a row.
        data: data folder with the right answers.
    """

    folder: Path
    data: Path


class Bench(NamedTuple):
    """What all rows share.

    Attributes:
        model: the frozen model.
        test: the questions, encoded.
        asked: the questions.
        files: where answers are written, and what they are scored by.
        validation: questions for stop biases; None if no row needs them.
        settings: of the evaluation.
        attention: "matmul", "xla" or "cudnn".
    """

    model: VLM
    test: Encoded
    asked: list[BenchmarkQuestion]
    files: Files
    validation: Encoded | None
    settings: Settings
    attention: str = "matmul"

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.test.features.shape[1]


def make_bench(
    model: VLM,
    test: Split,
    validation: Split | None,
    settings: Settings,
    files: Files,
    attention: str = "matmul",
) -> Bench:
    """Runs the tower on all pictures.

    Args:
        model: the frozen model.
        test: the questions.
        validation: questions for stop biases, if a row needs them.
        settings: of the evaluation.
        files: where answers go and how they are scored.
        attention: "matmul", "xla" or "cudnn".

    Raises:
        ValueError: pictures or prompts that the model cannot take.
    """
    splits = [test] + ([validation] if validation is not None else [])
    pictures = [len({question.image for question in split.questions}) for split in splits]
    progress = Progress(sum(pictures))
    encoded = [
        encode_split(
            model, split.questions, batch_size=settings.batch_size, with_attention=split is test,
            attention=attention, report=progress.task("pictures", count, count),
        )
        for split, count in zip(splits, pictures, strict=True)
    ]  # fmt: skip
    progress.close()
    for found in encoded:
        check_lengths(found, model.config.num_image_tokens)
    spare = encoded[1] if validation is not None else None
    asked = [BenchmarkQuestion(q.question_id, q.text, q.text, q.image) for q in test.questions]
    return Bench(model, encoded[0], asked, files, spare, settings, attention)


def stops(name: str, policy: Policy, settings: Settings) -> bool:
    """Whether the learned stop of a row is used as well."""
    return name in settings.adaptive and policy.method == "stepprune"


def _steps(bench: Bench, name: str, policy: Policy) -> int:
    """Length of the order that a policy's rows need."""
    if stops(name, policy, bench.settings):
        return policy.config.steps(bench.num_tokens)
    return max(bench.settings.budgets)


def trained_rows(bench: Bench, policies: Mapping[str, Policy]) -> dict[str, list[Row]]:
    """The rows of trained policies, one rollout each per question.

    Args:
        bench: what is shared.
        policies: by row name.

    Returns:
        Rows by name: those at exact budgets, then those that stop by themselves.
    """
    settings, questions = bench.settings, len(bench.test.image_of)
    spare = 0 if bench.validation is None else len(bench.validation.image_of)
    adaptive = {name for name, policy in policies.items() if stops(name, policy, settings)}
    progress = Progress(len(policies) * questions + len(adaptive) * spare)

    def roll(name: str, policy: Policy, split: Encoded) -> Ordering:
        count = len(split.image_of)
        return trained_order(
            bench.model, policy, split, steps=_steps(bench, name, policy),
            batch_size=settings.batch_size, report=progress.task(f"order, {name}", count, count),
        )  # fmt: skip

    rows = {}
    for name, policy in policies.items():
        found = roll(name, policy, bench.test)
        rows[name] = exact_rows(name, found, settings.budgets, bench.num_tokens)
        if name in adaptive:
            known = roll(name, policy, bench.validation)
            rows[name] += adaptive_rows(
                name, policy, found, known, settings.budgets, bench.num_tokens
            )
            if name == DEFAULT:
                rows[name].append(own_stop_row(name, policy, found, bench.num_tokens))
    progress.close()
    return rows


def baseline_rows(bench: Bench, seed: int) -> list[Row]:
    """The rows that need no training; the first keeps all tokens."""
    drawn = random_order(jax.random.key(seed), len(bench.asked), bench.num_tokens)
    budgets = bench.settings.budgets
    wanted = [(ALL, 0)] + [(name, b) for name in (RANDOM, GRID, CLS) for b in budgets]
    return [
        untrained_row(name, bench.test, bench.model.config, budget, np.asarray(drawn))
        for name, budget in wanted
    ]


def ladder(bench: Bench, rows: Sequence[Row]) -> tuple[int, ...]:
    """Sizes for kept tokens: the exact budgets, and what adaptive rows need at most."""
    sizes = {int(row.selection.count.max()) for row in rows if row.mode == "exact"}
    most = [row.selection.order.shape[1] for row in rows if row.mode == "adaptive"]
    return tuple(sorted(sizes | set(most)))


def answer_rows(bench: Bench, rows: Sequence[Row]) -> list[Records]:
    """Answers all questions in every row; writes the answers, and has them scored from the file.

    Args:
        bench: what is shared.
        rows: what is kept.

    Returns:
        Records in the order of the rows.
    """
    settings, width = bench.settings, bench.test.ids.shape[1]
    how = Answering(
        ladder(bench, rows), settings.batch_size, settings.longest_answer(shapes.BENCHMARK),
        settings.positions, bench.attention,
    )  # fmt: skip
    works = [len(row.selection.count) * width + int(row.selection.count.sum()) for row in rows]
    progress = Progress(sum(works))
    records = []
    for row, work in zip(rows, works, strict=True):
        name = f"{row.method}, {row.mode}, {row.pruning_rate:g} % pruned"
        task = progress.task(name, work, len(row.selection.count))
        found = answer(bench.model, bench.test, row.selection, how, task)
        count = np.asarray(row.selection.count, np.int32)
        correct = _written(bench, row, found)
        records.append(
            Records(
                row.method, row.mode, row.budget, row.num_tokens, count,
                trimmed(row.selection.order, count), found.texts, correct,
            )
        )  # fmt: skip
    progress.close()
    return records


def _written(bench: Bench, row: Row, found: Answered) -> Bool[np.ndarray, "q"]:
    """Writes a row's answers and asks the scorer which of them are right."""
    seconds = bench.test.seconds + row.seconds + found.seconds
    lines = [
        AnswerLine(text, int(kept), 1000 * float(taken))
        for text, kept, taken in zip(found.texts, row.selection.count, seconds, strict=True)
    ]
    card = Provenance(
        benchmark=shapes.BENCHMARK.name, questions=questions_digest(bench.asked),
        asked=len(bench.asked), method=row.method, mode=row.mode, budget=row.budget,
        num_tokens=bench.num_tokens, stop_bias=row.stop_bias, model=bench.model.folder.name,
    )  # fmt: skip
    file = AnswerFile.of(bench.files.folder, card)
    write_whole(file, bench.asked, lines)
    return np.array(shapes.BENCHMARK.judge(bench.files.data, file.path), bool)
