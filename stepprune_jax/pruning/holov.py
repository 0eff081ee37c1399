"""HoloV: every part of an image keeps tokens, more where much is seen and little repeated.

Zou and others (https://arxiv.org/abs/2510.02912), as in the authors' program for LLaVA. The raster
sequence of projected tokens is split into crops. A token's score is the class token's attention and
how much its likeness to the others of its crop varies; a crop's share of the budget is that of its
mean score. Within a crop the tokens that the class token attends to most are kept.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from stepprune_jax.models.layers import Tap
from stepprune_jax.pruning.base import EXACT, Kept, Pruner, View, tower_block

# Keeps divisions finite, as in the authors' program.
_SMALL = 1e-6


@dataclasses.dataclass(frozen=True)
class HoloV(Pruner):
    """Shares the budget out among crops of the image.

    It is not the unpruned model at any budget: tokens that a crop does not have are made up for by
    zero vectors, and the others stand crop by crop in the order of attention.

    Attributes:
        crops: parts of the sequence, the first ones one token longer where it does not divide; the
            authors' `num_patches`.
        alpha: weight of the likeness's variance.
    """

    crops: int = 16
    alpha: float = 0.09

    name = "holov"
    label = "HoloV"
    budgets: ClassVar[tuple[str, ...]] = EXACT
    after_projector: ClassVar[bool] = True
    exact_when_full: ClassVar[bool] = False
    positions: ClassVar[str] = "compact"

    def check(self, config: Any, num_tokens: int) -> None:
        """Refuses models without a class token, and no crops."""
        super().check(config, num_tokens)
        tower_block(config)
        if self.crops < 1:
            raise ValueError(f"holov: crops is {self.crops}, expected an integer from 1")

    def taps(self, config: Any) -> tuple[Tap, ...]:
        """Returns the class token's row of attention."""
        return (Tap("attention", tower_block(config)),)

    def select(self, params: Any, view: View, capacity: int) -> Kept:
        """Returns the tokens crop by crop, in each by attention; then zero vectors."""
        del params
        attention = view.taps[0].astype(jnp.float32).mean(1)[:, 1:]
        r, n = attention.shape
        first = view.tokens.shape[1] - n  # a class token among the features is never kept
        tokens = view.tokens[:, first:].astype(jnp.float32)
        order, found = shares(tokens, attention, view.count, self.crops, self.alpha)
        slots = jnp.arange(capacity)
        index = jnp.full((r, capacity), -1, jnp.int32)
        index = index.at[jnp.arange(r)[:, None], order].set(jnp.arange(n) + first, mode="drop")
        is_token, valid = slots < found[:, None], slots < view.count[:, None]
        at = jnp.where(is_token, index, 0)
        kept = jnp.take_along_axis(view.tokens, at[..., None], axis=1)
        return Kept(
            index=index,
            place=jnp.where(is_token, at, jnp.where(valid, first + n - 1, 0)),
            tokens=jnp.where(is_token[..., None], kept, 0),
            valid=valid,
            count=view.count,
        )


def shares(
    tokens: Float[Array, "r n e"],
    attention: Float[Array, "r n"],
    count: Int[Array, "r"],
    crops: int,
    alpha: float,
) -> tuple[Int[Array, "r n"], Int[Array, "r"]]:
    """Shares a count out among crops, and chooses in each.

    Args:
        tokens: [r, n, e] float32 projected tokens.
        attention: [r, n] from the class token to each.
        count: [r] tokens to keep.
        crops: number of crops.
        alpha: weight of the likeness's variance.

    Returns:
        [r, n] int32 the place of each token among those that are kept, n or more for one that is
        not; and [r] how many are kept, which may be fewer than `count`.
    """
    n = tokens.shape[1]
    parts = np.array_split(np.arange(n), min(crops, n))
    longest = len(parts[0])
    # Crops are rows of one array; the shorter ones end with a place that is masked.
    at = np.stack([np.pad(part, (0, longest - len(part)), mode="edge") for part in parts])
    size = np.array([len(part) for part in parts])
    mask = np.arange(longest) < size[:, None]
    attention = jnp.where(mask, attention[:, at], 0)
    share = _allotted(_crop_scores(tokens[:, at], attention, mask, size, alpha), count)
    whole = share >= size
    by_attention = jnp.argsort(jnp.where(mask, -attention, 1), axis=2, stable=True)
    rank = jnp.where(whole[..., None], np.arange(longest), jnp.argsort(by_attention, axis=2))
    held = jnp.minimum(share, size)
    before = jnp.cumsum(held, axis=1) - held
    place = jnp.where(rank < held[..., None], before[..., None] + rank, n)
    place = place.reshape(len(place), -1)[:, np.flatnonzero(mask)]
    return place.astype(jnp.int32), held.sum(1, dtype=jnp.int32)


def _crop_scores(
    tokens: Float[Array, "r c m e"],
    attention: Float[Array, "r c m"],
    mask: np.ndarray,
    size: np.ndarray,
    alpha: float,
) -> Float[Array, "r c"]:
    """The mean over each crop of 1000 times the attention plus the scaled variance of likeness."""
    unit = tokens / (jnp.linalg.norm(tokens, axis=3, keepdims=True) + _SMALL)
    unit = jnp.where(mask[..., None], unit, 0)
    likeness = jnp.einsum("rcme,rcne->rcmn", unit, unit, precision=lax.Precision.HIGHEST)
    likeness = jnp.where(np.eye(mask.shape[1], dtype=bool), 0, likeness)
    # The diagonal counts as a zero in the sum of squares, but not in the number.
    others = np.maximum(size - 1, 1)[:, None]
    mean = likeness.sum(3) / others
    off = jnp.where(mask[:, None] & mask[..., None], likeness - mean[..., None], 0)
    variance = jnp.square(off).sum(3) / others
    scaled = 1000 * attention
    factor = scaled.sum(2) / size / (variance.sum(2) / size + _SMALL)
    scores = (scaled + alpha * factor[..., None] * variance).sum(2) / size
    # A crop of one token has its attention as it is.
    return jnp.where(size > 1, scores, attention.sum(2))


def _allotted(scores: Float[Array, "r c"], count: Int[Array, "r"]) -> Int[Array, "r c"]:
    """Shares a count out by score, rounded down; what is left goes one by one to the best crops."""
    weight = scores / (scores.sum(1, keepdims=True) + _SMALL)
    share = jnp.floor(weight * count[:, None]).astype(jnp.int32)
    rank = jnp.argsort(jnp.argsort(-weight, axis=1, stable=True), axis=1)
    return share + (rank < (count - share.sum(1))[:, None])
