"""The images of a batch, which may have different numbers of visual tokens."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.images import Pixels


class Images(NamedTuple):
    """Images, padded to the largest image of the batch.

    Attributes:
        pixels: result of the model family's preprocessing.
        grid: [i, 2] rows and columns of visual tokens.
    """

    pixels: Pixels
    grid: Int[np.ndarray | Array, "i 2"]


def token_mask(backbone: Backbone, images: Images, n: int) -> Bool[Array, "i n"]:
    """Returns a mask [i, n] that is false for padding."""
    return jnp.arange(n) < backbone.num_tokens(images.grid)[:, None]


def fit_labels(label: Array, n: int) -> Array:
    """Truncates or pads patch labels [i, m, ...] to [i, n, ...]."""
    missing = max(0, n - label.shape[1])
    return jnp.pad(label[:, :n], [(0, 0), (0, missing)] + [(0, 0)] * (label.ndim - 2))
