"""Schedules of methods that prune at several layers: the layers and the numbers of tokens.

A schedule that is computed from a budget is geometric: each cut keeps the same fraction of the
tokens before it.
"""

import itertools
from collections.abc import Sequence


def choose_layers(authors: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """Returns the authors' layers of 32, or the same relative depths in a model with fewer layers.

    Args:
        authors: layers of the authors' model, ascending.
        depth: number of layers of the model.
    """
    if authors[-1] < depth:
        return authors
    return tuple(sorted({max(1, layer * depth // 32) for layer in authors}))


def are_layers(layers: Sequence[int], first: int, last: int) -> bool:
    """Returns whether a list holds ascending layers from `first` to `last`."""
    is_ascending = bool(layers) and list(layers) == sorted({*layers})
    return is_ascending and all(type(layer) is int and first <= layer <= last for layer in layers)


def stage_widths(layers: Sequence[int], depth: int) -> list[int]:
    """Returns the numbers of layers before, between and after the cuts before `layers`."""
    return [end - start for start, end in itertools.pairwise((0, *layers, depth))]


def geometric_counts(
    num_tokens: int, count: int, widths: Sequence[int], average: bool
) -> tuple[int, ...]:
    """Returns the number of tokens after each cut of a geometric schedule.

    Cut i of c leaves n r^i tokens, rounded down, but at least 1.

    Args:
        num_tokens: n, the number of tokens of the image.
        count: the budget.
        widths: numbers of layers before, between and after the cuts.
        average: whether the budget is the mean over layers, with r from `mean_ratio`, or the number
            of tokens after the last cut, with r = (count / n)^(1 / c).
    """
    num_cuts, share = len(widths) - 1, count / num_tokens
    ratio = mean_ratio(widths, share) if average else share ** (1 / num_cuts)
    # A power may be slightly below the integer that it represents, so 1e-9 is added before
    # rounding down.
    return tuple(max(1, int(num_tokens * ratio**cut + 1e-9)) for cut in range(1, num_cuts + 1))


def mean_ratio(widths: Sequence[int], share: float) -> float:
    """Solves sum_i w_i r^i = share * sum_i w_i for r, by bisection.

    Args:
        widths: w, the numbers of layers before, between and after the cuts.
        share: mean number of tokens over layers, as a fraction of all tokens.

    Returns:
        r in (0, 1], or 0 if the layers before the first cut exceed the mean.
    """
    target = share * sum(widths)
    if target >= sum(widths):
        return 1.0
    if target <= widths[0]:
        return 0.0
    low, high = 0.0, 1.0
    # Bisection ends when no float lies between the bounds.
    while low < (middle := (low + high) / 2) < high:
        if sum(width * middle**power for power, width in enumerate(widths)) > target:
            high = middle
        else:
            low = middle
    return low
