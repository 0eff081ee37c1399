"""Temporal patches of videos, for pruners of videos.

The tokens of a video are in raster order: all tokens of the first temporal patch, then all tokens
of the second, and so on. An image is a video with one temporal patch.
"""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from stepprune_jax.pruning.types import PrunerInputs

# Most temporal patches of a video: half the 768 frames that are sampled at most.
MAX_PATCHES = 384


class TemporalPatches(NamedTuple):
    """The temporal patches of r videos with n tokens each, including padding.

    Attributes:
        size: [r] number of tokens of a temporal patch.
        frames: [r] number of temporal patches.
        of_token: [r, n] temporal patch of each token; `frames` for padding.
        is_patch: [r, t] True = temporal patch, False = padding.
    """

    size: Int[Array, "r"]
    frames: Int[Array, "r"]
    of_token: Int[Array, "r n"]
    is_patch: Bool[Array, "r t"]

    def means(self, values: Float[Array, "r n c"]) -> Float[Array, "r t c"]:
        """Returns the mean of the tokens' values in each temporal patch; 0 for padding."""
        num_slots = self.is_patch.shape[1]

        def average(values, of_token, size):
            sums = jax.ops.segment_sum(values, of_token, num_slots + 1, indices_are_sorted=True)
            return sums[:num_slots] / jnp.maximum(size, 1)

        of_token = jnp.minimum(self.of_token, num_slots)
        return jax.vmap(average)(values, of_token, self.size)

    def spread(self, numbers: Num[Array, "r t"]) -> Num[Array, "r n"]:
        """Returns the number of each token's temporal patch."""
        of_token = jnp.minimum(self.of_token, self.is_patch.shape[1] - 1)
        return jnp.take_along_axis(numbers, of_token, axis=1)

    def rank(self, scores: Float[Array, "r n"]) -> Int[Array, "r n"]:
        """Returns how many tokens of the same temporal patch precede each token by score.

        The lowest score comes first, and of equal scores the earlier token.
        """
        order = jnp.lexsort((scores, self.of_token), axis=1)
        place = jnp.argsort(order, axis=1)
        return place - self.of_token * self.size[:, None]


def find_patches(inputs: PrunerInputs) -> TemporalPatches:
    """Returns the temporal patches of the inputs of a pruner."""
    frames, n = inputs.num_frames, inputs.tokens.shape[1]
    size = jnp.maximum(inputs.valid.sum(1, dtype=jnp.int32) // jnp.maximum(frames, 1), 1)
    of_token = jnp.arange(n, dtype=jnp.int32) // size[:, None]
    of_token = jnp.where(inputs.valid, of_token, frames[:, None])
    # A batch without videos has one temporal patch in each row.
    num_slots = 1 if inputs.frames is None else min(n, MAX_PATCHES)
    return TemporalPatches(size, frames, of_token, jnp.arange(num_slots) < frames[:, None])


def split_counts(
    counts: Int[np.ndarray, "r"], sizes: Int[np.ndarray, "r"], frames: Int[np.ndarray, "r"]
) -> tuple[Int[np.ndarray, "r"], Int[np.ndarray, "r"]]:
    """Returns the number of tokens of a temporal patch, and the counts limited to all tokens."""
    return sizes // np.maximum(frames, 1), np.minimum(counts, sizes)


def cover_patches(
    counts: Int[np.ndarray, "r"], sizes: Int[np.ndarray, "r"], frames: Int[np.ndarray, "r"]
) -> Int[np.ndarray, "r"]:
    """Returns the counts limited to all tokens, with at least one token a temporal patch."""
    return np.maximum(np.minimum(counts, sizes), np.where(frames > 1, frames, 0))


def warn_single_patch(
    name: str,
    counts: Int[np.ndarray, "r"],
    sizes: Int[np.ndarray, "r"],
    frames: Int[np.ndarray, "r"],
) -> None:
    """Warns if a budget leaves a single temporal patch, or less than one, of a longer video."""
    patch_sizes, counts = split_counts(counts, sizes, frames)
    is_single = (frames > 1) & (counts <= patch_sizes)
    if is_single.any():
        row = int(np.argmax(is_single))
        warnings.warn(
            f"{name} keeps {counts[row]} of {sizes[row]} visual tokens, no more than the "
            f"{patch_sizes[row]} tokens of one of {frames[row]} temporal patches (two frames each)",
            stacklevel=2,
        )
