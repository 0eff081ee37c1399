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
# Attention is multiplied by this number, as in the authors' program.
_ATTENTION_SCALE = 1000


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
    reads_videos: ClassVar[bool] = False
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

    def keep(self, inputs: PrunerInputs, capacity: int) -> Kept:
        """Keeps tokens by crop, and within a crop by descending attention.

        If the crops have too few tokens for the count, zero vectors fill it up. Without a class
        token, the kept tokens are in raster order instead.

        Args:
            inputs: inputs of the pruner. The only tap is the class token's attention [r, h, n + 1],
                or the attention that tokens receive [r, n] in a model without a class token.
            capacity: static size k of the result.

        Returns:
            The kept tokens.
        """
        has_class_token = inputs.taps[0].ndim == 3
        if not has_class_token:
            return self._keep_by_received_attention(inputs, capacity)
        attention = inputs.taps[0].astype(jnp.float32).mean(1)[:, 1:]
        r, n = attention.shape
        slot, num_kept = divide_among_crops(
            inputs.tokens.astype(jnp.float32), attention, inputs.count, self.crops, self.alpha
        )
        # The inverse mapping, from slots to tokens. Slots of dropped tokens are out of bounds.
        index = jnp.full((r, capacity), -1, jnp.int32)
        index = index.at[jnp.arange(r)[:, None], slot].set(jnp.arange(n), mode="drop")
        slots = jnp.arange(capacity)
        is_token, valid = slots < num_kept[:, None], slots < inputs.count[:, None]
        token_index = jnp.where(is_token, index, 0)
        tokens = jnp.take_along_axis(inputs.whole, token_index[..., None], axis=1)
        return Kept(
            index=index,
            # Zero vectors take the position of the last token.
            place=jnp.where(is_token, token_index, jnp.where(valid, n - 1, 0)),
            tokens=jnp.where(is_token[..., None], tokens, 0),
            valid=valid,
            count=inputs.count,
        )

    def _keep_by_received_attention(self, inputs: PrunerInputs, capacity: int) -> Kept:
        """Keeps tokens in a model without a class token, whose images may differ in size."""
        received = inputs.taps[0]
        is_kept = keep_in_crops(inputs.tokens, received, inputs.valid, inputs.count, self.alpha)
        order = jnp.argsort(~is_kept, axis=1, stable=True).astype(jnp.int32)
        return take(inputs.whole, order, inputs.count, capacity)


def keep_in_crops(
    tokens: Float[Array, "r n e"],
    received: Float[Array, "r n"],
    is_token: Bool[Array, "r n"],
    count: Int[Array, "r"],
    alpha: float,
) -> Bool[Array, "r n"]:
    """Marks the tokens to keep in a model without a class token.

    The image is split into crops, and the count is divided among them by score. The score of a crop
    is the mean score of its tokens, see `_crop_scores`.

    Args:
        tokens: [r, n, e] projected tokens of r images.
        received: [r, n] attention that each token receives.
        is_token: [r, n] False at padding.
        count: [r] number of tokens to keep.
        alpha: weight of the variance of similarity.

    Returns:
        [r, n] True at tokens to keep.
    """
    n = tokens.shape[1]  # also the largest number of crops
    token_index = jnp.arange(n)[None]
    crop = jnp.where(is_token, _assign_crops(is_token, count), n)
    rows = jnp.arange(len(crop))[:, None]
    crop_sizes = jnp.zeros(crop.shape, jnp.int32).at[rows, crop].add(1, mode="drop")

    features = jnp.where(is_token[..., None], tokens.astype(jnp.float32), 0)
    unit_tokens = features / (jnp.linalg.norm(features, axis=2, keepdims=True) + _EPSILON)

    def similarity_variance(chunk, chunk_crop, chunk_index):
        """Computes the variance of each token's similarity to all other tokens of its crop."""
        same_crop = chunk_crop[..., None] == crop[:, None]
        cosine = jnp.einsum("rqe,rne->rqn", chunk, unit_tokens, precision=_EXACT)
        cosine = jnp.where(same_crop & (chunk_index[..., None] != token_index), cosine, 0)
        num_others = jnp.maximum(jnp.sum(same_crop, axis=2) - 1, 1)
        mean = cosine.sum(2) / num_others
        deviation = jnp.where(same_crop, cosine - mean[..., None], 0)
        return jnp.square(deviation).sum(2) / num_others

    variance = map_tokens(similarity_variance, unit_tokens, crop, token_index)
    received = jnp.where(is_token, received.astype(jnp.float32), 0)
    attention_score = _ATTENTION_SCALE * received
    # The means over the crop of each token.
    means = group_means(jnp.stack([attention_score, variance], axis=2), crop, crop)
    token_score = attention_score + alpha * means[..., 0] / (means[..., 1] + _EPSILON) * variance
    crop_means = group_means(jnp.stack([token_score, received], axis=2), crop, token_index)
    # The score of a crop with a single token is its attention.
    crop_scores = jnp.where(crop_sizes > 1, crop_means[..., 0], crop_means[..., 1])
    quotas = _divide_count(jnp.where(crop_sizes > 0, crop_scores, 0), count)
    num_kept = jnp.minimum(quotas, crop_sizes)
    # The surplus of full crops goes to the best crops that have room: crop i in this order gets
    # what remains after the crops before it are full.
    crop_order = jnp.argsort(-jnp.where(crop_sizes > 0, crop_scores, -1), axis=1, stable=True)
    room = jnp.take_along_axis(crop_sizes - num_kept, crop_order, axis=1)
    room_before = jnp.cumsum(room, axis=1) - room
    surplus = (count - num_kept.sum(1))[:, None]
    extra = jnp.clip(surplus - room_before, 0, room)
    num_kept += jnp.take_along_axis(extra, jnp.argsort(crop_order, axis=1), axis=1)
    return is_token & keep_best(received, jnp.where(is_token, crop, -1), num_kept)


def _assign_crops(is_token: Bool[Array, "r n"], count: Int[Array, "r"]) -> Int[Array, "r n"]:
    """Splits each image's sequence of tokens into crops of nearly equal length.

    An image with m tokens has 16 m / (9 `count`) crops, rounded down, but at least 1.

    Args:
        is_token: [r, n] True at the tokens, which come before the padding.
        count: [r] number of tokens to keep.

    Returns:
        [r, n] crop of each token; undefined for padding.
    """
    num_tokens = jnp.sum(is_token, axis=1)
    num_crops = 16 * num_tokens // (9 * jnp.maximum(count, 1))
    num_crops = jnp.clip(num_crops, 1, jnp.maximum(num_tokens, 1))
    # As in `np.array_split`, the first crops are one token longer.
    short_length = (num_tokens // num_crops)[:, None]
    num_long_crops = (num_tokens % num_crops)[:, None]
    num_tokens_in_long_crops = num_long_crops * (short_length + 1)
    token_index = jnp.arange(is_token.shape[1])
    index_after_long_crops = token_index - num_tokens_in_long_crops
    return jnp.where(
        index_after_long_crops < 0,
        token_index // (short_length + 1),
        num_long_crops + index_after_long_crops // jnp.maximum(short_length, 1),
    )


def divide_among_crops(
    tokens: Float[Array, "r n e"],
    attention: Float[Array, "r n"],
    count: Int[Array, "r"],
    crops: int,
    alpha: float,
) -> tuple[Int[Array, "r n"], Int[Array, "r"]]:
    """Divides a count of tokens among crops, and chooses the tokens of each crop.

    Args:
        tokens: [r, n, e] projected tokens of r images.
        attention: [r, n] the class token's attention to each token.
        count: [r] number of tokens to keep.
        crops: number of crops.
        alpha: weight of the variance of similarity.

    Returns:
        [r, n] slot of each token among the kept tokens, n or more for a dropped token; and [r]
        number of kept tokens, which may be less than `count`.
    """
    n = tokens.shape[1]
    crop_tokens = np.array_split(np.arange(n), min(crops, n))  # token indices of each crop
    crop_sizes = np.array([len(indices) for indices in crop_tokens])
    max_size = crop_sizes[0]
    # Crops become rows of one array. Shorter crops repeat their last token, which is masked.
    padded_crops = np.stack(
        [np.pad(indices, (0, max_size - len(indices)), mode="edge") for indices in crop_tokens]
    )
    mask = np.arange(max_size) < crop_sizes[:, None]
    attention = jnp.where(mask, attention[:, padded_crops], 0)
    scores = _crop_scores(tokens[:, padded_crops], attention, mask, crop_sizes, alpha)
    quotas = _divide_count(scores, count)
    # A crop that keeps all of its tokens keeps them in raster order.
    keeps_all = (quotas >= crop_sizes)[..., None]
    by_attention = jnp.argsort(jnp.where(mask, -attention, 1), axis=2, stable=True)
    rank = jnp.where(keeps_all, np.arange(max_size), jnp.argsort(by_attention, axis=2))
    num_kept = jnp.minimum(quotas, crop_sizes)
    first_slot = jnp.cumsum(num_kept, axis=1) - num_kept
    slot = jnp.where(rank < num_kept[..., None], first_slot[..., None] + rank, n)
    # Crops are consecutive, so the unmasked entries are the tokens in raster order.
    slot = slot.reshape(len(slot), -1)[:, np.flatnonzero(mask)]
    return slot.astype(jnp.int32), num_kept.sum(1, dtype=jnp.int32)


def _crop_scores(
    tokens: Float[Array, "r c m e"],
    attention: Float[Array, "r c m"],
    mask: np.ndarray,
    crop_sizes: np.ndarray,
    alpha: float,
) -> Float[Array, "r c"]:
    """Computes the score of each crop: the mean over its tokens of 1000 a + alpha' v.

    a is the attention to a token, and v the variance of its similarity to all other tokens of the
    crop. alpha' is `alpha` times (mean of 1000 a) / (mean of v), so both terms have the same scale.

    Args:
        tokens: [r, c, m, e] tokens of the c crops of each image, padded to m tokens.
        attention: [r, c, m] attention to each token; 0 for padding.
        mask: [c, m] False at padding.
        crop_sizes: [c] number of tokens of each crop.
        alpha: weight of the variance.

    Returns:
        [r, c] scores.
    """
    unit_tokens = tokens / (jnp.linalg.norm(tokens, axis=3, keepdims=True) + _EPSILON)
    unit_tokens = jnp.where(mask[..., None], unit_tokens, 0)
    cosine = jnp.einsum("rcme,rcne->rcmn", unit_tokens, unit_tokens, precision=_EXACT)
    cosine = jnp.where(np.eye(mask.shape[1], dtype=bool), 0, cosine)
    # As in the authors' program, the diagonal adds a term to the sum of squares but is not counted.
    num_others = np.maximum(crop_sizes - 1, 1)[:, None]
    mean = cosine.sum(3) / num_others
    deviation = jnp.where(mask[:, None] & mask[..., None], cosine - mean[..., None], 0)
    variance = jnp.square(deviation).sum(3) / num_others
    attention_score = _ATTENTION_SCALE * attention
    mean_variance = variance.sum(2) / crop_sizes
    balance = attention_score.sum(2) / crop_sizes / (mean_variance + _EPSILON)
    scores = (attention_score + alpha * balance[..., None] * variance).sum(2) / crop_sizes
    # The score of a crop of one token is its attention.
    return jnp.where(crop_sizes > 1, scores, attention.sum(2))


def _divide_count(scores: Float[Array, "r c"], count: Int[Array, "r"]) -> Int[Array, "r c"]:
    """Divides a count of tokens among crops in proportion to their scores.

    Quotas are rounded down. The remainder goes to the best crops, one token each.

    Args:
        scores: [r, c] scores of the c crops of each image.
        count: [r] number of tokens to divide.

    Returns:
        [r, c] number of tokens of each crop, which may exceed the size of the crop.
    """
    share = scores / (scores.sum(1, keepdims=True) + _EPSILON)
    quota = jnp.floor(share * count[:, None]).astype(jnp.int32)
    remainder = (count - quota.sum(1))[:, None]
    rank = jnp.argsort(jnp.argsort(-share, axis=1, stable=True), axis=1)
    return quota + (rank < remainder)
