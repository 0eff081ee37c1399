"""Run time of programs without compilation."""

import time
from collections.abc import Callable
from typing import TypeVar

from stepprune_jax.inference.programs import num_compiled

T = TypeVar("T")


def timed(run: Callable[[], T]) -> tuple[T, float]:
    """Runs a function that waits for its result; returns that, and the seconds it took.

    It is run again if it compiles a program, and so must have no side effects.
    """
    while True:
        before, begin = num_compiled(), time.perf_counter()
        result = run()
        seconds = time.perf_counter() - begin
        if num_compiled() == before:
            return result, seconds
