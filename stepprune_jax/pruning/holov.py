"""HoloV: divides the budget among crops of the image, by attention and diversity.

Zou et al. (https://arxiv.org/abs/2510.02912), following the authors' program for LLaVA. The raster
sequence of projected tokens is split into crops. The score of a token is the class token's
attention to it plus the variance of its similarity to all other tokens of its crop. The budget is
divided among crops in proportion to their mean scores. Each crop keeps the tokens with the largest
attention of the class token.

In a model without a class token, the attention that tokens receive replaces the class token's
attention. The kept tokens are then in raster order, and the surplus of a full crop goes to the next
best crops. The authors' program differs here: it leaves scores in the order of the tower's windows.
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
_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class HoloV(Pruner):
    """Divides the budget among crops of the image.

    With a class token, no budget reproduces the unpruned model: zero vectors replace tokens that a
    small crop lacks, and tokens are ordered by crop and then by attention.

    Attributes:
        crops: number of crops, the authors' `num_patches`; if the sequence does not divide evenly,
            the first crops are one token longer. Without a class token, the number of crops is
            16 / 9 of n / k, rounded down, as in the authors' program.
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
        """Rejects models whose tower does not rank patches, and invalid options."""
        super().check(config, num_tokens)
        require_grid(config, self.name)
        ranking_block(config, self.name)
        self.expect("crops", self.crops >= 1, "an integer from 1")
        self.expect("alpha", self.alpha >= 0, "0 or more")

    def taps(self, config: ModelConfig) -> tuple[Tap, ...]:
        """Returns the tap of the class token's attention, or of the attention tokens receive."""
        kind = "attention" if config.received_block is None else "received"
        return (Tap(kind, ranking_block(config, self.name)),)

    def keep(self, view: PrunerInputs, capacity: int) -> Kept:
        """Keeps tokens by crop, within a crop by attention, followed by zero vectors.

        Without a class token, the kept tokens are in raster order.
        """
        if view.taps[0].ndim == 2:
            return self._select_received(view, capacity)
        attention = view.taps[0].astype(jnp.float32).mean(1)[:, 1:]
        r, n = attention.shape
        order, num_kept = shares(
            view.tokens.astype(jnp.float32), attention, view.count, self.crops, self.alpha
        )
        slots = jnp.arange(capacity)
        index = jnp.full((r, capacity), -1, jnp.int32)
        index = index.at[jnp.arange(r)[:, None], order].set(jnp.arange(n), mode="drop")
        is_token, valid = slots < num_kept[:, None], slots < view.count[:, None]
        token_index = jnp.where(is_token, index, 0)
        kept = jnp.take_along_axis(view.whole, token_index[..., None], axis=1)
        return Kept(
            index=index,
            place=jnp.where(is_token, token_index, jnp.where(valid, n - 1, 0)),
            tokens=jnp.where(is_token[..., None], kept, 0),
            valid=valid,
            count=view.count,
        )

    def _select_received(self, view: PrunerInputs, capacity: int) -> Kept:
        """Keeps tokens in a model without a class token, whose images may differ in size."""
        received = view.taps[0]
        real = jnp.ones(received.shape, bool) if view.valid is None else view.valid
        is_kept = keep_in_crops(view.tokens, received, real, view.count, self.alpha)
        order = jnp.argsort(~is_kept, axis=1, stable=True).astype(jnp.int32)
        return take(view.whole, order, view.count, capacity)


def keep_in_crops(
    tokens: Float[Array, "r n e"],
    received: Float[Array, "r n"],
    real: Bool[Array, "r n"],
    count: Int[Array, "r"],
    alpha: float,
) -> Bool[Array, "r n"]:
    """Marks the tokens to keep in a model without a class token.

    Args:
        tokens: [r, n, e] projected tokens.
        received: [r, n] attention that each token receives.
        real: [r, n] True at real tokens.
        count: [r] number of tokens to keep.
        alpha: weight of the variance of similarity.

    Returns:
        [r, n] True at tokens to keep.
    """
    n = tokens.shape[1]
    crop, token_index = jnp.where(real, _crops_of(real, count), n), jnp.arange(n)[None]
    rows = jnp.arange(len(crop))[:, None]
    crop_size = jnp.zeros(crop.shape, jnp.int32).at[rows, crop].add(1, mode="drop")

    features = jnp.where(real[..., None], tokens.astype(jnp.float32), 0)
    unit = features / (jnp.linalg.norm(features, axis=2, keepdims=True) + _EPSILON)

    def variance_of(chunk, chunk_crop, chunk_index):
        """Computes the variance of each token's similarity to all other tokens of its crop."""
        same_crop = chunk_crop[..., None] == crop[:, None]
        cosine = jnp.einsum("rqe,rne->rqn", chunk, unit, precision=_EXACT)
        cosine = jnp.where(same_crop & (chunk_index[..., None] != token_index), cosine, 0)
        num_others = jnp.maximum(jnp.sum(same_crop, axis=2) - 1, 1)
        mean = cosine.sum(2) / num_others
        deviation = jnp.where(same_crop, cosine - mean[..., None], 0)
        return jnp.square(deviation).sum(2) / num_others

    variance = map_tokens(variance_of, unit, crop, token_index)
    received = jnp.where(real, received.astype(jnp.float32), 0)
    crop_mean = group_means(jnp.stack([1000 * received, variance], axis=2), crop, crop)
    token_score = (
        1000 * received + alpha * crop_mean[..., 0] / (crop_mean[..., 1] + _EPSILON) * variance
    )
    crop_score = group_means(jnp.stack([token_score, received], axis=2), crop, token_index)
    # The score of a crop with a single token is its attention.
    scores = jnp.where(crop_size > 1, crop_score[..., 0], crop_score[..., 1])
    crop_count = jnp.minimum(_allotted(jnp.where(crop_size > 0, scores, 0), count), crop_size)
    # The surplus of full crops goes to the best crops that have room.
    crop_order = jnp.argsort(-jnp.where(crop_size > 0, scores, -1), axis=1, stable=True)
    room = jnp.take_along_axis(crop_size - crop_count, crop_order, axis=1)
    surplus = (count - crop_count.sum(1))[:, None]
    extra = jnp.clip(surplus - (jnp.cumsum(room, axis=1) - room), 0, room)
    crop_count += jnp.take_along_axis(extra, jnp.argsort(crop_order, axis=1), axis=1)
    return real & keep_best(received, jnp.where(real, crop, -1), crop_count)


def _crops_of(real: Bool[Array, "r n"], count: Int[Array, "r"]) -> Int[Array, "r n"]:
    """Returns the crop of each token; there are 16 / 9 of n / k crops, but at least 1."""
    num_tokens = jnp.sum(real, axis=1)
    crops = jnp.clip(16 * num_tokens // (9 * jnp.maximum(count, 1)), 1, jnp.maximum(num_tokens, 1))
    # As in `np.array_split`, the first crops are one token longer.
    crop_size, num_longer = (x[:, None] for x in (num_tokens // crops, num_tokens % crops))
    edge, token_index = num_longer * (crop_size + 1), jnp.arange(real.shape[1])
    later_crop = num_longer + (token_index - edge) // jnp.maximum(crop_size, 1)
    return jnp.where(token_index < edge, token_index // (crop_size + 1), later_crop)


def shares(
    tokens: Float[Array, "r n e"],
    attention: Float[Array, "r n"],
    count: Int[Array, "r"],
    crops: int,
    alpha: float,
) -> tuple[Int[Array, "r n"], Int[Array, "r"]]:
    """Divides a count among crops, and chooses the tokens of each crop.

    Args:
        tokens: [r, n, e] projected tokens.
        attention: [r, n] the class token's attention to each token.
        count: [r] number of tokens to keep.
        crops: number of crops.
        alpha: weight of the variance of similarity.

    Returns:
        The position of each token among the kept tokens, n or more for a dropped token, and the
        number of kept tokens, which may be less than `count`.
    """
    n = tokens.shape[1]
    parts = np.array_split(np.arange(n), min(crops, n))
    max_size = len(parts[0])
    # Crops are rows of one array. The last entry of shorter crops is masked.
    padded_parts = np.stack(
        [np.pad(part, (0, max_size - len(part)), mode="edge") for part in parts]
    )
    size = np.array([len(part) for part in parts])
    mask = np.arange(max_size) < size[:, None]
    attention = jnp.where(mask, attention[:, padded_parts], 0)
    crop_count = _allotted(
        _crop_scores(tokens[:, padded_parts], attention, mask, size, alpha), count
    )
    is_complete = crop_count >= size
    by_attention = jnp.argsort(jnp.where(mask, -attention, 1), axis=2, stable=True)
    rank = jnp.where(is_complete[..., None], np.arange(max_size), jnp.argsort(by_attention, axis=2))
    num_kept = jnp.minimum(crop_count, size)
    first_place = jnp.cumsum(num_kept, axis=1) - num_kept
    place = jnp.where(rank < num_kept[..., None], first_place[..., None] + rank, n)
    place = place.reshape(len(place), -1)[:, np.flatnonzero(mask)]
    return place.astype(jnp.int32), num_kept.sum(1, dtype=jnp.int32)


def _crop_scores(
    tokens: Float[Array, "r c m e"],
    attention: Float[Array, "r c m"],
    mask: np.ndarray,
    size: np.ndarray,
    alpha: float,
) -> Float[Array, "r c"]:
    """Computes the score of each crop: the mean of 1000 attention + alpha' variance.

    alpha' is `alpha` times the crop's mean of 1000 attention over its mean variance.
    """
    unit = tokens / (jnp.linalg.norm(tokens, axis=3, keepdims=True) + _EPSILON)
    unit = jnp.where(mask[..., None], unit, 0)
    cosine = jnp.einsum("rcme,rcne->rcmn", unit, unit, precision=lax.Precision.HIGHEST)
    cosine = jnp.where(np.eye(mask.shape[1], dtype=bool), 0, cosine)
    # As in the authors' program, the diagonal adds a zero to the sum of squares but is not counted.
    num_others = np.maximum(size - 1, 1)[:, None]
    mean = cosine.sum(3) / num_others
    deviation = jnp.where(mask[:, None] & mask[..., None], cosine - mean[..., None], 0)
    variance = jnp.square(deviation).sum(3) / num_others
    token_score = 1000 * attention
    balance = token_score.sum(2) / size / (variance.sum(2) / size + _EPSILON)
    scores = (token_score + alpha * balance[..., None] * variance).sum(2) / size
    # The score of a crop of one token is its attention.
    return jnp.where(size > 1, scores, attention.sum(2))


def _allotted(scores: Float[Array, "r c"], count: Int[Array, "r"]) -> Int[Array, "r c"]:
    """Divides a count in proportion to scores, rounded down.

    The best crops get one more token each until the remainder is used up.
    """
    weight = scores / (scores.sum(1, keepdims=True) + _EPSILON)
    quota = jnp.floor(weight * count[:, None]).astype(jnp.int32)
    rank = jnp.argsort(jnp.argsort(-weight, axis=1, stable=True), axis=1)
    return quota + (rank < (count - quota.sum(1))[:, None])
