"""A progress line with the remaining time of a long run."""

import sys
import time
from collections.abc import Callable
from typing import Any


class Progress:
    """Counts units of work, such as questions, and writes a progress line.

    On a terminal the line is rewritten; elsewhere a new one is written every ten seconds.
    """

    def __init__(self, total: int, out: Any = None, every: float | int | None = None):
        """Starts the clock.

        Args:
            total: units of all tasks.
            out: text stream to write to; standard error by default.
            every: seconds between lines.
        """
        self._out = sys.stderr if out is None else out
        self._terminal = self._out.isatty()
        self._every = (0.2 if self._terminal else 10.0) if every is None else every
        self._total, self._done, self._begin = max(total, 1e-9), 0.0, time.monotonic()
        self._last = self._begin

    def task(self, name: str, count: int) -> Callable[[int], None]:
        """Begins a task of `count` units; returns a function to call with the units done."""
        before = self._done

        def report(done: int):
            self._done = before + min(done, count)
            self._write(name)

        return report

    def _write(self, name: str):
        now = time.monotonic()
        if now - self._last < self._every:
            return
        self._last = now
        share = max(self._done / self._total, 1e-9)
        left = (now - self._begin) * (1 - share) / share
        line = f"{min(share, 1):4.0%}  {left:4.0f} s left  {name}"
        self._out.write(f"\r{line:<78}" if self._terminal else line + "\n")
        self._out.flush()

    def close(self):
        """Ends the line."""
        if self._terminal:
            self._out.write("\r" + " " * 78 + "\r")
            self._out.flush()
