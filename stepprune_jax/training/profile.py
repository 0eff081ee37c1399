"""A few updates seen by jax's profiler."""

from pathlib import Path
from typing import Any

import jax

from stepprune_jax.parallel import distributed


def read_window(text: str, steps: int) -> tuple[int, int]:
    """Reads "FIRST:LAST", updates counted from 1.

    Args:
        text: what was given.
        steps: of the whole run.

    Returns:
        The two numbers.

    Raises:
        ValueError: it is not of that form, or not within the run.
    """
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise ValueError(f"--profile is {text!r}, expected FIRST:LAST, as in 10:12")
    if not 1 <= int(first) <= int(last) <= steps:
        raise ValueError(f"--profile is {text!r}, expected updates from 1 to {steps}, in order")
    return int(first), int(last)


class Profile:
    """Records a window of updates under a folder, for TensorBoard's or Perfetto's viewers."""

    def __init__(self, folder: Path, window: tuple[int, int] | None):
        """Notes what is to be recorded: the first and the last update, or nothing."""
        self._folder, self._window, self._running = folder, window, False

    def before(self, step: int):
        """Starts, if update `step` is the first of the window."""
        if self._window is not None and step == self._window[0]:
            jax.profiler.start_trace(str(self._folder))
            self._running = True

    def after(self, step: int, scalars: Any):
        """Waits for update `step` and stops, if it is the last of the window."""
        if self._running and step == self._window[1]:
            jax.block_until_ready(scalars)
            self.close()
            distributed.say(f"Profile of updates {self._window[0]} to {step}: {self._folder}")

    def close(self):
        """Stops what is running."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False
