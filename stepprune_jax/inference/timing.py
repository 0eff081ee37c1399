"""Run time of programs without compilation."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def timed(run: Callable[[], T], *num_compiled: Callable[[], int]) -> tuple[T, float]:
    """Runs a function that waits for its result; returns that, and the seconds it took.

    It is run again if it compiles a program, and so must have no side effects.
    """
    while True:
        before, begin = [count() for count in num_compiled], time.perf_counter()
        result = run()
        seconds = time.perf_counter() - begin
        if [count() for count in num_compiled] == before:
            return result, seconds
