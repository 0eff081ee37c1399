"""Parameters of tests of which `make test` runs some and `make test-slow` the others."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick_or_slow(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Marks all but the `quick` ones slow: those that take longest, or that say what others say.

    Args:
        values: the parameters.
        quick: those that every run tests.
    """
    values = list(values)
    missing = [value for value in quick if value not in values]
    if missing:
        raise ValueError(f"{missing} are no parameters of this test")
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]
