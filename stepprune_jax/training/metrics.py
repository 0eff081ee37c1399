"""Scalars of a run: files of JSON lines, standard output and, if asked for, boards."""

import contextlib
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from stepprune_jax.training.boards import Board

METRICS, VALIDATION = "metrics.jsonl", "validation.jsonl"


class MetricsLog:
    """Writes a line per logged step; a resumed run continues where its checkpoint was."""

    def __init__(
        self, workdir: Path, step: int, steps: int, batch_size: int, boards: Sequence[Board] = ()
    ):
        """Drops lines beyond `step`, which will be written again, and opens the files.

        Args:
            workdir: folder of the run.
            step: updates done.
            steps: of the whole run.
            batch_size: rows of a batch.
            boards: where scalars go besides; closed with the log.
        """
        self._paths = {name: workdir / name for name in (METRICS, VALIDATION)}
        for path in self._paths.values():
            keep_until(path, step)
        self._steps, self._batch_size, self._boards = steps, batch_size, boards
        self._begin, self._first = time.perf_counter(), step

    def start_clock(self, step: int):
        """Measures speed from here on, where programs are compiled."""
        self._begin, self._first = time.perf_counter(), step

    def write(self, step: int, scalars: dict[str, Any]):
        """Fetches the scalars of an update and writes them.

        Args:
            step: updates done, this one included.
            scalars: by name, on device.
        """
        row = {"step": step} | {k: float(v) for k, v in jax.device_get(scalars).items()}
        seconds, done = time.perf_counter() - self._begin, step - self._first
        rate = done * self._batch_size / seconds if done else 0.0
        row["images_per_s"] = round(rate, 2)
        row |= {name: int(row[name]) for name in ("skipped", "skipped_in_row") if name in row}
        left = seconds / done * (self._steps - step) if done else None
        print(_line(self._append(METRICS, row), self._steps, left), flush=True)

    def write_validation(self, row: dict[str, float | int]):
        """Writes what a look at other questions found; its time does not count as training.

        Args:
            row: "step", "seconds" and scalars by name.
        """
        self._begin += row["seconds"]
        told = _line(self._append(VALIDATION, row, "validation/"), self._steps, None)
        print(f"{told}  ({row['questions']} questions)", flush=True)

    def _append(self, name: str, row: dict[str, float | int], prefix: str = "") -> dict[str, Any]:
        """Adds a line to a file and shows it on the boards; the row as it was written."""
        # JSON has no NaN; None says that the number was not finite.
        row = {k: v if math.isfinite(v) else None for k, v in row.items()}
        with self._paths[name].open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = {prefix + k: v for k, v in row.items() if k != "step" and v is not None}
        for board in self._boards:
            board.add(shown, row["step"])
        return row

    def close(self):
        """Closes the boards."""
        for board in self._boards:
            board.close()


# What people read of a row, as far as it is there: a name, and the scalars with their digits.
_SHOWN = (
    ("loss {}", {"loss": 3}),
    ("lm {}", {"lm_loss": 3}),
    ("told {}", {"told": 3}),
    ("kind {}", {"class_kind": 3}),
    ("color {}", {"class_color": 3}),
    ("K {} +- {}", {"k_mean": 1, "k_std": 1}),
    ("alpha {}/{}", {"alpha_in": 2, "alpha_out": 2}),
    ("IoU {}", {"iou": 2}),
    ("grad {}", {"grad_norm": 2}),
    ("accuracy {} %", {"accuracy": 1}),
    ("{} images/s", {"images_per_s": 0}),
)


def _line(row: dict[str, Any], steps: int, left: float | None) -> str:
    """One line for people."""

    def shown(name: str, digits: int) -> str:
        value = row[name]
        return "nan" if value is None else f"{value:.{digits}f}"

    parts = [f"step {row['step']:>{len(str(steps))}}/{steps}"]
    for text, scalars in _SHOWN:
        if all(name in row for name in scalars):
            parts.append(text.format(*(shown(*scalar) for scalar in scalars.items())))
    if row.get("skipped"):
        parts.append(f"{row['skipped']} skipped")
    if left is not None:
        parts.append(f"{int(left) // 60}:{int(left) % 60:02d} left")
    return "  ".join(parts)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Lines of a log that are whole and have a step; none if there is no file."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        # A run that was killed may have cut its last line short.
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


def keep_until(path: Path, step: int):
    """Drops lines of later steps, and a last one that was cut short; replaces the file at once."""
    if not path.exists():
        return
    kept = [json.dumps(row) + "\n" for row in read_rows(path) if row["step"] <= step]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept))
    os.replace(partial, path)
