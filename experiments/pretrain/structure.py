"""Initializes a small tower with heads that attend to neighboring patches.

A vision transformer that is trained from scratch on little data must first learn which patches are
neighbors. Here the position embedding is a two-dimensional Fourier code, and the query and key
projections of most heads compare this code at a fixed offset. The tower therefore begins as a stack
of local filters. Training changes all weights.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from stepprune_jax.models.llava import tower as clip
from stepprune_jax.models.llava.config import ClipConfig
from stepprune_jax.models.stack import Params

_STRENGTH = 1.5  # Scale of the code. The content of patches has a variance of about 1.
_SHARPNESS = 6.0  # A local head weights its neighbor e^5 times as much as any other patch.
AROUND = [(-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 1), (1, -1), (1, 0), (1, 1)]


def fourier_code(side: int, width: int) -> Float[np.ndarray, "n width"]:
    """Returns the code of each patch of a `side` by `side` grid, half for row, half for column."""
    frequency = (2 * np.arange(width // 4) + 1) * math.pi / side
    row, column = np.divmod(np.arange(side * side), side)
    angles = np.concatenate([row[:, None] * frequency, column[:, None] * frequency], axis=1)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).reshape(side * side, width)


def shift(offset: tuple[int, int], side: int, width: int) -> Float[np.ndarray, "width width"]:
    """Returns the matrix that maps the code of a patch to the code of the patch at an offset."""
    frequency = (2 * np.arange(width // 4) + 1) * math.pi / side
    matrix = np.zeros((width, width), np.float32)
    for pair, angle in enumerate(np.concatenate([offset[0] * frequency, offset[1] * frequency])):
        c, s, channel = math.cos(angle), math.sin(angle), 2 * pair
        matrix[channel : channel + 2, channel : channel + 2] = [[c, s], [-s, c]]  # row vectors
    return matrix


def standardizing_projector(projector: Params, features: Float[Array, "i n d"]) -> Params:
    """Folds the standardization of the features into a projector's first layer.

    Channels of features have very different means and scales, which would slow down learning.

    Args:
        projector: weights of the projector.
        features: [i, n, d] features of the tower.
    """
    mean, std = jnp.mean(features, (0, 1)), jnp.std(features, (0, 1)) + 1e-6
    kernel = projector["up"]["kernel"] / std[:, None]
    bias = projector["up"]["bias"] - mean @ kernel
    return projector | {"up": {"kernel": kernel, "bias": bias}}


def init_tower(key: Array, config: ClipConfig) -> Params:
    """Returns random weights of a tower whose heads attend to neighboring patches.

    All heads of the first two blocks, and half of the heads of later blocks, attend to one of the
    eight neighbors: at distance 1 in even blocks and at distance 2 in odd blocks. The attention is
    sharpest in the first block, because the outputs of blocks blur the code.
    """
    side, heads = config.image_size // config.patch_size, config.num_heads
    width = config.hidden_size // heads
    params = clip.init_vision(key, config)
    position = np.array(params["position_embedding"])
    position[1:, -width:] = _STRENGTH * fourier_code(side, width)
    params["position_embedding"] = jnp.asarray(position)
    # The content of patches has little weight in the channels of the code.
    kernel = params["patch_embedding"]["kernel"]
    params["patch_embedding"]["kernel"] = kernel.at[:, -width:].multiply(0.1)
    attention = params["layers"]["attention"]
    query, keys = (np.array(attention[name]["kernel"]) for name in ("query", "key"))
    scale = math.sqrt(_SHARPNESS)
    for layer in range(config.num_layers):
        reach = 1 + layer % 2
        for head in range(heads if layer < 2 else heads // 2):
            channels = slice(head * width, (head + 1) * width)
            offset = tuple(reach * step for step in AROUND[head % 8])
            query[layer, :, channels] *= 0.1
            keys[layer, :, channels] *= 0.1
            query[layer, -width:, channels] += scale * shift(offset, side, width)
            keys[layer, -width:, channels] += scale * np.eye(width, dtype=np.float32)
    attention["query"]["kernel"], attention["key"]["kernel"] = map(jnp.asarray, (query, keys))
    return jax.tree.map(jnp.array, params)  # Norms share buffers, which cannot be donated.
