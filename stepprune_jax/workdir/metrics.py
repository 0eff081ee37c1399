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


class LinePart(NamedTuple):
    """A part of a log line, which is printed if the row has all its scalars.

    Attributes:
        template: text with a place for each scalar.
        decimals: number of decimal places by name of the scalar.
        meaning: what the numbers are, and how they develop in a healthy run. Printed before the
            first line that has the part; "" prints nothing.
    """

    template: str
    decimals: Mapping[str, int]
    meaning: str = ""


_LINE_PARTS = (
    LinePart(
        "loss {}",
        {"loss": 3},
        "the objective; falls through the gate and in the warm start, and says little by RLOO",
    ),
    LinePart(
        "lm {}",
        {"lm_loss": 3},
        "loss of the correct answer, nats per token; falls towards the loss with all tokens",
    ),
    LinePart(
        "all {} none {} random {} other {}",
        {"loss_all": 3, "loss_none": 3, "loss_random": 3, "loss_other_question": 3},
        "loss with all tokens, no token, as many random tokens, and the tokens for another "
        "question; the policy's loss is near `all` and clearly below the others",
    ),
    LinePart(
        "reward {}",
        {"reward": 3},
        "mean probability of the answer from a sampled subset; rises",
    ),
    LinePart(
        "covered {}",
        {"covered": 2},
        "fraction of the importance in eight sampled tokens; rises",
    ),
    LinePart("told {}", {"told": 3}),
    LinePart("kind {}", {"class_kind": 3}),
    LinePart("color {}", {"class_color": 3}),
    LinePart(
        "K {} +- {}",
        {"k_mean": 1, "k_std": 1},
        "tokens that the learned stop keeps, mean and deviation; settles, and differs by question",
    ),
    LinePart(
        "at minimum/T_max {}/{}",
        {"k_floor": 2, "k_cap": 2},
        "fractions of rows that keep the fewest and the most tokens allowed; both below 0.9",
    ),
    LinePart(
        "alpha {}/{}",
        {"alpha_in": 2, "alpha_out": 2},
        "mean gate of kept and of dropped tokens; towards 1 and 0",
    ),
    LinePart(
        "IoU {}",
        {"iou": 2},
        "overlap of the kept tokens with those whose gate is above 1/2; towards 1",
    ),
    LinePart(
        "grad {}",
        {"grad_norm": 2},
        "norm of the gradient before clipping; finite, without a lasting rise",
    ),
    LinePart("accuracy {} %", {"accuracy": 1}, "right answers; rises towards those of all tokens"),
    LinePart("{} images/s", {"images_per_s": 0}, "speed, without compiling and validating"),
)


class Board(NamedTuple):
    """A service that plots scalars: TensorBoard or Weights & Biases. Made by `open_boards`.

    Attributes:
        add: adds the scalars of a step; takes the scalars by name, and the step.
        close: writes pending scalars and closes the board.
    """

    add: Callable[[dict[str, float | int], int], None]
    close: Callable[[], None]


class MetricsLog:
    """Writes one row of scalars per logged step to files, the log and boards."""

    def __init__(
        self, workdir: Path, step: int, steps: int, batch_size: int, boards: Sequence[Board] = ()
    ):
        """Opens the log of a new or resumed run.

        Removes rows after `step`, because a resumed run writes these rows again.

        Args:
            workdir: folder of the run.
            step: number of updates so far.
            steps: number of updates of the complete run.
            batch_size: number of images per update, for the speed.
            boards: boards that get the same scalars. `close` closes them.
        """
        self._paths = {name: workdir / name for name in (METRICS, VALIDATION)}
        if step and not self._paths[METRICS].exists():
            path = self._paths[METRICS]
            _LOG.warning("%s is missing: it will start after step %d", path, step)
        for path in self._paths.values():
            keep_until(path, step)
        self._steps, self._batch_size, self._boards = steps, batch_size, boards
        self._explained_parts: set[str] = set()  # templates
        self.start_clock(step)

    def start_clock(self, step: int):
        """Restarts the measurement of speed at a step. Called when the programs are compiled."""
        self._start_time, self._start_step = time.perf_counter(), step

    def write(self, step: int, scalars: Mapping[str, jax.Array | float], phase: str = ""):
        """Fetches the scalars of an update from the device, and writes them with the speed.

        Args:
            step: number of updates.
            scalars: scalars of the update by name.
            phase: name of the training phase for the log line; "" without phases.
        """
        row = {"step": step} | {
            name: float(value) for name, value in jax.device_get(scalars).items()
        }
        seconds, num_updates = time.perf_counter() - self._start_time, step - self._start_step
        images_per_second = num_updates * self._batch_size / seconds if num_updates else 0.0
        row["images_per_s"] = round(images_per_second, 2)
        row |= {name: int(row[name]) for name in ("skipped", "skipped_in_row") if name in row}
        line = self._append(METRICS, row, phase=phase)
        if num_updates:
            seconds_left = int(seconds / num_updates * (self._steps - step))
            line += f"  {seconds_left // 60}:{seconds_left % 60:02d} left"
        _LOG.info(line)

    def write_validation(self, row: dict[str, float | int]):
        """Writes the results of a validation, whose time does not count for the speed of training.

        Args:
            row: scalars by name, among them "step", "seconds" and "questions".
        """
        self._start_time += row["seconds"]
        line = self._append(VALIDATION, row, "validation/")
        _LOG.info("%s  (%d questions)", line, row["questions"])

    def _append(
        self, name: str, row: dict[str, float | int], prefix: str = "", phase: str = ""
    ) -> str:
        """Appends a row to a file and to the boards, and formats it as a line for the log.

        Args:
            name: name of the file, `METRICS` or `VALIDATION`.
            row: scalars by name, among them "step".
            prefix: prefix of the scalars' names on the boards.
            phase: name of the training phase for the log line; "" without phases.

        Returns:
            The line for the log.
        """
        # JSON has no NaN. None replaces numbers that are not finite.
        finite_row = {key: value if math.isfinite(value) else None for key, value in row.items()}
        path = self._paths[name]
        with file_named(path), path.open("a") as file:
            file.write(json.dumps(finite_row) + "\n")
        scalars = {
            prefix + key: value
            for key, value in finite_row.items()
            if key != "step" and value is not None
        }
        for board in self._boards:
            board.add(scalars, int(row["step"]))
        self._explain(name, finite_row)
        return self._format_line(finite_row, phase)

    def _explain(self, file_name: str, row: Mapping[str, object]) -> None:
        """Logs the meaning of those parts of a line that no earlier line had.

        Args:
            file_name: name of the file that has the scalars, `METRICS` or `VALIDATION`.
            row: scalars by name.
        """
        new_parts = [
            part
            for part in _LINE_PARTS
            if part.decimals.keys() <= row.keys() and part.template not in self._explained_parts
        ]
        self._explained_parts.update(part.template for part in new_parts)
        lines = [
            f"  {' '.join(part.template.replace('{}', '').split())} "
            f"({', '.join(part.decimals)}): {part.meaning}"
            for part in new_parts
            if part.meaning
        ]
        if lines:
            title = f"Below, with the names in {file_name} and what a healthy run shows:"
            _LOG.info("\n".join([title, *lines]))

    def _format_line(self, row: dict[str, float | int | None], phase: str) -> str:
        """Formats a row as a line for the log, by the templates of `_LINE_PARTS`.

        Args:
            row: scalars by name, with None for numbers that are not finite.
            phase: name of the training phase; "" without phases.
        """
        step_width = len(str(self._steps))  # Aligns the steps of all lines.
        parts = [f"step {row['step']:>{step_width}}/{self._steps}"]
        parts += [phase] if phase else []
        for part in _LINE_PARTS:
            if part.decimals.keys() <= row.keys():
                texts = [
                    "nan" if row[name] is None else f"{row[name]:.{decimals}f}"
                    for name, decimals in part.decimals.items()
                ]
                parts.append(part.template.format(*texts))
        parts += [f"{row['skipped']} skipped"] if row.get("skipped") else []
        return "  ".join(parts)

    def close(self):
        """Closes the boards."""
        for board in self._boards:
            board.close()


def read_rows(path: Path) -> list[JsonObject]:
    """Reads the rows of a file of scalars, and skips lines that are incomplete or have no step.

    Args:
        path: a file of `MetricsLog`, which may not exist.

    Returns:
        The rows in the order of the file; an empty list for a missing file.
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
    """Removes all rows after a step, and an incomplete last line, from a file of scalars.

    Args:
        path: a file of `MetricsLog`, which may not exist. It is replaced atomically.
        step: the last step to keep.
    """
    if path.exists():
        write_json_lines(path, [row for row in read_rows(path) if row["step"] <= step])


def open_boards(
    tensorboard: bool, wandb: str, workdir: Path, step: int, fields: JsonObject
) -> list[Board]:
    """Opens the boards that the configuration requests.

    Args:
        tensorboard: `config.tensorboard`, whether to write workdir/tensorboard.
        wandb: `config.wandb`, a project of Weights & Biases; "" opens no project.
        workdir: folder of the run.
        step: number of updates so far. A resumed run continues its boards after this step.
        fields: the configuration by dotted name, which Weights & Biases displays.

    Returns:
        The boards, for `MetricsLog`.

    Raises:
        UserError: the package of a board is missing.
    """
    boards = []
    if tensorboard:
        boards.append(_open_tensorboard(workdir / "tensorboard", step))
    if wandb:
        boards.append(_open_wandb(wandb, workdir, fields))
    return boards


def _open_tensorboard(folder: Path, step: int) -> Board:
    """Opens a folder of TensorBoard, and hides its scalars after `step`."""
    writer = _import_board("tensorboard").SummaryWriter(str(folder), purge_step=step + 1)

    def add(scalars: dict[str, float | int], step: int) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    return Board(add, writer.close)


def _open_wandb(project: str, workdir: Path, fields: JsonObject) -> Board:
    """Opens the run of Weights & Biases that belongs to a folder.

    Args:
        project: name of the project.
        workdir: folder of the run. A file there has the run's id, so a resumed run continues its
            curves.
        fields: the configuration by dotted name, for display.
    """
    id_file = workdir / _WANDB_ID
    if not id_file.is_file():
        id_file.write_text(uuid.uuid4().hex)
    wandb_run = _import_board("wandb").init(
        project=project,
        name=workdir.name,
        id=id_file.read_text(),
        resume="allow",
        dir=str(workdir),
        config=fields,
    )
    return Board(lambda scalars, step: wandb_run.log(scalars, step=step), wandb_run.finish)


def check_boards(tensorboard: bool, wandb: str) -> None:
    """Raises a UserError if the package of a requested board is missing."""
    for field, is_requested in (("tensorboard", tensorboard), ("wandb", wandb)):
        if is_requested:
            _import_board(field)


def _import_board(field: str) -> ModuleType:
    """Imports the package of a board.

    Args:
        field: the field of the configuration that requests the board, a key of `_PACKAGES`.

    Raises:
        UserError: the package is not installed.
    """
    package = _PACKAGES[field]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"config.{field} is set, but {package} is not installed: pip install {package}, or "
            f"unset it; {METRICS} has the same numbers"
        ) from error
