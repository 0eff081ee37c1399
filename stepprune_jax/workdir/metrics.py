"""Scalars of a run: JSON lines, standard output, TensorBoard and Weights & Biases."""

import contextlib
import json
import logging
import math
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from stepprune_jax.data.json_files import file_named, parse_json, write_json_lines

_LOG = logging.getLogger(__name__)

METRICS, VALIDATION = "metrics.jsonl", "validation.jsonl"
_WANDB_ID = "wandb.id"


@runtime_checkable
class Board(Protocol):
    """A further destination of scalars."""

    def add(self, scalars: dict[str, float | int], step: int) -> None:
        """Adds scalars by name."""

    def close(self) -> None:
        """Writes pending scalars."""


class MetricsLog:
    """Writes a line for each logged step; a resumed run continues after its checkpoint."""

    def __init__(
        self, workdir: Path, step: int, steps: int, batch_size: int, boards: Sequence[Board] = ()
    ):
        """Drops lines after `step`, which will be written again, and opens the files.

        Args:
            workdir: folder of the run.
            step: updates done.
            steps: updates of the whole run.
            batch_size: rows of a batch.
            boards: other destinations; closed with the log.
        """
        self._paths = {name: workdir / name for name in (METRICS, VALIDATION)}
        if step and not self._paths[METRICS].exists():
            path = self._paths[METRICS]
            _LOG.warning("%s is missing: it will start after step %d", path, step)
        for path in self._paths.values():
            keep_until(path, step)
        self._steps, self._batch_size, self._boards = steps, batch_size, boards
        self._begin, self._first = time.perf_counter(), step

    def start_clock(self, step: int):
        """Starts measuring speed, once programs are compiled."""
        self._begin, self._first = time.perf_counter(), step

    def write(self, step: int, scalars: dict[str, Any]):
        """Fetches the scalars of an update and writes them.

        Args:
            step: updates done, including this one.
            scalars: scalars by name, on device.
        """
        row = {"step": step} | {k: float(v) for k, v in jax.device_get(scalars).items()}
        seconds, done = time.perf_counter() - self._begin, step - self._first
        rate = done * self._batch_size / seconds if done else 0.0
        row["images_per_s"] = round(rate, 2)
        row |= {name: int(row[name]) for name in ("skipped", "skipped_in_row") if name in row}
        left = seconds / done * (self._steps - step) if done else None
        _LOG.info(_line(self._append(METRICS, row), self._steps, left))

    def write_validation(self, row: dict[str, float | int]):
        """Writes the results of a validation, whose time is excluded from training.

        Args:
            row: "step", "seconds" and scalars by name.
        """
        self._begin += row["seconds"]
        line = _line(self._append(VALIDATION, row, "validation/"), self._steps, None)
        _LOG.info("%s  (%d questions)", line, row["questions"])

    def _append(self, name: str, row: dict[str, float | int], prefix: str = "") -> dict[str, Any]:
        """Appends a line to a file and the boards; returns the row as written."""
        # JSON has no NaN; None marks a number that was not finite.
        row = {k: v if math.isfinite(v) else None for k, v in row.items()}
        path = self._paths[name]
        with file_named(path), path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = {prefix + k: v for k, v in row.items() if k != "step" and v is not None}
        for board in self._boards:
            board.add(shown, row["step"])
        return row

    def close(self):
        """Closes the boards."""
        for board in self._boards:
            board.close()


# Parts of a line: a text, and its scalars with their digits.
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
    """Formats a line for display."""

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
    """Reads the complete lines of a log that have a step; none if there is no file."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        # A killed run may have left an incomplete last line.
        with contextlib.suppress(ValueError):
            row = parse_json(line, str(path))
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


def keep_until(path: Path, step: int):
    """Drops lines of later steps and an incomplete last one; replaces the file atomically."""
    if not path.exists():
        return
    write_json_lines(path, [row for row in read_rows(path) if row["step"] <= step])


class _TensorBoard:
    """Events under workdir/tensorboard; drops those after the step to resume from."""

    def __init__(self, workdir: Path, step: int):
        self._writer = _summary_writer()(str(workdir / "tensorboard"), purge_step=step + 1)

    def add(self, scalars: dict[str, float | int], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of a Weights & Biases project, which a resumed run continues."""

    def __init__(self, project: str, workdir: Path, fields: dict[str, Any]):
        path = workdir / _WANDB_ID
        if not path.is_file():
            path.write_text(uuid.uuid4().hex)
        self._run = _wandb().init(
            project=project,
            name=workdir.name,
            id=path.read_text(),
            resume="allow",
            dir=str(workdir),
            config=fields,
        )

    def add(self, scalars: dict[str, float | int], step: int) -> None:
        self._run.log(scalars, step=step)

    def close(self) -> None:
        self._run.finish()


def check_boards(tensorboard: bool, wandb: str) -> None:
    """Checks that the packages of boards are installed.

    Args:
        tensorboard: `config.tensorboard`, whether to write TensorBoard's events.
        wandb: `config.wandb`, a project of Weights & Biases, or empty for none.

    Raises:
        ValueError: a package is missing; the message gives a remedy.
    """
    if tensorboard:
        _summary_writer()
    if wandb:
        _wandb()


def open_boards(
    tensorboard: bool, wandb: str, workdir: Path, step: int, fields: dict[str, Any]
) -> list[Board]:
    """Opens the boards of a configuration.

    Args:
        tensorboard: as in `check_boards`.
        wandb: as in `check_boards`.
        workdir: folder of the run.
        step: updates done.
        fields: the configuration by dotted name, for display.

    Raises:
        ValueError: a package is missing.
    """
    boards: list[Board] = []
    if tensorboard:
        boards.append(_TensorBoard(workdir, step))
    if wandb:
        boards.append(_Wandb(wandb, workdir, fields))
    return boards


def _summary_writer() -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "config.tensorboard is set, but tensorboardX is not installed: pip install "
            "tensorboardX, or set it to False; metrics.jsonl has the same numbers"
        ) from error
    return SummaryWriter


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            "config.wandb names a project, but wandb is not installed: pip install wandb, or leave "
            "it empty; metrics.jsonl has the same numbers"
        ) from error
    return wandb
