"""Schedules of methods that prune several times: layers and numbers of tokens.

A schedule given by a budget alone is geometric: each cut keeps the same share of the tokens before
it.
"""

import itertools
from collections.abc import Sequence


def choose_layers(authors: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """Chooses the layers to prune before.

    Args:
        authors: the layers for a model of 32 layers, ascending.
        depth: number of layers of the language model.

    Returns:
        The same layers, or, in a model that lacks some of them, those at the same share of its
        depth, without duplicates.
    """
    if authors[-1] < depth:
        return authors
    return tuple(sorted({max(1, layer * depth // 32) for layer in authors}))


def check_layers(name: str, layers: Sequence[int], first: int, last: int) -> None:
    """Checks a list of layers.

    Args:
        name: name of the option, for the message.
        layers: the list.
        first: the lowest allowed layer.
        last: the highest allowed layer.

    Raises:
        ValueError: the layers are not ascending integers in this range.
    """
    whole = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers)
    if (
        not layers
        or not whole
        or list(layers) != sorted({*layers})
        or not (first <= layers[0] and layers[-1] <= last)
    ):
        raise ValueError(
            f"{name} is {list(layers)}, expected ascending layers from {first} to {last}"
        )


def stage_widths(layers: Sequence[int], depth: int) -> list[int]:
    """Counts the layers before the first of `layers`, between them, and from the last one on."""
    return [end - start for start, end in itertools.pairwise((0, *layers, depth))]


def geometric_counts(
    num_tokens: int, count: int, widths: Sequence[int], average: bool
) -> tuple[int, ...]:
    """Counts the tokens that a geometric schedule leaves behind each cut.

    Args:
        num_tokens: tokens n of the image.
        count: the budget K.
        widths: from `stage_widths`.
        average: whether the budget is the mean over layers or the number after the last cut.

    Returns:
        For each cut i of c, n r^i rounded down, at least 1: with the ratio r of `mean_ratio`, or
        (K / n)^(1 / c), with which the last one is K.
    """
    cuts = range(1, len(widths))
    if average:
        ratio = mean_ratio(widths, count / num_tokens)
        return tuple(max(1, int(num_tokens * ratio**cut)) for cut in cuts)
    shares = [cut / len(cuts) for cut in cuts]
    return tuple(max(1, int(num_tokens ** (1 - share) * count**share)) for share in shares)


def mean_ratio(widths: Sequence[int], share: float) -> float:
    """Solves sum_i w_i r^i = share * sum_i w_i for r, by bisection.

    Args:
        widths: from `stage_widths`.
        share: share of an image's tokens that enters a layer, averaged over layers.

    Returns:
        The ratio in (0, 1]; 0 if the layers before the first cut already use that share.
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
