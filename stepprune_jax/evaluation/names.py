"""Names of table rows that several packages tell apart, and the order of the rows."""

from collections.abc import Sequence
from typing import Any

ALL = "all tokens"
# The policy that the run in the working directory trained.
DEFAULT = "StepPrune"


def own_stop(method: str) -> str:
    """Names the row in which a method stops where it learned to."""
    return f"{method}, own stop"


def row_place(method: str, mode: str, budget: int | None, labels: Sequence[str]) -> tuple[Any, ...]:
    """Returns the place of a row in every table, as a key to sort by.

    All tokens come first, then the policy's own stop, then budget by budget from many tokens to
    few: at each budget the methods in the order of `labels`, exact before adaptive.

    Args:
        method: name of the row.
        mode: "exact" or "adaptive".
        budget: tokens to keep; None for a policy's own stop.
        labels: names in their order; others follow by alphabet.

    Returns:
        The key.
    """
    label = labels.index(method) if method in labels else len(labels)
    return method != ALL, budget is not None, -(budget or 0), label, method, mode != "exact"
