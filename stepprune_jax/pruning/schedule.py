"""Schedules of methods that prune several times: layers and numbers of tokens.

A schedule given by a budget alone is geometric: each cut keeps the same share of the tokens before
it.
"""

import itertools
from collections.abc import Sequence


def choose_layers(authors: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """Returns the authors' layers of 32, or, in a model that lacks some, at the same depths."""
    if authors[-1] < depth:
        return authors
    return tuple(sorted({max(1, layer * depth // 32) for layer in authors}))


def are_layers(layers: Sequence[int], first: int, last: int) -> bool:
    """Returns whether a list is of ascending layers from `first` to `last`."""
    ascending = bool(layers) and list(layers) == sorted({*layers})
    return ascending and all(type(layer) is int and first <= layer <= last for layer in layers)


def stage_widths(layers: Sequence[int], depth: int) -> list[int]:
    """Counts the layers before the first of `layers`, between them, and from the last one on."""
    return [end - start for start, end in itertools.pairwise((0, *layers, depth))]


def geometric_counts(
    num_tokens: int, count: int, widths: Sequence[int], average: bool
) -> tuple[int, ...]:
    """Counts the tokens of an image of n that a geometric schedule leaves behind each cut.

    Cut i of c leaves n r^i, rounded down, at least 1. The ratio r is that of `mean_ratio`, or, if
    the budget `count` is not the average over layers, (count / n)^(1 / c), so that the last is it.
    """
    cuts, ratio = range(1, len(widths)), mean_ratio(widths, count / num_tokens)
    if not average:
        ratio = (count / num_tokens) ** (1 / len(cuts))
    # A whole number may come out a little smaller.
    return tuple(max(1, int(num_tokens * ratio**cut + 1e-9)) for cut in cuts)


def mean_ratio(widths: Sequence[int], share: float) -> float:
    """Solves sum_i w_i r^i = share * sum_i w_i for r, by bisection.

    It is in (0, 1]; 0 if the layers before the first cut already use that share.
    """
    target = share * sum(widths)
    if target >= sum(widths):
        return 1.0
    if target <= widths[0]:
        return 0.0
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if sum(width * middle**power for power, width in enumerate(widths)) > target:
            high = middle
        else:
            low = middle
    return low
