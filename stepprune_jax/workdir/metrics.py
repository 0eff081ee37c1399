"""Writes the scalars of a run: JSON lines, the log, TensorBoard and Weights & Biases."""

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
# Parts of a log line: a template, and its scalars with their decimal places. A part is printed if
# the row has all its scalars.
_LINE_PARTS = (
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
    """Another destination of scalars.

    Attributes:
        add: takes scalars by name, and the step.
        close: flushes and closes the destination.
    """

    add: Callable[[dict[str, float | int], int], None]
    close: Callable[[], None]


class MetricsLog:
    """Writes one row per logged step. A resumed run continues after its checkpoint."""

    def __init__(
        self, workdir: Path, step: int, steps: int, batch_size: int, boards: Sequence[Board] = ()
    ):
        """Removes rows after `step`, because the resumed run writes them again.

        Args:
            workdir: folder of the run.
            step: number of updates so far.
            steps: number of updates of the complete run.
            batch_size: rows of a batch.
            boards: other destinations, which are closed with the log.
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
        """Restarts the measurement of speed at a step; called once the programs are compiled."""
        self._start_time, self._start_step = time.perf_counter(), step

    def write(self, step: int, scalars: Mapping[str, jax.Array | float], phase: str = ""):
        """Fetches the scalars of an update from the device and writes them.

        Args:
            step: number of updates.
            scalars: the scalars by name.
            phase: name of the training phase for the log line; "" without phases.
        """
        row = {"step": step} | {
            name: float(value) for name, value in jax.device_get(scalars).items()
        }
        seconds, num_updates = time.perf_counter() - self._start_time, step - self._start_step
        rate = num_updates * self._batch_size / seconds if num_updates else 0.0
        row["images_per_s"] = round(rate, 2)
        row |= {name: int(row[name]) for name in ("skipped", "skipped_in_row") if name in row}
        line = self._append(METRICS, row, phase=phase)
        if num_updates:
            seconds_left = int(seconds / num_updates * (self._steps - step))
            line += f"  {seconds_left // 60}:{seconds_left % 60:02d} left"
        _LOG.info(line)

    def write_validation(self, row: dict[str, float | int]):
        """Writes the results of a validation. The speed of training excludes its time."""
        self._start_time += row["seconds"]
        line = self._append(VALIDATION, row, "validation/")
        _LOG.info("%s  (%d questions)", line, row["questions"])

    def _append(
        self, name: str, row: dict[str, float | int], prefix: str = "", phase: str = ""
    ) -> str:
        """Appends a row to a file and to the boards.

        Args:
            name: name of the file.
            row: the row.
            prefix: prefix of the scalars' names on the boards.
            phase: name of the training phase for the log line.

        Returns:
            The row as a line for the log.
        """
        # JSON has no NaN. None replaces numbers that are not finite.
        row = {key: value if math.isfinite(value) else None for key, value in row.items()}
        path = self._paths[name]
        with file_named(path), path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        finite_values = {
            prefix + key: value for key, value in row.items() if key != "step" and value is not None
        }
        for board in self._boards:
            board.add(finite_values, row["step"])
        parts = [f"step {row['step']:>{len(str(self._steps))}}/{self._steps}"]
        parts += [phase] if phase else []
        for template, digits in _LINE_PARTS:
            if digits.keys() <= row.keys():
                values = ((row[name], precision) for name, precision in digits.items())
                texts = ("nan" if value is None else f"{value:.{n}f}" for value, n in values)
                parts.append(template.format(*texts))
        parts += [f"{row['skipped']} skipped"] if row.get("skipped") else []
        return "  ".join(parts)

    def close(self):
        """Closes the boards."""
        for board in self._boards:
            board.close()


def read_rows(path: Path) -> list[JsonObject]:
    """Reads the rows of a log file. Lines that are incomplete or lack a step are skipped.

    A missing file has no rows.
    """
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        # A killed run may have left an incomplete last line.
        with contextlib.suppress(ValueError):
            row = parse_json(line, str(path))
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


def keep_until(path: Path, step: int):
    """Removes rows after `step` and an incomplete last line. Replaces the file atomically."""
    if path.exists():
        write_json_lines(path, [row for row in read_rows(path) if row["step"] <= step])


def open_boards(
    tensorboard: bool, wandb: str, workdir: Path, step: int, fields: JsonObject
) -> list[Board]:
    """Opens the requested boards. A resumed run continues its boards after `step`.

    Args:
        tensorboard: `config.tensorboard`, whether to write workdir/tensorboard.
        wandb: `config.wandb`, a project of Weights & Biases; "" opens none.
        workdir: folder of the run.
        step: number of updates so far.
        fields: the configuration by dotted name, for display.

    Raises:
        UserError: a package is missing.
    """
    boards = []
    if tensorboard:
        folder = str(workdir / "tensorboard")
        writer = _import_board("tensorboard").SummaryWriter(folder, purge_step=step + 1)

        def add(scalars, step):
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)

        boards.append(Board(add, writer.close))
    if wandb:
        path = workdir / _WANDB_ID
        if not path.is_file():
            path.write_text(uuid.uuid4().hex)
        run = _import_board("wandb").init(
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
    """Raises a UserError if the package of a requested board is missing."""
    for field, is_requested in (("tensorboard", tensorboard), ("wandb", wandb)):
        if is_requested:
            _import_board(field)


def _import_board(field: str) -> ModuleType:
    """Imports the package of a board, which a field of the configuration requests."""
    name = _PACKAGES[field]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"config.{field} is set, but {name} is not installed: pip install {name}, or unset it; "
            f"{METRICS} has the same numbers"
        ) from error
