"""Failures of a run whose messages name a remedy: non-finite updates and exhausted memory."""

import collections
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import jax
from jaxtyping import Array, Int

from stepprune_jax.data.json_files import JsonObject
from stepprune_jax.parallel import distributed
from stepprune_jax.parallel.placement import row_count
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.training.batches import Batches
from stepprune_jax.training.settings import Run
from stepprune_jax.training.step_config import Devices
from stepprune_jax.user_input import UserError

NONFINITE_FILE = "nonfinite.json"
# Updates that may wait on the device while the host continues. Two keep the device busy; each one
# holds its batch in memory.
_MAX_IN_FLIGHT = 2


class Guard:
    """Stops a run after too many consecutive updates that were skipped as not finite.

    The host checks each update a few updates later, so it does not wait for the device.

    Attributes:
        problem: message that ends the run; empty while there is no problem.
    """

    def __init__(self, path: Path, batches: Batches, limit: int):
        """Initializes the guard of a run.

        Args:
            path: file to write with the samples of the skipped updates.
            batches: the batches of the run.
            limit: number of consecutive skipped updates that stops the run.
        """
        self._path, self._batches, self._limit = path, batches, limit
        self._unchecked: collections.deque[tuple[int, Int[Array, ""]]] = collections.deque()
        self.problem = ""

    def add(self, step: int, skipped_in_row: Int[Array, ""], is_last: bool = False) -> bool:
        """Adds an update, and checks the updates that the device has probably finished.

        Args:
            step: number of the update, counted from 1.
            skipped_in_row: number of consecutive skipped updates up to this update, possibly not
                computed yet.
            is_last: whether this is the last update of the run; then all updates are checked.

        Returns:
            Whether the run must end; `problem` says why.
        """
        self._unchecked.append((step, skipped_in_row))
        while self._unchecked and not self.problem:
            if not is_last and len(self._unchecked) <= _MAX_IN_FLIGHT:
                break
            checked_step, num_skipped = self._unchecked.popleft()
            if int(num_skipped) >= self._limit:  # int() waits for the device
                self._report(checked_step)
        return bool(self.problem)

    def _report(self, step: int) -> None:
        """Writes the samples of the skipped updates, and sets `problem`.

        Args:
            step: number of the last skipped update, counted from 1.
        """
        steps = range(step - self._limit + 1, step + 1)
        batches: list[JsonObject] = [
            {"step": number, "samples": self._batches.samples(number - 1)} for number in steps
        ]
        if distributed.is_main():
            self._path.write_text(json.dumps(batches, indent=1) + "\n")
        self.problem = (
            f"loss or gradient was not finite in {self._limit} updates in a row, up to step "
            f"{step}; {self._path} lists their samples. None of them has changed the "
            "weights. Lower config.optimizer.lr, with RLOO config.rloo.lr, or remove the samples"
        )


@contextlib.contextmanager
def memory_advice(run: Run, devices: Devices | None = None) -> Iterator[None]:
    """Converts out-of-memory errors of compiler and allocator to a one-line UserError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first_line, changes = str(error).strip().splitlines()[0], "; ".join(remedies(run, devices))
        raise UserError(f"out of device memory: {changes}. jax reports: {first_line}") from error


def remedies(run: Run, devices: Devices | None = None) -> list[str]:
    """Lists changes of the settings that save memory, the cheapest change first.

    Args:
        run: settings of the run.
        devices: devices of the run; None selects the devices of jax.

    Returns:
        The changes as text, without changes that the settings already have.
    """
    devices = jax.devices() if devices is None else devices
    num_parts = 1 if run.mesh == "single" else row_count(build_mesh(run.mesh, devices))
    device_rows, rows_at_once = run.batch_size // num_parts, run.model.rows_at_once
    changes, rows_per_pass = [], min(rows_at_once or device_rows, device_rows)
    if rows_per_pass > 1:
        verb = "lower" if rows_at_once else "set"
        changes.append(
            f"{verb} config.model.rows_at_once (the frozen model runs {rows_per_pass} rows at a "
            "time)"
        )
    if not run.model.remat:
        changes.append("set config.model.remat=True (recomputes blocks instead of storing them)")
    if run.model.dtype == "float32":
        changes.append("set config.model.dtype=bfloat16")
    if run.model.weights == "full":
        changes.append("set config.model.weights=int8 (rounds the language model's matrices)")
    if len(devices) > 1 and run.mesh in ("single", "data"):
        changes.append(f"set config.mesh=fsdp (shards the weights over {len(devices)} devices)")
    if device_rows > 1:
        changes.append(f"lower config.batch_size ({run.batch_size}; this changes what is learned)")
    return changes or ["use more devices, or larger ones"]
