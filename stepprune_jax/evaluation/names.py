"""Names of table rows with a special meaning, and the order of rows."""

from collections.abc import Sequence

ALL = "all tokens"
DOWNSAMPLED = "downsample"
# Row of the policy that the run in the working directory trained.
DEFAULT = "StepPrune"
# Suffix of rows with a learned stop. Answer files store it, so the text must not change.
_STOP = ", own stop"
# Row of the default policy with its learned stop.
OWN_STOP = f"{DEFAULT}{_STOP}"


def learned_stop(method: str) -> str:
    """Returns the row name of a method with its learned stop."""
    return f"{method}{_STOP}"


def without_own_stop(name: str) -> str:
    """Returns a row's name without the suffix of learned stops."""
    return name.removesuffix(_STOP)


def row_place(
    method: str, mode: str, budget: int | None, labels: Sequence[str]
) -> tuple[bool | int | str, ...]:
    """Returns a key that sorts rows: all tokens, learned stops, then budgets from large to small.

    Args:
        method: name of the row.
        mode: "exact" or "adaptive"; exact rows come first.
        budget: tokens kept; None for a learned stop.
        labels: order of the methods within a budget.
    """
    rank = labels.index(method) if method in labels else len(labels)
    return method != ALL, budget is not None, -(budget or 0), rank, method, mode != "exact"
