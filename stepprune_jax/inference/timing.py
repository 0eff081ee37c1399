"""Time that programs take once they are compiled."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def timed(run: Callable[[], T], *num_compiled: Callable[[], int]) -> tuple[T, float]:
    """Runs something and takes its time without compilation.

    Args:
        run: what to run; it waits for its result. If it compiles a program it is run again, so it
            must do no more than compute.
        *num_compiled: say how many programs have been compiled so far.

    Returns:
        The result, and seconds.
    """
    while True:
        before, begin = [count() for count in num_compiled], time.perf_counter()
        result = run()
        seconds = time.perf_counter() - begin
        if [count() for count in num_compiled] == before:
            return result, seconds
