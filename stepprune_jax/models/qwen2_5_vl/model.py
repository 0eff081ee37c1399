"""Qwen2.5-VL as pure functions: a tower with a merger, and a language model.

Bai et al. (https://arxiv.org/abs/2502.13923). These functions are the family protocol of
`models.family`; they are called through `models.vlm`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from stepprune_jax.models import decoder
from stepprune_jax.models.layers import Tap
from stepprune_jax.models.qwen2_5_vl import tower
from stepprune_jax.models.qwen2_5_vl.config import QwenConfig
from stepprune_jax.models.qwen2_5_vl.images import Patches
from stepprune_jax.models.stack import Execution

# A token has a position in time, a row and a column.
POSITION_AXES = 3


def init_params(key: Array, config: QwenConfig) -> dict[str, Any]:
    """Draws float32 weights of the whole model: {"vision", "merger", "language"}."""
    vision, language = jax.random.split(key)
    return {
        **tower.init_vision(vision, config.vision),
        "language": decoder.init_language(language, config.text),
    }


def encode_image(
    params: dict[str, Any],
    config: QwenConfig,
    pixels: Patches,
    taps: Sequence[Tap] = (),
    execution: Execution = Execution(),
) -> tuple[Float[Array, "i n d"], dict[str, Array]]:
    """Returns merged tokens [i, n, d], and the taps by name; see `tower.encode`."""
    return tower.encode(params, config.vision, pixels, taps, execution)


def project(
    params: dict[str, Any], config: QwenConfig, features: Float[Array, "*b d"]
) -> Float[Array, "*b e"]:
    """Returns the features, as merged tokens already have the language model's width."""
    del params, config
    return features


def num_tokens(
    config: QwenConfig, grid: Int[Array | np.ndarray, "*b 2"]
) -> Int[Array | np.ndarray, "*b"]:
    """Returns the number of visual tokens of unpruned images with these grids."""
    del config
    return (grid[..., 0] * grid[..., 1]).astype(np.int32)


def image_positions(
    config: QwenConfig, grid: Int[Array, "*b 2"], place: Int[Array, "*b k"]
) -> tuple[Int[Array, "*b p k"], Int[Array, "*b"]]:
    """Returns the position ids of tokens relative to their image's first, and the image's extent.

    Args:
        config: the model's shape.
        grid: rows and columns of each image's tokens.
        place: index of each token in its image.

    Returns:
        Offsets [..., 3, k]: 0 in time, the row, and the column; and the longer side, by which text
        after the image is shifted.
    """
    del config
    columns = jnp.maximum(grid[..., 1:], 1)
    offset = jnp.stack([jnp.zeros_like(place), place // columns, place % columns], axis=-2)
    return offset, grid.max(-1)


def vision_flops(config: QwenConfig, grid: tuple[int, int]) -> dict[str, int]:
    """Counts the operations of encoding and merging an image.

    Args:
        config: the model's shape.
        grid: rows and columns of the image's tokens.

    Returns:
        FLOPs of the matrix products of the `tower`, with the attention of whole windows, and of the
        merger, which is the `projector`.
    """
    vision = config.vision
    d, n = vision.hidden_size, grid[0] * grid[1]
    m, wide = n * vision.unit, vision.unit * d
    seen = [vision.unit * vision.window**2] * vision.num_layers
    for block in vision.full_blocks:
        seen[block] = m
    products = m * (4 * d * d + 3 * d * vision.intermediate_size) * vision.num_layers
    attention = sum(2 * m * d * min(m, keys) for keys in seen)
    embedding = m * vision.temporal_patch_size * 3 * vision.patch_size**2 * d
    merger = n * wide * (wide + vision.out_size)
    return {"tower": 2 * (embedding + products + attention), "projector": 2 * merger}
