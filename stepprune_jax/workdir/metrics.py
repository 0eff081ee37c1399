"""Scalars of a run: JSON lines, standard output, TensorBoard and Weights & Biases."""

import contextlib
import importlib
import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import jax

from stepprune_jax.data.json_files import JsonObject, file_named, parse_json, write_json_lines
from stepprune_jax.user_input import UserError

_LOG = logging.getLogger(__name__)

METRICS, VALIDATION = "metrics.jsonl", "validation.jsonl"
_WANDB_ID = "wandb.id"
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
# Parts of a line on standard output: a text, and its scalars with their digits.
_SHOWN = (
    ("loss {}", {"loss": 3}),
    ("lm {}", {"lm_loss": 3}),
    (
        "all {} none {} random {} other {}",
        {"loss_all": 3, "loss_none": 3, "loss_random": 3, "loss_other_question": 3},
    ),
    ("reward {}", {"reward": 3}),
    ("told {}", {"told": 3}),
    ("kind {}", {"class_kind": 3}),
    ("color {}", {"class_color": 3}),
    ("K {} +- {}", {"k_mean": 1, "k_std": 1}),
    ("at minimum/T_max {}/{}", {"k_floor": 2, "k_cap": 2}),
    ("alpha {}/{}", {"alpha_in": 2, "alpha_out": 2}),
    ("IoU {}", {"iou": 2}),
    ("grad {}", {"grad_norm": 2}),
    ("accuracy {} %", {"accuracy": 1}),
    ("{} images/s", {"images_per_s": 0}),
)


class Board(NamedTuple):
    """A further destination of scalars: `add(scalars, step)` and `close()`."""

    add: Callable[[dict[str, float | int], int], None]
    close: Callable[[], None]


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
        self.start_clock(step)

    def start_clock(self, step: int):
        """Starts measuring speed, once programs are compiled."""
        self._begin, self._first = time.perf_counter(), step

    def write(self, step: int, scalars: Mapping[str, jax.Array | float], phase: str = ""):
        """Fetches the scalars of an update from the device and writes them.

        The line on standard output names the `phase` of the run, where there are any.
        """
        row = {"step": step} | {k: float(v) for k, v in jax.device_get(scalars).items()}
        seconds, done = time.perf_counter() - self._begin, step - self._first
        rate = done * self._batch_size / seconds if done else 0.0
        row["images_per_s"] = round(rate, 2)
        row |= {name: int(row[name]) for name in ("skipped", "skipped_in_row") if name in row}
        line = self._append(METRICS, row, phase=phase)
        if done:
            left = int(seconds / done * (self._steps - step))
            line += f"  {left // 60}:{left % 60:02d} left"
        _LOG.info(line)

    def write_validation(self, row: dict[str, float | int]):
        """Writes the results of a validation, whose time is excluded from training."""
        self._begin += row["seconds"]
        line = self._append(VALIDATION, row, "validation/")
        _LOG.info("%s  (%d questions)", line, row["questions"])

    def _append(
        self, name: str, row: dict[str, float | int], prefix: str = "", phase: str = ""
    ) -> str:
        """Appends a row to a file and the boards; returns it as a line for display."""
        # JSON has no NaN; None marks a number that was not finite.
        row = {k: v if math.isfinite(v) else None for k, v in row.items()}
        path = self._paths[name]
        with file_named(path), path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = {prefix + k: v for k, v in row.items() if k != "step" and v is not None}
        for board in self._boards:
            board.add(shown, row["step"])
        parts = [f"step {row['step']:>{len(str(self._steps))}}/{self._steps}"]
        parts += [phase] if phase else []
        for text, digits in _SHOWN:
            if digits.keys() <= row.keys():
                values = ((row[name], count) for name, count in digits.items())
                parts.append(
                    text.format(*("nan" if v is None else f"{v:.{n}f}" for v, n in values))
                )
        parts += [f"{row['skipped']} skipped"] if row.get("skipped") else []
        return "  ".join(parts)

    def close(self):
        """Closes the boards."""
        for board in self._boards:
            board.close()


def read_rows(path: Path) -> list[JsonObject]:
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
    if path.exists():
        write_json_lines(path, [row for row in read_rows(path) if row["step"] <= step])


def open_boards(
    tensorboard: bool, wandb: str, workdir: Path, step: int, fields: JsonObject
) -> list[Board]:
    """Opens TensorBoard's events and a run of a Weights & Biases project, if requested.

    A resumed run continues the same events, without those after its step, and the same run.

    Args:
        tensorboard: `config.tensorboard`, whether to write workdir/tensorboard.
        wandb: `config.wandb`, a project, or empty for none.
        workdir: folder of the run.
        step: updates done.
        fields: the configuration by dotted name, for display.

    Raises:
        ValueError: a package is missing.
    """
    boards = []
    if tensorboard:
        folder = str(workdir / "tensorboard")
        writer = _package("tensorboard").SummaryWriter(folder, purge_step=step + 1)

        def add(scalars, step):
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)

        boards.append(Board(add, writer.close))
    if wandb:
        path = workdir / _WANDB_ID
        if not path.is_file():
            path.write_text(uuid.uuid4().hex)
        run = _package("wandb").init(
            project=wandb,
            name=workdir.name,
            id=path.read_text(),
            resume="allow",
            dir=str(workdir),
            config=fields,
        )
        boards.append(Board(lambda scalars, step: run.log(scalars, step=step), run.finish))
    return boards


def check_boards(tensorboard: bool, wandb: str) -> None:
    """Raises a ValueError if the package of a requested board is missing."""
    for field, requested in (("tensorboard", tensorboard), ("wandb", wandb)):
        if requested:
            _package(field)


def _package(field: str) -> ModuleType:
    """Imports the package that a field of the configuration needs."""
    name = _PACKAGES[field]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"config.{field} is set, but {name} is not installed: pip install {name}, or unset it; "
            f"{METRICS} has the same numbers"
        ) from error
