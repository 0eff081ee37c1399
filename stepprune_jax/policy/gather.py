"""From a selection to a short prefix: kept tokens, padded to a bucket."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.policy.checks import AnyArray, checked, is_integer, is_static, require
from stepprune_jax.policy.pick import Picks
from stepprune_jax.policy.trajectory import Trajectory

ORDERS = ("raster", "pick")


class Pruned(NamedTuple):
    """The kept tokens of a batch in a bucket of static size; real entries come first.

    Attributes:
        index: position of each kept token among the N image tokens; -1 in the padding.
        tokens: the kept tokens themselves, untouched; zero in the padding.
        valid: True at real entries.
        count: K, the number of real entries.
    """

    index: Int[Array, "b k"]
    tokens: Float[Array, "b k d"]
    valid: Bool[Array, "b k"]
    count: Int[Array, "b"]


def bucket_ladder(max_tokens: int, smallest: int = 16) -> tuple[int, ...]:
    """Returns bucket sizes up to `max_tokens`, each at most 1.5 times the one before.

    16, 24, 32, 48, 64, 96, 128, 192, ...: programs compiled once per bucket serve every count, and
    padding adds at most half as many entries again.
    """
    require(max_tokens > 0, "max_tokens", max_tokens, "at least 1")
    sizes, power = [], smallest
    while power < max_tokens:
        sizes += [power, power * 3 // 2]
        power *= 2
    return (*(size for size in sizes if size < max_tokens), max_tokens)


def check_ladder(ladder: Sequence[int]) -> None:
    """Raises unless a ladder of buckets has at least one, and all of them hold a token."""
    good = isinstance(ladder, Sequence | np.ndarray) and len(ladder) > 0
    good = good and all(is_integer(size) and size > 0 for size in ladder)
    require(good, "ladder", repr(ladder), "integers from 1")


def choose_bucket(count: ArrayLike, ladder: Sequence[int]) -> int:
    """Returns the smallest bucket of `ladder` that holds every row; runs on the host.

    Raises:
        ValueError: the ladder is none, or its largest bucket is too small.
    """
    check_ladder(ladder)
    largest = int(np.max(count, initial=0))
    fitting = [size for size in ladder if size >= largest]
    require(bool(fitting), "count", largest, f"at most the largest bucket, {max(ladder)}")
    return min(fitting)


@checked
def gather(
    selection: Trajectory | Picks,
    features: Float[AnyArray, "b n d"],
    capacity: int,
    *,
    order: str = "raster",
) -> Pruned:
    """Gathers the kept tokens X_S into a bucket.

    Args:
        selection: result of `select` or `pick`.
        features: tokens to gather from, N per row (before or after the projector: it is
            token-wise).
        capacity: bucket size. If a row keeps more (an error where the count can be read), its first
            `capacity` picks remain.
        order: `"raster"` keeps the spatial order the language model was trained on; `"pick"` is the
            order of selection.

    Returns:
        The pruned prefix, differentiable in `features`.

    Raises:
        ValueError: a capacity outside [1, N] or below a count that can be read, or an unknown
            order.
    """
    features = jnp.asarray(features)
    n, steps = features.shape[1], selection.action.shape[1]
    require(order in ORDERS, "order", repr(order), f"one of {ORDERS}")
    require(0 < capacity <= n, "capacity", capacity, f"within [1, {n}] for {n} image tokens")
    require(
        selection.selected.shape == features.shape[:2],
        "features",
        f"of shape {features.shape}",
        f"{selection.selected.shape} leading sizes",
    )
    if is_static(selection.count):
        largest = int(np.max(selection.count, initial=0))
        require(largest <= capacity, "capacity", capacity, f"at least the largest count, {largest}")
    picks = selection.action[:, :capacity]
    picks = jnp.pad(picks, ((0, 0), (0, max(0, capacity - steps))), constant_values=n)
    index = jnp.sort(picks, axis=1) if order == "raster" else picks
    valid = index < n
    tokens = jnp.take_along_axis(features, jnp.minimum(index, n - 1)[..., None], axis=1)
    return Pruned(
        index=jnp.where(valid, index, -1),
        tokens=jnp.where(valid[..., None], tokens, 0),
        valid=valid,
        count=jnp.minimum(selection.count, capacity),
    )
