"""Kept tokens and correctness of every answer of a row."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.answer_files import AnswerFile, pruning_rate, read_files
from stepprune_jax.benchmarks.answers import read_answers
from stepprune_jax.data.json_files import JsonObject
from stepprune_jax.evaluation.names import ALL, row_place


class Records(NamedTuple):
    """The selections and answers of one table row, question by question.

    Attributes:
        method: name of the row.
        mode: "exact" or "adaptive".
        budget: tokens to keep, on average if adaptive; None for a policy's own stop.
        num_tokens: N.
        count: [q] tokens kept.
        order: [q, t] token indices in order of choice (raster order for methods without one); -1
            past the count and for merged and added tokens, which come last.
        correct: [q] whether the answers are right.
    """

    method: str
    mode: str
    budget: int | None
    num_tokens: int
    count: Int[np.ndarray, "q"]
    order: Int[np.ndarray, "q t"]
    correct: Bool[np.ndarray, "q"]

    @property
    def pruning_rate(self) -> float:
        """Pruning rate of the budget in percent; of the mean count for a policy's own stop."""
        count = self.count.mean() if self.budget is None else self.budget
        return pruning_rate(float(count), self.num_tokens)


def read_records(
    folder: Path, data: Path, labels: Sequence[str], ids: Sequence[str]
) -> list[Records]:
    """Reads the complete rows of a data folder's answers, in the order of the table."""

    def place(file: AnswerFile) -> tuple[bool | int | str, ...]:
        provenance = file.provenance
        return row_place(provenance.method, provenance.mode, provenance.budget, labels)

    rows = []
    for file in sorted(read_files(folder), key=place):
        provenance = file.provenance
        worth = BENCHMARKS[provenance.benchmark].make_grader(data)
        answers = {answer.id: answer for answer in read_answers(file.path, broken=[])}
        if not answers.keys() >= {*ids}:  # of another run, which was interrupted
            continue
        lines = [answers[name] for name in ids]
        count = np.array([line.fields["kept"] for line in lines], np.int32)
        order = np.full((len(lines), max(1, int(count.max(initial=0)))), -1, np.int16)
        for row, line in zip(order, lines, strict=True):
            all_tokens = range(line.fields["kept"]) if provenance.method == ALL else ()
            kept = line.fields.get("order", all_tokens)
            row[: len(kept)] = kept
        correct = np.array([worth(line) for line in lines], bool)
        head = provenance.method, provenance.mode, provenance.budget, provenance.num_tokens
        rows.append(Records(*head, count, order, correct))
    return rows


def percent(correct: Bool[np.ndarray, "q"]) -> float:
    """Computes the share of true entries in percent, to two decimals."""
    return round(100 * float(np.mean(correct)), 2)


def full_row(rows: Sequence[Records]) -> Records:
    """Finds the row that keeps all tokens, the reference of retention."""
    return next(row for row in rows if row.method == ALL)


def accuracy_table(rows: Sequence[Records], seed: int) -> list[JsonObject]:
    """Tabulates rows: method, mode, pruning_rate, accuracy, retention, mean_k, questions, seed."""
    reference = full_row(rows).correct
    return [
        {
            "method": row.method,
            "mode": row.mode,
            "pruning_rate": row.pruning_rate,
            "accuracy": percent(row.correct),
            "retention": round(100 * float(row.correct.sum() / reference.sum()), 2)
            if reference.any()
            else None,
            "mean_k": round(float(row.count.mean()), 2),
            "questions": len(row.correct),
            "seed": seed,
        }
        for row in rows
    ]
