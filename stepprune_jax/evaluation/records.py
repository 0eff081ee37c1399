"""Kept tokens and answers, question by question, from which a report can be redrawn."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from stepprune_jax.benchmarks.answer_files import budget_of_rate, pruning_rate
from stepprune_jax.data.array_files import INTEGERS, NUMBERS, TEXT, read_arrays

RECORDS = "records"
_AXES = {"count": 1, "order": 2, "answer": 1, "correct": 1}  # of the others: none
_KINDS = {
    **dict.fromkeys(("method", "mode", "answer"), TEXT),
    **dict.fromkeys(("budget", "num_tokens", "count", "order"), INTEGERS),
}
_FIELDS = ("method", "mode", "count", "order", "answer", "correct")
_OWN_STOP = -1  # the budget of a policy's own stop, in files


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
        answer: the model's answers.
        correct: [q] whether they are right.
    """

    method: str
    mode: str
    budget: int | None
    num_tokens: int
    count: Int[np.ndarray, "q"]
    order: Int[np.ndarray, "q t"]
    answer: list[str]
    correct: Bool[np.ndarray, "q"]

    @property
    def pruning_rate(self) -> float:
        """Pruning rate of the budget in percent; of the mean count for a policy's own stop."""
        count = self.count.mean() if self.budget is None else self.budget
        return pruning_rate(float(count), self.num_tokens)


def trimmed(order: Int[np.ndarray, "q t"], count: Int[np.ndarray, "q"]) -> Int[np.ndarray, "q k"]:
    """Trims an order to the largest count, with -1 past each count."""
    order = order[:, : max(1, int(count.max(initial=0)))]
    return np.where(np.arange(order.shape[1]) < count[:, None], order, -1).astype(np.int16)


def file_name(number: int, records: Records) -> str:
    """Returns a file name that sorts in the order of the table."""
    words = f"{records.method} {records.mode} {records.pruning_rate:g}".lower()
    return f"{number:02d}-{re.sub('[^a-z0-9.]+', '-', words).strip('-')}.npz"


def save_records(folder: str | Path, rows: Sequence[Records]) -> None:
    """Writes one compressed file per row; replaces the existing ones.

    Args:
        folder: the folder; created if missing.
        rows: in the order of the table.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.npz"):
        old.unlink()
    for number, row in enumerate(rows):
        budget = _OWN_STOP if row.budget is None else row.budget
        answer = np.array(row.answer, dtype=np.str_)
        arrays = row._asdict() | {"budget": budget, "answer": answer}
        np.savez_compressed(folder / file_name(number, row), **arrays)


def load_records(folder: str | Path) -> list[Records]:
    """Reads the files of `save_records`.

    Args:
        folder: the folder.

    Returns:
        The rows in the order of the table.

    Raises:
        FileNotFoundError: no such files.
        ValueError: a file that is damaged or lacks a field.
    """
    files = sorted(Path(folder).glob("*.npz"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no records; run eval.py first")
    rows = [_read_arrays(file) for file in files]
    most = max(int(row["count"].max(initial=1)) for row in rows)  # N: some row keeps all tokens
    return [_records(row, most) for row in rows]


def _read_arrays(file: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a file."""
    data = read_arrays(file, lambda name: _KINDS.get(name, NUMBERS))
    missing = [name for name in _FIELDS if name not in data]
    if missing:
        raise ValueError(f"{file} lacks {', '.join(missing)}")
    if not ("pruning_rate" in data or {"budget", "num_tokens"} <= {*data}):
        raise ValueError(f"{file} lacks budget, num_tokens")
    for name, array in data.items():
        axes, rows = _AXES.get(name, 0), data["count"].shape[:1]
        if array.ndim != axes or (axes and array.shape[:1] != rows):
            raise ValueError(
                f"{file}: {name} is {list(array.shape)}, expected {axes} axes, the first as long "
                "as that of count"
            )
    if not data["count"].size or (data["count"] < 0).any():
        raise ValueError(f"{file}: count has no rows, or some below 0")
    if data.get("num_tokens", 1) < 1 or np.isnan(data.get("pruning_rate", 0)):
        raise ValueError(f"{file}: num_tokens is below 1, or pruning_rate is not a number")
    return data


def _records(row: dict[str, np.ndarray], most: int) -> Records:
    """Builds a row from its arrays; in files with a pruning rate, N is the largest count."""
    method, mode, count = str(row["method"]), str(row["mode"]), row["count"]
    if "budget" in row:
        budget, num_tokens = int(row["budget"]), int(row["num_tokens"])
        budget = None if budget == _OWN_STOP else budget
    else:
        rate, num_tokens = float(row["pruning_rate"]), most
        budget = budget_of_rate(method, rate, num_tokens)
        budget = int(count[0]) if mode == "exact" else budget
    answer, correct = row["answer"].tolist(), row["correct"]
    return Records(method, mode, budget, num_tokens, count, row["order"], answer, correct)
