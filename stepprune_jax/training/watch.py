"""What is seen of a run while it goes on: lines, boards, questions asked in between, a profile."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from stepprune_jax.checkpoints.policy import Policy
from stepprune_jax.parallel import distributed
from stepprune_jax.training.boards import open_boards
from stepprune_jax.training.metrics import MetricsLog
from stepprune_jax.training.profile import Profile
from stepprune_jax.training.validation import Validation

PROFILE = "profile"


class Watch:
    """Follows the updates of a run; of several processes the main one alone writes."""

    def __init__(
        self, config: Any, workdir: Path, done: int, validation: Validation | None,
        window: tuple[int, int] | None,
    ):  # fmt: skip
        """Opens files and boards.

        Args:
            config: the run's checked `ConfigDict`.
            workdir: folder of the run.
            done: updates done.
            validation: what is asked every so often.
            window: first and last update to profile.
        """
        self._config, self._first, self._validation = config, done, validation
        self._profile = Profile(workdir / PROFILE, window)
        self._log = None
        if distributed.is_main():
            boards = open_boards(config, workdir, done)
            self._log = MetricsLog(workdir, done, config.steps, config.batch_size, boards)

    def before(self, step: int):
        """Called before update `step`, counted from 1."""
        self._profile.before(step)

    def after(self, step: int, scalars: dict[str, jax.Array], policy: Callable[[], Policy]):
        """Called when update `step` is on its way.

        Args:
            step: updates begun.
            scalars: of the latest, by name.
            policy: gives the policy after it.
        """
        self._profile.after(step, scalars)
        if step == self._first + 1:
            jax.block_until_ready(scalars)
            if self._log is not None:
                self._log.start_clock(step)
        end = step == self._config.steps
        if self._log is not None and (step % self._config.log_every == 0 or end):
            self._log.write(step, scalars)
        if self._validation is not None and (step % self._config.validation.every == 0 or end):
            found = self._validation(step, policy())  # all processes have their part in it
            if self._log is not None:
                self._log.write_validation(found)

    def close(self):
        """Closes files and boards."""
        self._profile.close()
        if self._log is not None:
            self._log.close()
