"""Run time of programs without compilation."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def timed(run: Callable[[], T], *num_compiled: Callable[[], int]) -> tuple[T, float]:
    """Runs a function and measures its time without compilation.

    Args:
        run: the function, which waits for its result. It is run again if it compiles a program, and
            so must have no side effects.
        *num_compiled: functions that return the number of programs compiled so far.

    Returns:
        The result, and the time in seconds.
    """
    while True:
        before, begin = [count() for count in num_compiled], time.perf_counter()
        result = run()
        seconds = time.perf_counter() - begin
        if [count() for count in num_compiled] == before:
            return result, seconds
