"""Stopping a run whose updates are all left out, with the samples that they saw."""

import collections
import json
from pathlib import Path
from typing import Any

from jaxtyping import Array, Int

from stepprune_jax.parallel import distributed
from stepprune_jax.training.batches import Batches

FILE = "nonfinite.json"
# Updates that may wait on the device while the host goes on; each holds its batch.
_IN_FLIGHT = 2


class Guard:
    """Follows a few updates behind how many were left out in a row."""

    def __init__(self, path: Path, batches: Batches, limit: int):
        """Begins with no update.

        Args:
            path: where the samples are written.
            batches: what is trained on.
            limit: updates in a row that may be left out before the run stops.
        """
        self._path, self._batches, self._limit = path, batches, limit
        self._waiting: collections.deque = collections.deque()
        self.problem = ""

    def add(self, step: int, skipped_in_row: Int[Array, ""], last: bool = False) -> bool:
        """Waits for an earlier update and looks at it; at the last one for all of them.

        Args:
            step: updates begun.
            skipped_in_row: of the latest of them, still on its way.
            last: whether there is none after it.

        Returns:
            Whether the run has to stop; `problem` says why.
        """
        self._waiting.append((step, skipped_in_row))
        while self._waiting and not self.problem and (last or len(self._waiting) > _IN_FLIGHT):
            done, count = self._waiting.popleft()
            if int(count) >= self._limit:
                self._report(done)
        return bool(self.problem)

    def _report(self, step: int):
        """Writes the samples of the batches up to that of update `step`, counted from 1."""
        steps = range(step - self._limit + 1, step + 1)
        batches: list[dict[str, Any]] = [
            {"step": n, "samples": self._batches.samples(n - 1)} for n in steps
        ]
        if distributed.is_main():
            self._path.write_text(json.dumps(batches, indent=1) + "\n")
        self.problem = (
            f"loss or gradient was not finite in {self._limit} updates in a row, up to step "
            f"{step}; {self._path} names their samples. The weights are those before them. Lower "
            "config.optimizer.lr, or leave the samples out"
        )
