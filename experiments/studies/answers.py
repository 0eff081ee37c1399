"""Reads kept tokens and correctness of every answer of a table row, and summarizes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.stats
from jaxtyping import Bool, Int

from experiments.shapes.scene_files import SceneFacts
from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.answer_files import AnswerFile, pruning_rate, read_files
from stepprune_jax.benchmarks.answers import read_answers
from stepprune_jax.data.json_files import JsonObject
from stepprune_jax.evaluation.names import ALL, row_place


class RowAnswers(NamedTuple):
    """Selections and answers of one table row, for each question. Made by `read_row_answers`.

    Attributes:
        method: name of the row.
        mode: "exact" or "adaptive".
        budget: tokens to keep, on average if adaptive; None for the learned stop.
        num_tokens: number of tokens of an image.
        count: [q] number of kept tokens.
        order: [q, t] kept tokens in the order of selection, or in row-major order for methods
            without an order; -1 is padding, or a merged or added token.
        correct: [q] whether the answer is correct.
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
        """Pruning rate in percent, of the budget or of the learned stop's mean count."""
        count = self.count.mean() if self.budget is None else self.budget
        return pruning_rate(float(count), self.num_tokens)


def read_row_answers(
    folder: Path, data: Path, labels: Sequence[str], ids: Sequence[str]
) -> list[RowAnswers]:
    """Reads the answer files that answer all questions, in the order of the table.

    Args:
        folder: folder of the answer files.
        data: data folder with the correct answers.
        labels: names of the methods in the order of the table.
        ids: ids of all questions.
    """

    def table_place(file: AnswerFile) -> tuple[bool | int | str, ...]:
        provenance = file.provenance
        return row_place(provenance.method, provenance.mode, provenance.budget, labels)

    rows = []
    for file in sorted(read_files(folder), key=table_place):
        provenance = file.provenance
        grade = BENCHMARKS[provenance.benchmark].make_grader(data)
        answers = {answer.id: answer for answer in read_answers(file.path, broken=[])}
        if not answers.keys() >= {*ids}:  # An interrupted run wrote this file.
            continue
        lines = [answers[name] for name in ids]
        count = np.array([line.fields["kept"] for line in lines], np.int32)
        order = np.full((len(lines), max(1, int(count.max(initial=0)))), -1, np.int16)
        for row, line in zip(order, lines, strict=True):
            all_tokens = range(line.fields["kept"]) if provenance.method == ALL else ()
            kept = line.fields.get("order", all_tokens)
            row[: len(kept)] = kept
        correct = np.array([grade(line) for line in lines], bool)
        rows.append(
            RowAnswers(
                method=provenance.method,
                mode=provenance.mode,
                budget=provenance.budget,
                num_tokens=provenance.num_tokens,
                count=count,
                order=order,
                correct=correct,
            )
        )
    return rows


def percent(correct: Bool[np.ndarray, "q"]) -> float:
    """Returns the percentage of true entries, to two decimals."""
    return round(100 * float(np.mean(correct)), 2)


def full_row(rows: Sequence[RowAnswers]) -> RowAnswers:
    """Returns the row that keeps all tokens, the reference of retention."""
    return next(row for row in rows if row.method == ALL)


def accuracy_table(rows: Sequence[RowAnswers], seed: int) -> list[JsonObject]:
    """Returns the table of rows, which have to include the row that keeps all tokens.

    Its columns are method, mode, pruning_rate, accuracy, retention, mean_k, questions and seed.
    """
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


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Returns Spearman's rank correlation of two samples; None if one of them is constant."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return round(float(scipy.stats.spearmanr(a, b).statistic), 4)


def stop_statistics(
    row: RowAnswers, scenes: Sequence[SceneFacts] | None, min_tokens: int, max_tokens: int
) -> dict[str, float | None]:
    """Returns statistics that tell a learned stop from a stop that is always at a bound.

    Args:
        row: answers of the learned stop; a row with exact counts has no statistics.
        scenes: facts about the image of each question, if available.
        min_tokens: smallest number of tokens of the stop.
        max_tokens: largest number of tokens of the stop.

    Returns:
        "spearman_relevant": rank correlation of kept and relevant patches. "at_bounds": percentage
        of questions at one of the bounds.
    """
    if row.mode == "exact":
        return {"spearman_relevant": None, "at_bounds": None}
    return {
        "spearman_relevant": None
        if scenes is None
        else spearman(row.count, np.array([len(scene.relevant) for scene in scenes])),
        "at_bounds": percent((row.count <= min_tokens) | (row.count >= max_tokens)),
    }
