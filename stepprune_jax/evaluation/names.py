"""Names of table rows with a special meaning, and the order of rows."""

from collections.abc import Sequence

ALL, BLIND = "all tokens", "no image"
DOWNSAMPLED = "downsample"
# Row of the policy that the run in the working directory trained.
DEFAULT = "StepPrune"
# Suffix of rows with a learned stop. Answer files store it, so the text must not change.
_STOP = ", own stop"
# Row of the default policy with its learned stop.
LEARNED_STOP = f"{DEFAULT}{_STOP}"


def learned_stop(method: str) -> str:
    """Returns the row name of a method with its learned stop."""
    return f"{method}{_STOP}"


def without_learned_stop(name: str) -> str:
    """Returns a row's name without the suffix of learned stops."""
    return name.removesuffix(_STOP)


def row_place(
    method: str, mode: str, budget: int | None, labels: Sequence[str]
) -> tuple[bool | int | str, ...]:
    """Returns a sort key for table rows.

    Rows are sorted by: all tokens first, then learned stops, then budgets from large to small. Rows
    of one budget are in the order of `labels`, followed by further methods in alphabetical order.

    Args:
        method: name of the row.
        mode: "exact" or "adaptive"; exact rows come first.
        budget: number of tokens kept; None for a learned stop without a budget.
        labels: names of methods in display order.
    """
    method_rank = labels.index(method) if method in labels else len(labels)
    has_budget = budget is not None
    return method != ALL, has_budget, -(budget or 0), method_rank, method, mode != "exact"
