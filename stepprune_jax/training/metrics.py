"""Scalars of a run: metrics.jsonl, standard output and, if asked for, TensorBoard."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import jax


class MetricsLog:
    """Writes a line per logged step; a resumed run continues where its checkpoint was."""

    def __init__(self, workdir: Path, step: int, steps: int, batch_size: int, tensorboard: bool):
        """Drops lines beyond `step`, which will be written again, and opens the file.

        Args:
            workdir: folder of the run.
            step: updates done.
            steps: of the whole run.
            batch_size: rows of a batch.
            tensorboard: whether to write events under workdir/tensorboard as well.
        """
        path = workdir / "metrics.jsonl"
        keep_until(path, step)
        self._file = path.open("a")
        self._steps, self._batch_size = steps, batch_size
        self._begin, self._first = time.perf_counter(), step
        self._board = summary_writer(workdir / "tensorboard") if tensorboard else None

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
        if "skipped" in row:
            row["skipped"] = int(row["skipped"])
        # JSON has no NaN; None says that the number was not finite.
        row = {k: v if math.isfinite(v) else None for k, v in row.items()}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        left = seconds / done * (self._steps - step) if done else None
        print(_line(row, self._steps, left), flush=True)
        if self._board is not None:
            for name, value in row.items():
                if name != "step" and value is not None:
                    self._board.add_scalar(name, value, step)

    def close(self):
        """Closes the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


class NoLog:
    """A `MetricsLog` that writes nothing, for all processes but the main one."""

    def __init__(self, *_):
        pass

    def start_clock(self, step: int):
        """Does nothing."""

    def write(self, step: int, scalars: dict[str, Any]):
        """Does nothing."""

    def close(self):
        """Does nothing."""


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


def keep_until(path: Path, step: int):
    """Drops lines of later steps, and a last one that was cut short; replaces the file at once."""
    kept = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row["step"] <= step:
            kept.append(line + "\n")
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept))
    os.replace(partial, path)


def summary_writer(folder: Path) -> Any:
    """A TensorBoard writer.

    Args:
        folder: where events go.

    Returns:
        A `tensorboardX.SummaryWriter`.

    Raises:
        ValueError: tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "config.tensorboard is set, but tensorboardX is not installed: pip install "
            "tensorboardX, or set it to False; metrics.jsonl has the same numbers"
        ) from error
    return SummaryWriter(str(folder))
