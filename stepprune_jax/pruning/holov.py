"""HoloV: every part of an image keeps tokens, more where attention is high and tokens are diverse.

Zou et al. (https://arxiv.org/abs/2510.02912), following the authors' program for LLaVA. The raster
sequence of projected tokens is split into crops. A token's score adds the class token's attention
and the variance of its similarity to the others of its crop; the budget is divided among crops in
proportion to their mean scores. Within a crop the tokens that the class token attends to most are
kept.

In a model without a class token, the attention that tokens receive takes its place. The kept tokens
are then in raster order, and the surplus of a full crop goes to the next best ones, unlike in the
authors' program, which leaves scores in the order of the tower's windows.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.pruning.base import Kept, Pruner, PrunerInputs, take
from stepprune_jax.pruning.budget import EXACT
from stepprune_jax.pruning.ordering import (
    group_means,
    keep_best,
    map_tokens,
    ranking_block,
    require_grid,
)

_EXACT = lax.Precision.HIGHEST
# Keeps divisions finite, as in the authors' program.
_SMALL = 1e-6


@dataclasses.dataclass(frozen=True)
class HoloV(Pruner):
    """Divides the budget among crops of the image.

    With a class token it is not the unpruned model at any budget: where a crop has too few tokens,
    zero vectors take their place, and tokens are ordered by crop and then by attention.

    Attributes:
        crops: number of parts of the sequence; the first ones are one token longer if it does not
            divide evenly. The authors' `num_patches`. In a model without a class token it is 16 / 9
            of n / k, rounded down, as in the authors' program.
        alpha: weight of the variance of similarity.
    """

    crops: int = 16
    alpha: float = 0.09

    name = "holov"
    label = "HoloV"
    budgets: ClassVar[tuple[str, ...]] = EXACT
    after_projector: ClassVar[bool] = True
    positions: ClassVar[str] = "compact"

    def check(self, config: ModelConfig, num_tokens: int) -> None:
        """Rejects models that do not rank patches, no crops, and a negative weight."""
        super().check(config, num_tokens)
        require_grid(config, self.name)
        ranking_block(config, self.name)
        self.expect("crops", self.crops >= 1, "an integer from 1")
        self.expect("alpha", self.alpha >= 0, "0 or more")

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Returns the class token's row of attention, or the attention that tokens receive."""
        kind = "attention" if config.received_block is None else "received"
        return (Tap(kind, ranking_block(config, self.name)),)

    def keep(self, view: PrunerInputs, capacity: int) -> Kept:
        """Returns the tokens by crop, in each by attention; then zero vectors.

        Without a class token, the tokens in raster order.
        """
        if view.taps[0].ndim == 2:
            return self._select_received(view, capacity)
        attention = view.taps[0].astype(jnp.float32).mean(1)[:, 1:]
        r, n = attention.shape
        order, found = shares(
            view.tokens.astype(jnp.float32), attention, view.count, self.crops, self.alpha
        )
        slots = jnp.arange(capacity)
        index = jnp.full((r, capacity), -1, jnp.int32)
        index = index.at[jnp.arange(r)[:, None], order].set(jnp.arange(n), mode="drop")
        is_token, valid = slots < found[:, None], slots < view.count[:, None]
        at = jnp.where(is_token, index, 0)
        kept = jnp.take_along_axis(view.whole, at[..., None], axis=1)
        return Kept(
            index=index,
            place=jnp.where(is_token, at, jnp.where(valid, n - 1, 0)),
            tokens=jnp.where(is_token[..., None], kept, 0),
            valid=valid,
            count=view.count,
        )

    def _select_received(self, view: PrunerInputs, capacity: int) -> Kept:
        """Chooses in a model without a class token; images may differ in size."""
        received = view.taps[0]
        real = jnp.ones(received.shape, bool) if view.valid is None else view.valid
        kept = keep_in_crops(view.tokens, received, real, view.count, self.alpha)
        order = jnp.argsort(~kept, axis=1, stable=True).astype(jnp.int32)
        return take(view.whole, order, view.count, capacity)


def keep_in_crops(
    tokens: Float[Array, "r n e"],
    received: Float[Array, "r n"],
    real: Bool[Array, "r n"],
    count: Int[Array, "r"],
    alpha: float,
) -> Bool[Array, "r n"]:
    """Divides a count among crops of images of any size, and marks the tokens chosen in each."""
    n = tokens.shape[1]
    crop, place = jnp.where(real, _crops_of(real, count), n), jnp.arange(n)[None]
    rows = jnp.arange(len(crop))[:, None]
    size = jnp.zeros(crop.shape, jnp.int32).at[rows, crop].add(1, mode="drop")

    wide = jnp.where(real[..., None], tokens.astype(jnp.float32), 0)
    unit = wide / (jnp.linalg.norm(wide, axis=2, keepdims=True) + _SMALL)

    def variance_of(part, own, at):
        """Computes the variance of the similarities of some tokens to others of their crop."""
        same = own[..., None] == crop[:, None]
        likeness = jnp.einsum("rqe,rne->rqn", part, unit, precision=_EXACT)
        likeness = jnp.where(same & (at[..., None] != place), likeness, 0)
        others = jnp.maximum(jnp.sum(same, axis=2) - 1, 1)
        mean = likeness.sum(2) / others
        off = jnp.where(same, likeness - mean[..., None], 0)
        return jnp.square(off).sum(2) / others

    variance = map_tokens(variance_of, unit, crop, place)
    received = jnp.where(real, received.astype(jnp.float32), 0)
    own = group_means(jnp.stack([1000 * received, variance], axis=2), crop, crop)
    scaled = 1000 * received + alpha * own[..., 0] / (own[..., 1] + _SMALL) * variance
    whole = group_means(jnp.stack([scaled, received], axis=2), crop, place)
    # The score of a crop of one token is its attention.
    scores = jnp.where(size > 1, whole[..., 0], whole[..., 1])
    share = jnp.minimum(_allotted(jnp.where(size > 0, scores, 0), count), size)
    # The surplus of full crops goes to the best crops with room.
    by_crop = jnp.argsort(-jnp.where(size > 0, scores, -1), axis=1, stable=True)
    room = jnp.take_along_axis(size - share, by_crop, axis=1)
    left = (count - share.sum(1))[:, None]
    more = jnp.clip(left - (jnp.cumsum(room, axis=1) - room), 0, room)
    share += jnp.take_along_axis(more, jnp.argsort(by_crop, axis=1), axis=1)
    return real & keep_best(received, jnp.where(real, crop, -1), share)


def _crops_of(real: Bool[Array, "r n"], count: Int[Array, "r"]) -> Int[Array, "r n"]:
    """Returns each token's crop, of 16 / 9 of n / k crops, at least 1."""
    total = jnp.sum(real, axis=1)
    crops = jnp.clip(16 * total // (9 * jnp.maximum(count, 1)), 1, jnp.maximum(total, 1))
    # As in `np.array_split`, the first crops are one token longer.
    least, longer = (x[:, None] for x in (total // crops, total % crops))
    edge, place = longer * (least + 1), jnp.arange(real.shape[1])
    behind = longer + (place - edge) // jnp.maximum(least, 1)
    return jnp.where(place < edge, place // (least + 1), behind)


def shares(
    tokens: Float[Array, "r n e"],
    attention: Float[Array, "r n"],
    count: Int[Array, "r"],
    crops: int,
    alpha: float,
) -> tuple[Int[Array, "r n"], Int[Array, "r"]]:
    """Divides a count among crops, and chooses in each.

    Returns the place of each token among the kept ones, n or more if it is not kept, and the number
    of kept tokens, which may be less than `count`.
    """
    n = tokens.shape[1]
    parts = np.array_split(np.arange(n), min(crops, n))
    longest = len(parts[0])
    # Crops are rows of one array; the last place of the shorter ones is masked.
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
    """Averages 1000 times the attention plus the scaled variance of similarity over each crop."""
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
    # The score of a crop of one token is its attention.
    return jnp.where(size > 1, scores, attention.sum(2))


def _allotted(scores: Float[Array, "r c"], count: Int[Array, "r"]) -> Int[Array, "r c"]:
    """Divides a count by score, rounded down; the remainder goes one by one to the best crops."""
    weight = scores / (scores.sum(1, keepdims=True) + _SMALL)
    share = jnp.floor(weight * count[:, None]).astype(jnp.int32)
    rank = jnp.argsort(jnp.argsort(-weight, axis=1, stable=True), axis=1)
    return share + (rank < (count - share.sum(1))[:, None])
