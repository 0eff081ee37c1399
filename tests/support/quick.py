"""Splits the parameters of a test between `make test` and `make test-slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick_or_slow(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Marks the parameters slow that take long or repeat what other parameters test.

    Args:
        values: the parameters of a test.
        quick: the parameters that stay unmarked.
    """
    values = list(values)
    missing = [value for value in quick if value not in values]
    if missing:
        raise ValueError(f"{missing} are no parameters of this test")
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]
