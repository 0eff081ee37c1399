"""Training hooks: metrics, validation, profiling."""

import math
from collections.abc import Callable
from pathlib import Path

import jax

from stepprune_jax.parallel import distributed
from stepprune_jax.selectors import Policy
from stepprune_jax.training.objectives import WARM_START
from stepprune_jax.training.settings import Run
from stepprune_jax.training.validation import Validation
from stepprune_jax.user_input import UserError
from stepprune_jax.workdir.metrics import MetricsLog, open_boards

PROFILE = "profile"


class Hooks:
    """Metrics, validation and profile before and after each update of a run.

    Only the main process writes files.
    """

    def __init__(
        self,
        run: Run,
        workdir: Path,
        done: int,
        validation: Validation | None,
        window: tuple[int, int] | None,
    ):
        """Opens files and loggers.

        Args:
            run: settings of the run.
            workdir: folder of the run.
            done: updates done by earlier processes.
            validation: validation on held-out questions; None for no validation.
            window: first and last update to profile, counted from 1; None for no profile.
        """
        self._run, self._num_done_before, self._validation = run, done, validation
        self._profile_folder, self._window = workdir / PROFILE, window or (0, 0)
        self._profile_start = 0  # first update of the open profile; 0 without an open profile
        if window is not None and window[1] <= done:
            distributed.say(f"No profile: updates {window[0]} to {window[1]} are done")
        self._log = None
        if distributed.is_main():
            boards = open_boards(run.tensorboard, run.wandb, workdir, done, run.flat())
            self._log = MetricsLog(workdir, done, run.steps, run.batch_size, boards)

    def before(self, step: int) -> None:
        """Starts the profile if it begins with update `step`, counted from 1."""
        if not self._profile_start and self._window[0] <= step <= self._window[1]:
            jax.profiler.start_trace(str(self._profile_folder))
            self._profile_start = step

    def after(
        self,
        step: int,
        metrics: dict[str, jax.Array],
        policy: Callable[[], Policy],
        objective: str,
    ) -> None:
        """Logs metrics, validates and ends the profile, if update `step` is due for them.

        Args:
            step: number of the update that the host has just dispatched, counted from 1.
            metrics: metrics of the update, possibly not computed yet.
            policy: returns the policy after the update.
            objective: name of the objective of the update.
        """
        if self._profile_start and step == self._window[1]:
            jax.block_until_ready(metrics)
            updates = f"{self._profile_start} to {step}"
            distributed.say(f"Profile of updates {updates}: {self._profile_folder}")
            self._end_profile()
        if step == self._num_done_before + 1:
            # The clock starts after the first update, which includes the compilation.
            jax.block_until_ready(metrics)
            if self._log is not None:
                self._log.start_clock(step)
        is_last = step == self._run.steps
        if self._log is not None and (step % self._run.log_every == 0 or is_last):
            self._log.write(step, metrics, objective)
        interval = self._run.validation.every
        if self._validation is not None and (step % interval == 0 or is_last):
            entropy = float(metrics.get("entropy", math.nan))
            # The diagnosis gives advice on recipes. The warm start is a part of a recipe.
            recipe = "" if objective == WARM_START else objective
            row = self._validation(step, policy(), entropy, recipe)  # all processes take part
            if self._log is not None:
                self._log.write_validation(row)

    def close(self) -> None:
        """Closes files and loggers."""
        self._end_profile()
        if self._log is not None:
            self._log.close()

    def _end_profile(self) -> None:
        """Writes the open profile, if there is one."""
        if self._profile_start:
            jax.profiler.stop_trace()
            self._profile_start = 0


def read_window(text: str, steps: int) -> tuple[int, int]:
    """Parses the flag `--profile`, such as "10:12" for the updates 10 to 12, counted from 1.

    Args:
        text: value of the flag.
        steps: number of updates of the run.

    Returns:
        The first and the last update to profile.

    Raises:
        UserError: the text has another form, or an update is not in the run.
    """
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise UserError(f"--profile is {text!r}, expected FIRST:LAST, such as 10:12")
    if not 1 <= int(first) <= int(last) <= steps:
        raise UserError(f"--profile is {text!r}, expected updates from 1 to {steps}, in order")
    return int(first), int(last)
