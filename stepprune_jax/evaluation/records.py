"""What was kept and answered, question by question, in files from which a report can be redrawn."""

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

RECORDS = "records"
_FIELDS = ("method", "mode", "pruning_rate", "count", "order", "answer", "correct")


class Records(NamedTuple):
    """The questions of one table row.

    Attributes:
        method: name of the row.
        mode: "exact" or "adaptive".
        pruning_rate: nominal, in percent.
        count: [q] tokens kept.
        order: [q, t] token indices in order of choice (raster order for methods without one), -1
            behind the count.
        answer: what was answered.
        correct: [q] whether that is right.
    """

    method: str
    mode: str
    pruning_rate: float
    count: Int[np.ndarray, "q"]
    order: Int[np.ndarray, "q t"]
    answer: list[str]
    correct: Bool[np.ndarray, "q"]


def trimmed(order: Int[np.ndarray, "q t"], count: Int[np.ndarray, "q"]) -> Int[np.ndarray, "q k"]:
    """An order cut to the largest count, with -1 behind each count."""
    order = order[:, : max(1, int(count.max(initial=0)))]
    return np.where(np.arange(order.shape[1]) < count[:, None], order, -1).astype(np.int16)


def file_name(number: int, records: Records) -> str:
    """A name that sorts as the table does and says what is inside."""
    words = f"{records.method} {records.mode} {records.pruning_rate:g}".lower()
    return f"{number:02d}-{re.sub('[^a-z0-9.]+', '-', words).strip('-')}.npz"


def save_records(folder: str | Path, rows: Sequence[Records]) -> None:
    """Writes one compressed file per row, in place of those that are there.

    Args:
        folder: where; created if needed.
        rows: in the order of the table.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.npz"):
        old.unlink()
    for number, row in enumerate(rows):
        arrays = row._asdict() | {"answer": np.array(row.answer, dtype=np.str_)}
        np.savez_compressed(folder / file_name(number, row), **arrays)


def load_records(folder: str | Path) -> list[Records]:
    """Reads what `save_records` wrote.

    Args:
        folder: the same.

    Returns:
        The rows in the order of the table.

    Raises:
        FileNotFoundError: no such files.
        ValueError: a file that is damaged or lacks a field.
    """
    files = sorted(Path(folder).glob("*.npz"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no records; run eval.py first")
    return [_load(file) for file in files]


def _load(file: Path) -> Records:
    try:
        # Opened here: of a damaged file, numpy would leave it open.
        with file.open("rb") as handle, np.load(handle, allow_pickle=False) as data:
            missing = [name for name in _FIELDS if name not in data]
            if missing:
                raise ValueError(f"{file} lacks {', '.join(missing)}")
            found = {name: data[name] for name in _FIELDS}
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} is not a file of records: {error}") from error
    return Records(
        method=str(found["method"]), mode=str(found["mode"]),
        pruning_rate=float(found["pruning_rate"]), count=found["count"], order=found["order"],
        answer=found["answer"].tolist(), correct=found["correct"],
    )  # fmt: skip
