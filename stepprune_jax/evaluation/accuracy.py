"""Accuracy and retention of every row of the shapes world, as JSON, Markdown and CSV."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from stepprune_jax.data.json_files import write_json
from stepprune_jax.data.llava import Question
from stepprune_jax.evaluation.cells import csv_table, markdown_rows
from stepprune_jax.evaluation.names import ALL
from stepprune_jax.evaluation.records import Records


def percent(correct: Bool[np.ndarray, "q"]) -> float:
    """Computes the share of true entries in percent, to two decimals."""
    return round(100 * float(np.mean(correct)), 2)


def retention(correct: Bool[np.ndarray, "q"], whole: Bool[np.ndarray, "q"]) -> float | None:
    """Returns accuracy over that of all tokens on the same questions in percent; None over 0."""
    return round(100 * float(np.sum(correct) / np.sum(whole)), 2) if np.any(whole) else None


def full_row(rows: Sequence[Records]) -> Records:
    """Finds the row that keeps all tokens.

    Raises:
        ValueError: no row does.
    """
    full = [row for row in rows if row.method == ALL]
    if not full:
        raise ValueError(f"the rows lack {ALL!r}, the reference of retention")
    return full[0]


def accuracy_table(
    rows: Sequence[Records], seed: int, costs: Sequence[Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Tabulates rows: method, mode, rate, accuracy, retention, mean K, costs, questions, seed.

    Args:
        rows: the records of each row.
        seed: seed of the run.
        costs: costs of each row by name; the names become further columns.

    Raises:
        ValueError: no row keeps all tokens.
    """
    whole = full_row(rows).correct
    return [
        {
            "method": row.method,
            "mode": row.mode,
            "pruning_rate": row.pruning_rate,
            "accuracy": percent(row.correct),
            "retention": retention(row.correct, whole),
            "mean_k": round(float(row.count.mean()), 2),
            **cost,
            "questions": len(row.correct),
            "seed": seed,
        }
        for row, cost in zip(rows, costs or [{}] * len(rows), strict=True)
    ]


def families(questions: Sequence[Question]) -> dict[str, Bool[np.ndarray, "q"]]:
    """Returns which questions belong to each family, in alphabetical order; "other" if unnamed."""
    category = np.array([question.category or "other" for question in questions])
    return {str(name): category == name for name in np.unique(category)}


def accuracy_by_family(
    rows: Sequence[Records], questions: Sequence[Question]
) -> list[dict[str, Any]]:
    """Tabulates rows as `accuracy_table`, for every family of questions."""
    whole = full_row(rows).correct
    return [
        {
            "method": row.method,
            "mode": row.mode,
            "pruning_rate": row.pruning_rate,
            "families": {
                name: {
                    "accuracy": percent(row.correct[at]),
                    "retention": retention(row.correct[at], whole[at]),
                    "mean_k": round(float(row.count[at].mean()), 2),
                    "questions": int(at.sum()),
                }
                for name, at in families(questions).items()
            },
        }
        for row in rows
    ]


def write_accuracy(folder: Path, table: list[dict], by_family: list[dict]) -> None:
    """Writes table.{json,md,csv} and table_by_family.{json,md}."""
    write_json(folder / "table.json", table)
    write_json(folder / "table_by_family.json", by_family)
    (folder / "table.md").write_text(markdown_table(table), encoding="utf-8")
    (folder / "table.csv").write_text(csv_table(table), encoding="utf-8", errors="backslashreplace")
    names = list(by_family[0]["families"])
    head = ("method", "mode", "pruning_rate")
    cells = [
        [*(row[name] for name in head), *(row["families"][name]["accuracy"] for name in names)]
        for row in by_family
    ]
    header = [*(name.replace("_", " ") for name in head), *names]
    (folder / "table_by_family.md").write_text(markdown_rows(header, cells), encoding="utf-8")


def markdown_table(table: Sequence[dict[str, Any]]) -> str:
    """Formats objects with the same fields as a Markdown table; numbers are right-aligned."""
    header = [name.replace("_", " ") for name in table[0]]
    return markdown_rows(header, [list(row.values()) for row in table])
