"""VidCom2: keeps the tokens of a video that are least like its mean and the mean of their frames.

Liu et al., EMNLP 2025 (https://arxiv.org/abs/2505.14454). Frames that are less like the video get a
larger share of the budget.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.policy.layers import MASKED
from stepprune_jax.pruning.base import Kept, Pruner, PrunerInputs, take
from stepprune_jax.pruning.ordering import unit_vectors
from stepprune_jax.pruning.temporal import (
    TemporalPatches,
    cover_patches,
    find_patches,
)

# Widths of the Gaussian kernels whose sum is the similarity to a center.
_WIDTHS = (0.125, 0.25, 0.5, 1.0, 2.0)
# Temperature of the softmax over the temporal patches.
_TEMPERATURE = 0.01


@dataclasses.dataclass(frozen=True)
class VidCom2(Pruner):
    """Keeps the tokens with the lowest similarity to the centers of the video and of their patch.

    The authors' budgets of the temporal patches do not add up to an exact count. As in vLLM, the
    tokens with the highest similarity are then dropped, or those with the lowest are added.

    Attributes:
        deepstack: whether the similarities read the DeepStack features as well, as in vLLM. The
            authors compare the tokens without them.
    """

    deepstack: bool = False

    name = "vidcom2"
    label = "VidCom2"
    after_projector: ClassVar[bool] = True

    def media_counts(
        self,
        counts: Int[np.ndarray, "r"],
        sizes: Int[np.ndarray, "r"],
        frames: Int[np.ndarray, "r"],
    ) -> Int[np.ndarray, "r"]:
        """Returns at least one token for each temporal patch; a share of a video rounded down."""
        counts = np.where(frames > 1, self.floor_counts(counts, sizes), counts)
        return cover_patches(counts, sizes, frames)

    def keep(self, inputs: PrunerInputs, capacity: int) -> Kept:
        """Keeps `inputs.count` tokens of each row."""
        patches = find_patches(inputs)
        tokens = inputs.whole if self.deepstack else inputs.tokens
        to_video, to_patch = similarities(tokens, inputs.valid, patches)
        scores = to_video + to_patch
        share = inputs.count / jnp.maximum(inputs.valid.sum(1), 1)
        quotas = patch_quotas(to_video, share, patches)
        is_kept = patches.rank(scores) < patches.spread(quotas)
        # The kept tokens from the lowest score on, then all other tokens from the lowest score on.
        group = jnp.where(inputs.valid, jnp.where(is_kept, 0, 1), 2)
        order = jnp.lexsort((scores, group), axis=1).astype(jnp.int32)
        return take(inputs.whole, order[:, :capacity], inputs.count, capacity)


def similarities(
    tokens: Float[Array, "r n d"], valid: Bool[Array, "r n"], patches: TemporalPatches
) -> tuple[Float[Array, "r n"], Float[Array, "r n"]]:
    """Computes the similarity of each token to the centers of its video and its temporal patch.

    Only the half of the channels with the lowest variance over the video is compared.

    Returns:
        [r, n] similarity to the mean of the video, and to the mean of the temporal patch.
    """
    tokens = jnp.where(valid[..., None], tokens.astype(jnp.float32), 0)
    num_tokens = jnp.maximum(valid.sum(1), 1)[:, None, None]
    mean = tokens.sum(1, keepdims=True) / num_tokens
    deviation = jnp.where(valid[..., None], tokens - mean, 0)
    variance = (deviation**2).sum(1) / num_tokens[:, 0]
    rank = jnp.argsort(jnp.argsort(variance, axis=1, stable=True), axis=1)
    tokens = jnp.where((rank < tokens.shape[2] // 2)[:, None], tokens, 0)
    unit = unit_vectors(tokens, valid)
    video_center = unit.sum(1, keepdims=True) / num_tokens
    patch_center = patches.means(unit)
    of_token = jnp.minimum(patches.of_token, patch_center.shape[1] - 1)
    token_center = jnp.take_along_axis(patch_center, of_token[..., None], axis=1)

    def kernel(center: Float[Array, "r #n d"]) -> Float[Array, "r n"]:
        distance = ((unit - center) ** 2).sum(2)
        return sum((jnp.exp(-distance / (2 * width)) for width in _WIDTHS), jnp.float32(0))

    return kernel(video_center), kernel(token_center)


def patch_quotas(
    to_video: Float[Array, "r n"], share: Float[Array, "r"], patches: TemporalPatches
) -> Float[Array, "r t"]:
    """Computes the number of tokens to keep of each temporal patch, before the exact count.

    Args:
        to_video: [r, n] similarity of each token to the center of its video.
        share: [r] fraction of tokens to keep.
        patches: the temporal patches.
    """
    score = -patches.means(to_video[..., None])[..., 0]
    score = jnp.where(patches.is_patch, score, MASKED)
    probability = jax.nn.softmax((score - score.max(1, keepdims=True)) / _TEMPERATURE, axis=1)
    mean = 1 / jnp.maximum(patches.frames, 1)[:, None]
    scale = jnp.minimum(share[:, None] * (1 + probability - mean), 1)
    size = patches.size[:, None]
    # `round` rounds halves to the even number.
    return jnp.clip(jnp.round(scale * size), 1, size)
