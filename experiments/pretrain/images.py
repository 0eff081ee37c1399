"""Images of a batch, which may differ in their number of visual tokens."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.images import Pixels


class Images(NamedTuple):
    """Some images, padded to the largest.

    Attributes:
        pixels: as the family's preprocessing makes them.
        grid: rows and columns of the visual tokens of each.
    """

    pixels: Pixels
    grid: Int[np.ndarray | Array, "i 2"]


def real_tokens(backbone: Backbone, images: Images, n: int) -> Bool[Array, "i n"]:
    """Returns which of the `n` visual tokens of each image are not padding."""
    return jnp.arange(n) < backbone.num_tokens(images.grid)[:, None]


def of_tokens(label: Array, n: int) -> Array:
    """Cuts or pads labels [i, m, ...] of patches to the `n` visual tokens of a batch."""
    missing = max(0, n - label.shape[1])
    return jnp.pad(label[:, :n], [(0, 0), (0, missing)] + [(0, 0)] * (label.ndim - 2))
