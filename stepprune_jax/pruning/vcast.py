"""V-CAST: gives more tokens to frames where the video changes its direction.

https://arxiv.org/abs/2603.27650. The budget of a temporal patch follows the curvature of the curve
of patch means. Within a temporal patch, tokens that differ from the mean or are long are kept.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from stepprune_jax.policy.layers import MASKED
from stepprune_jax.pruning.base import Kept, Pruner, PrunerInputs, take
from stepprune_jax.pruning.temporal import (
    TemporalPatches,
    cover_patches,
    find_patches,
)

_TEMPERATURE = 0.7  # of the softmax over the temporal patches
_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class VCast(Pruner):
    """Divides the budget by curvature, and keeps outliers and long tokens of each temporal patch.

    Every temporal patch keeps at least one token.
    """

    name = "vcast"
    label = "V-CAST"
    after_projector: ClassVar[bool] = True

    def media_counts(
        self,
        counts: Int[np.ndarray, "r"],
        sizes: Int[np.ndarray, "r"],
        frames: Int[np.ndarray, "r"],
    ) -> Int[np.ndarray, "r"]:
        """Returns at least one token for each temporal patch; a share of a video rounded."""
        if self.budget.kind == "rate":  # `round` rounds halves to the even number
            share = float(self.budget.number)
            rounded = np.array([max(1, round(share * size)) for size in sizes.tolist()])
            counts = np.where(frames > 1, rounded, counts)
        return cover_patches(counts, sizes, frames)

    def keep(self, inputs: PrunerInputs, capacity: int) -> Kept:
        """Keeps `inputs.count` tokens of each row."""
        patches = find_patches(inputs)
        tokens = jnp.where(inputs.valid[..., None], inputs.tokens.astype(jnp.float32), 0)
        center = _normalize(patches.means(tokens))
        weights = jax.nn.softmax(
            jnp.where(patches.is_patch, curvature(center, patches) / _TEMPERATURE, MASKED), axis=1
        )
        quotas = divide_budget(weights, inputs.count, patches)
        is_kept = patches.rank(-token_scores(tokens, center, patches)) < patches.spread(quotas)
        order = jnp.argsort(~(is_kept & inputs.valid), axis=1, stable=True).astype(jnp.int32)
        return take(inputs.whole, order[:, :capacity], inputs.count, capacity)


def _normalize(vectors: Float[Array, "*r d"]) -> Float[Array, "*r d"]:
    """Scales vectors to length 1; vectors shorter than `_EPS` remain shorter."""
    return vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), _EPS)


def curvature(center: Float[Array, "r t d"], patches: TemporalPatches) -> Float[Array, "r t"]:
    """Computes 1 minus the cosine between the steps to and from each patch; 1 at both ends."""
    step = _normalize(jnp.diff(center, axis=1))
    cosine = (step[:, :-1] * step[:, 1:]).sum(2)
    if center.shape[1] < 3:
        return jnp.ones(center.shape[:2])
    curve = jnp.pad(1 - cosine, ((0, 0), (1, 1)), constant_values=1)
    last = patches.frames[:, None] - 1
    return jnp.where(jnp.arange(center.shape[1]) == last, 1, curve)


def divide_budget(
    weights: Float[Array, "r t"], count: Int[Array, "r"], patches: TemporalPatches
) -> Int[Array, "r t"]:
    """Divides a number of tokens over temporal patches in proportion to their weights.

    Every patch gets one token if the number suffices, and at most its own tokens. As in the
    authors' program, tokens that rounding down leaves over go to the patch with the largest
    remainder until it is full, then to the next.

    Args:
        weights: [r, t] weights that add up to 1.
        count: [r] number of tokens to keep.
        patches: the temporal patches.
    """
    base = jnp.where(count >= patches.frames, 1, 0)[:, None] * patches.is_patch
    num_shared = count[:, None] - base.sum(1, keepdims=True)
    raw = weights * num_shared
    room = jnp.where(patches.is_patch, patches.size[:, None], 0)
    quotas = base + jnp.minimum(jnp.floor(raw).astype(jnp.int32), room - base)
    remainder = jnp.where(quotas < room, raw - jnp.floor(raw), -1)
    order = jnp.argsort(-remainder, axis=1, stable=True)
    free = jnp.take_along_axis(room - quotas, order, axis=1)
    num_left = count[:, None] - quotas.sum(1, keepdims=True)
    added = jnp.clip(num_left - (jnp.cumsum(free, axis=1) - free), 0, free)
    return quotas + jnp.take_along_axis(added, jnp.argsort(order, axis=1), axis=1)


def token_scores(
    tokens: Float[Array, "r n d"], center: Float[Array, "r t d"], patches: TemporalPatches
) -> Float[Array, "r n"]:
    """Adds a token's distance from its patch's mean and its length relative to the patch."""
    num_slots = center.shape[1]
    of_token = jnp.minimum(patches.of_token, num_slots - 1)
    token_center = _normalize(jnp.take_along_axis(center, of_token[..., None], axis=1))
    outlier = 1 - (_normalize(tokens) * token_center).sum(2)
    length = jnp.linalg.norm(tokens, axis=2)

    def extremes(length, of_token):
        segments = num_slots + 1, True  # number of segments, and that they are sorted
        smallest = jax.ops.segment_min(length, of_token, *segments)
        return smallest, jax.ops.segment_max(length, of_token, *segments)

    smallest, largest = jax.vmap(extremes)(length, jnp.minimum(patches.of_token, num_slots))
    smallest, largest = (patches.spread(x[:, :num_slots]) for x in (smallest, largest))
    return outlier + (length - smallest) / (largest - smallest + _EPS)
