"""Names of special table rows, and the order of rows."""

from collections.abc import Sequence
from typing import Any

ALL = "all tokens"
# The policy trained by the run in the working directory.
DEFAULT = "StepPrune"
# Rows that are answered on request only: the best tokens of the default policy's first step, and
# the tokens that are known to matter.
FIRST_STEP = "first step"
ORACLE = "oracle"
_STOP = ", own stop"
# The row in which that policy stops by itself.
OWN_STOP = f"{DEFAULT}{_STOP}"


def own_stop(method: str) -> str:
    """Returns the name of the row in which a method uses its own stop."""
    return f"{method}{_STOP}"


def without_own_stop(name: str) -> str:
    """Returns the method of a row: its name, or what is before ", own stop"."""
    return name.removesuffix(_STOP)


def row_place(method: str, mode: str, budget: int | None, labels: Sequence[str]) -> tuple[Any, ...]:
    """Returns the place of a row in every table, as a key to sort by.

    All tokens come first, then the policy's own stop, then budgets in descending order; within a
    budget, methods are in the order of `labels`, exact before adaptive.

    Args:
        method: name of the row.
        mode: "exact" or "adaptive".
        budget: tokens to keep; None for a policy's own stop.
        labels: names in their order; others follow alphabetically.

    Returns:
        The key.
    """
    label = labels.index(method) if method in labels else len(labels)
    return method != ALL, budget is not None, -(budget or 0), label, method, mode != "exact"
