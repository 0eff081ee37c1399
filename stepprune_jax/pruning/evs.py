"""EVS: keeps the tokens of a video that differ from the same place in the frames before.

Efficient Video Sampling (Bagrov et al., https://arxiv.org/abs/2510.14624). This program was written
from the rule. The dissimilarity of a token is 1 minus the cosine between the token and the token at
the same place in the previous temporal patch. The first temporal patch is kept entirely.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from stepprune_jax.pruning.base import PrunerInputs, Ranker, Ranking
from stepprune_jax.pruning.ordering import by_score, unit_vectors
from stepprune_jax.pruning.temporal import find_patches, split_counts, warn_single_patch

# Score of the tokens of the first temporal patch, above every dissimilarity.
_FIRST_PATCH = 255.0


@dataclasses.dataclass(frozen=True)
class Evs(Ranker):
    """Keeps the first temporal patch, and the tokens with the largest dissimilarity.

    An image is kept entirely. Ties go to the earlier token.
    """

    name = "evs"
    label = "EVS"
    after_projector: ClassVar[bool] = True
    keeps_images: ClassVar[bool] = True

    def media_counts(
        self,
        counts: Int[np.ndarray, "r"],
        sizes: Int[np.ndarray, "r"],
        frames: Int[np.ndarray, "r"],
    ) -> Int[np.ndarray, "r"]:
        """Returns at least the number of tokens of a temporal patch, and a share rounded down."""
        patch_sizes, counts = split_counts(self.floor_counts(counts, sizes), sizes, frames)
        counts = np.maximum(counts, patch_sizes)
        warn_single_patch(self.name, counts, sizes, frames)
        return counts

    def rank(self, inputs: PrunerInputs, steps: int) -> Ranking:
        """Orders the tokens of each row by dissimilarity; the first temporal patch comes first."""
        patches, unit = find_patches(inputs), unit_vectors(inputs.tokens, inputs.valid)
        n = unit.shape[1]
        previous = jnp.maximum(jnp.arange(n) - patches.size[:, None], 0)
        cosine = jnp.sum(unit * jnp.take_along_axis(unit, previous[..., None], axis=1), axis=2)
        score = jnp.where(patches.of_token == 0, _FIRST_PATCH, 1 - cosine)
        return Ranking(by_score(score, inputs.valid)[:, :steps])
