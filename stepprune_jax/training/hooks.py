"""Training hooks: metrics, validation, profiling."""

import math
from collections.abc import Callable
from pathlib import Path

import jax

from stepprune_jax.parallel import distributed
from stepprune_jax.selectors import Policy
from stepprune_jax.training.settings import AUTO, GATE, Run
from stepprune_jax.training.validation import Validation
from stepprune_jax.user_input import UserError
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
        """Opens files and loggers; `window` is the first and the last update to profile."""
        self._run, self._first, self._validation = run, done, validation
        self._folder, self._window, self._profiled = workdir / PROFILE, window or (0, 0), 0
        if window is not None and window[1] <= done:
            distributed.say(f"No profile: updates {window[0]} to {window[1]} are done")
        self._log = None
        if distributed.is_main():
            boards = open_boards(run.tensorboard, run.wandb, workdir, done, run.flat())
            self._log = MetricsLog(workdir, done, run.steps, run.batch_size, boards)

    def before(self, step: int):
        """Called before update `step`, counted from 1."""
        if not self._profiled and self._window[0] <= step <= self._window[1]:
            jax.profiler.start_trace(str(self._folder))
            self._profiled = step

    def after(
        self, step: int, scalars: dict[str, jax.Array], policy: Callable[[], Policy], phase: str
    ):
        """Called when update `step`, of a phase of that name, has been dispatched."""
        if self._profiled and step == self._window[1]:
            jax.block_until_ready(scalars)
            distributed.say(f"Profile of updates {self._profiled} to {step}: {self._folder}")
            self._end_profile()
        if step == self._first + 1:
            jax.block_until_ready(scalars)
            if self._log is not None:
                self._log.start_clock(step)
        end = step == self._run.steps
        if self._log is not None and (step % self._run.log_every == 0 or end):
            self._log.write(step, scalars, phase)
        if self._validation is not None and (step % self._run.validation.every == 0 or end):
            entropy = float(scalars.get("entropy", math.nan))
            # "auto" has looked whether sets are to be drawn at once.
            recipe = "" if (self._run.recipe, phase) == (AUTO, GATE) else phase
            row = self._validation(step, policy(), entropy, recipe)  # all processes take part
            if self._log is not None:
                self._log.write_validation(row)

    def close(self):
        """Closes files and loggers."""
        self._end_profile()
        if self._log is not None:
            self._log.close()

    def _end_profile(self):
        """Writes what has been profiled so far."""
        if self._profiled:
            jax.profiler.stop_trace()
            self._profiled = 0


def read_window(text: str, steps: int) -> tuple[int, int]:
    """Reads the flag `--profile`, "FIRST:LAST", updates counted from 1."""
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise UserError(f"--profile is {text!r}, expected FIRST:LAST, such as 10:12")
    if not 1 <= int(first) <= int(last) <= steps:
        raise UserError(f"--profile is {text!r}, expected updates from 1 to {steps}, in order")
    return int(first), int(last)
