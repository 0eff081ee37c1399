"""Temporal patches that are uniform in time: a baseline for methods that prune videos."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from stepprune_jax.pruning.base import Kept, Pruner, PrunerInputs, take
from stepprune_jax.pruning.temporal import find_patches, split_counts, warn_single_patch


@dataclasses.dataclass(frozen=True)
class Frames(Pruner):
    """Keeps all tokens of some temporal patches, which are spread evenly over the video.

    The budget is rounded to complete temporal patches of two frames. Of T temporal patches, m are
    kept: floor((i + 1/2) T / m) for i from 0 to m - 1. An image is kept entirely.
    """

    name = "frames"
    label = "frames"
    keeps_images: ClassVar[bool] = True

    def media_counts(
        self,
        counts: Int[np.ndarray, "r"],
        sizes: Int[np.ndarray, "r"],
        frames: Int[np.ndarray, "r"],
    ) -> Int[np.ndarray, "r"]:
        """Rounds each count to the nearest number of complete temporal patches, at least one."""
        patch_sizes, counts = split_counts(counts, sizes, frames)
        num_kept = np.maximum((2 * counts + patch_sizes) // (2 * np.maximum(patch_sizes, 1)), 1)
        counts = np.minimum(num_kept * patch_sizes, sizes)
        warn_single_patch(self.name, counts, sizes, frames)
        return counts

    def keep(self, inputs: PrunerInputs, capacity: int) -> Kept:
        """Keeps the tokens of `inputs.count` / (tokens of a temporal patch) temporal patches."""
        patches = find_patches(inputs)
        size, frames = patches.size[:, None], patches.frames[:, None]
        num_kept = jnp.maximum(inputs.count[:, None] // size, 1)
        token = jnp.arange(capacity, dtype=jnp.int32)[None]
        patch = (2 * (token // size) + 1) * frames // (2 * num_kept)
        order = jnp.minimum(patch * size + token % size, inputs.tokens.shape[1] - 1)
        return take(inputs.whole, order, inputs.count, capacity)
