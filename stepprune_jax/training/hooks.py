"""Training hooks: metrics, validation, profiling."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from stepprune_jax.parallel import distributed
from stepprune_jax.pruning import Policy
from stepprune_jax.training.settings import Run
from stepprune_jax.training.validation import Validation
from stepprune_jax.workdir.metrics import MetricsLog, open_boards

PROFILE = "profile"


class Hooks:
    """Hooks of a run's updates; only the main process writes."""

    def __init__(
        self,
        run: Run,
        workdir: Path,
        done: int,
        validation: Validation | None,
        window: tuple[int, int] | None,
    ):
        """Opens files and loggers."""
        self._run, self._first, self._validation = run, done, validation
        self._profile = Profile(workdir / PROFILE, window)
        self._log = None
        if distributed.is_main():
            boards = open_boards(run.tensorboard, run.wandb, workdir, done, run.flat())
            self._log = MetricsLog(workdir, done, run.steps, run.batch_size, boards)

    def before(self, step: int):
        """Called before update `step`, counted from 1."""
        self._profile.before(step)

    def after(self, step: int, scalars: dict[str, jax.Array], policy: Callable[[], Policy]):
        """Called when update `step` has been dispatched."""
        self._profile.after(step, scalars)
        if step == self._first + 1:
            jax.block_until_ready(scalars)
            if self._log is not None:
                self._log.start_clock(step)
        end = step == self._run.steps
        if self._log is not None and (step % self._run.log_every == 0 or end):
            self._log.write(step, scalars)
        if self._validation is not None and (step % self._run.validation.every == 0 or end):
            row = self._validation(step, policy())  # all processes take part
            if self._log is not None:
                self._log.write_validation(row)

    def close(self):
        """Closes files and loggers."""
        self._profile.close()
        if self._log is not None:
            self._log.close()


def read_window(text: str, steps: int) -> tuple[int, int]:
    """Reads the flag `--profile`, "FIRST:LAST", updates counted from 1."""
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise ValueError(f"--profile is {text!r}, expected FIRST:LAST, such as 10:12")
    if not 1 <= int(first) <= int(last) <= steps:
        raise ValueError(f"--profile is {text!r}, expected updates from 1 to {steps}, in order")
    return int(first), int(last)


class Profile:
    """Records a window of updates under a folder, for TensorBoard's or Perfetto's viewers."""

    def __init__(self, folder: Path, window: tuple[int, int] | None):
        """Stores the window to record: the first and the last update, or None."""
        self._folder, self._window, self._running = folder, window, False

    def before(self, step: int):
        """Starts recording, if update `step` is the first of the window."""
        if self._window is not None and step == self._window[0]:
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def after(self, step: int, scalars: Any):
        """Waits for update `step` and stops recording, if it is the last of the window."""
        if self._running and step == self._window[1]:
            jax.block_until_ready(scalars)
            self.close()
            distributed.say(f"Profile of updates {self._window[0]} to {step}: {self._folder}")

    def close(self):
        """Stops a running recording."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
