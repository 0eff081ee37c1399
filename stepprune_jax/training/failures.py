"""Failures of a run that name their remedy: non-finite updates and exhausted memory."""

import collections
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from jaxtyping import Array, Int

from stepprune_jax.data.json_files import JsonObject
from stepprune_jax.parallel import distributed
from stepprune_jax.parallel.placement import row_count
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.training.batches import Batches
from stepprune_jax.training.settings import Run
from stepprune_jax.user_input import UserError

NONFINITE_FILE = "nonfinite.json"
# Updates that may wait on the device while the host continues; each holds its batch.
_IN_FLIGHT = 2


class Guard:
    """Stops a run after too many skipped updates in a row, checked a few updates late."""

    def __init__(self, path: Path, batches: Batches, limit: int):
        """Starts before the first update."""
        self._path, self._batches, self._limit = path, batches, limit
        self._waiting: collections.deque = collections.deque()
        self.problem = ""

    def add(self, step: int, skipped_in_row: Int[Array, ""], last: bool = False) -> bool:
        """Waits for an earlier update and checks it; at the last one, for all of them."""
        self._waiting.append((step, skipped_in_row))
        while self._waiting and not self.problem and (last or len(self._waiting) > _IN_FLIGHT):
            done, count = self._waiting.popleft()
            if int(count) >= self._limit:
                self._report(done)
        return bool(self.problem)

    def _report(self, step: int):
        """Writes the samples of the batches up to that of update `step`, counted from 1."""
        steps = range(step - self._limit + 1, step + 1)
        batches: list[JsonObject] = [
            {"step": n, "samples": self._batches.samples(n - 1)} for n in steps
        ]
        if distributed.is_main():
            self._path.write_text(json.dumps(batches, indent=1) + "\n")
        self.problem = (
            f"loss or gradient was not finite in {self._limit} updates in a row, up to step "
            f"{step}; {self._path} lists their samples. None of them has changed the "
            "weights. Lower config.optimizer.lr, or remove the samples"
        )


@contextlib.contextmanager
def memory_advice(run: Run, devices: Sequence[jax.Device] | None = None) -> Iterator[None]:
    """Converts out-of-memory errors of compiler and allocator to a one-line error."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first_line, changes = str(error).strip().splitlines()[0], "; ".join(remedies(run, devices))
        raise UserError(f"out of device memory: {changes}. jax reports: {first_line}") from error


def remedies(run: Run, devices: Sequence[jax.Device] | None = None) -> list[str]:
    """Lists unused ways to save memory, the cheapest first."""
    devices = jax.devices() if devices is None else devices
    spread = 1 if run.mesh == "single" else row_count(build_mesh(run.mesh, devices))
    each, rows = run.batch_size // spread, run.model.rows_at_once
    changes, now = [], min(rows or each, each)
    if now > 1:
        change = f"{'lower' if rows else 'set'} config.model.rows_at_once"
        changes.append(f"{change} (the frozen model runs {now} rows at a time)")
    if not run.model.remat:
        changes.append("set config.model.remat=True (recomputes blocks instead of storing them)")
    if run.model.dtype == "float32":
        changes.append("set config.model.dtype=bfloat16")
    if run.model.weights == "full":
        changes.append("set config.model.weights=int8 (rounds the language model's matrices)")
    if len(devices) > 1 and run.mesh in ("single", "data"):
        changes.append(f"set config.mesh=fsdp (shards the weights over {len(devices)} devices)")
    if each > 1:
        changes.append(f"lower config.batch_size ({run.batch_size}; this changes what is learned)")
    return changes or ["use more devices, or larger ones"]
