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
    """Stops a run after too many consecutive skipped updates.

    An update is checked a few updates later, so that the host need not wait for the device.

    Attributes:
        problem: message that ends the run; empty while there is no problem.
    """

    def __init__(self, path: Path, batches: Batches, limit: int):
        """Starts before the first update.

        Args:
            path: file for the samples of the skipped updates.
            batches: the batches of the run.
            limit: number of consecutive skipped updates that stops the run.
        """
        self._path, self._batches, self._limit = path, batches, limit
        self._unchecked: collections.deque[tuple[int, Int[Array, ""]]] = collections.deque()
        self.problem = ""

    def add(self, step: int, skipped_in_row: Int[Array, ""], is_last: bool = False) -> bool:
        """Adds an update, and checks an earlier one. The last update checks all updates.

        Returns:
            Whether there is a problem.
        """
        self._unchecked.append((step, skipped_in_row))
        while self._unchecked and not self.problem:
            if not is_last and len(self._unchecked) <= _MAX_IN_FLIGHT:
                break
            checked_step, count = self._unchecked.popleft()
            if int(count) >= self._limit:
                self._report(checked_step)
        return bool(self.problem)

    def _report(self, step: int) -> None:
        """Writes the samples of the skipped updates up to `step`, counted from 1."""
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
    """Lists unused ways to save memory, the cheapest first."""
    devices = jax.devices() if devices is None else devices
    num_parts = 1 if run.mesh == "single" else row_count(build_mesh(run.mesh, devices))
    device_rows, rows_at_once = run.batch_size // num_parts, run.model.rows_at_once
    changes, pass_rows = [], min(rows_at_once or device_rows, device_rows)
    if pass_rows > 1:
        change = f"{'lower' if rows_at_once else 'set'} config.model.rows_at_once"
        changes.append(f"{change} (the frozen model runs {pass_rows} rows at a time)")
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
