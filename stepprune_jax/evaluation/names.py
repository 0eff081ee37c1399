"""Names of special table rows, and the order of rows."""

from collections.abc import Sequence

ALL = "all tokens"
DOWNSAMPLED = "downsample"
# The policy trained by the run in the working directory.
DEFAULT = "StepPrune"
_STOP = ", own stop"
# The row of that policy with its learned stop.
OWN_STOP = f"{DEFAULT}{_STOP}"


def learned_stop(method: str) -> str:
    """Returns the name of the row of a method with its learned stop."""
    return f"{method}{_STOP}"


def without_own_stop(name: str) -> str:
    """Returns the method of a row: its name, or what is before ", own stop"."""
    return name.removesuffix(_STOP)


def row_place(
    method: str, mode: str, budget: int | None, labels: Sequence[str]
) -> tuple[bool | int | str, ...]:
    """Returns a key that sorts rows: all tokens, own stops, then budgets from many to few tokens.

    Within a budget, methods are in the order of `labels`, exact before adaptive.
    """
    label = labels.index(method) if method in labels else len(labels)
    return method != ALL, budget is not None, -(budget or 0), label, method, mode != "exact"
