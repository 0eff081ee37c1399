"""LLaVA-v1.5 as pure functions: a CLIP tower, a two-layer projector, a Llama.

Liu et al. (https://arxiv.org/abs/2310.03744). These functions are the family protocol of
`models.family`; they are called through `models.vlm`.
"""

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int

from stepprune_jax.models import decoder
from stepprune_jax.models.layers import Dense, Tap, activate
from stepprune_jax.models.llava import tower
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.models.stack import Execution

# A token has one position id.
POSITION_AXES = 1


class Projector(nn.Module):
    """Two projections with an activation between them, from the tower's width to the model's."""

    config: LlavaConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b e"]:
        """Projects visual features."""
        width = self.config.text.hidden_size
        x = activate(self.config.projector_activation, Dense(width, name="up")(x))
        return Dense(width, name="down")(x)


def init_params(key: Array, config: LlavaConfig) -> dict[str, Any]:
    """Draws float32 weights of the whole model: {"vision", "projector", "language"}."""
    vision, projector, language = jax.random.split(key, 3)
    sample = jnp.zeros((1, config.vision.hidden_size))
    return {
        "vision": tower.init_vision(vision, config.vision),
        "projector": Projector(config).init(projector, sample)["params"],
        "language": decoder.init_language(language, config.text),
    }


def encode_image(
    params: dict[str, Any],
    config: LlavaConfig,
    pixels: Float[Array, "i 3 H W"],
    taps: Sequence[Tap] = (),
    execution: Execution = Execution(),
) -> tuple[Float[Array, "i n d"], dict[str, Array]]:
    """Returns hidden state `feature_layer` of the tower [i, n, d], and the taps by name.

    Taps keep the tower's own tokens, the class token first; see `tower.encode`.
    """
    features, tapped = tower.encode(
        params["vision"], config.vision, pixels, config.feature_layer, taps, execution
    )
    return features[:, int(config.feature_select == "default") :], tapped


def project(
    params: dict[str, Any], config: LlavaConfig, features: Float[Array, "*b d"]
) -> Float[Array, "*b e"]:
    """Maps visual features to the language model's width."""
    return cast(Array, Projector(config).apply({"params": params["projector"]}, features))


def num_tokens(
    config: LlavaConfig, grid: Int[Array | np.ndarray, "*b 2"]
) -> Int[Array | np.ndarray, "*b"]:
    """Returns the number of visual tokens of unpruned images with these grids."""
    patches = grid[..., 0] * grid[..., 1]
    return (patches + int(config.feature_select == "full")).astype(np.int32)


def image_positions(
    config: LlavaConfig, grid: Int[Array, "*b 2"], place: Int[Array, "*b k"]
) -> tuple[Int[Array, "*b p k"], Int[Array, "*b"]]:
    """Returns the position ids of tokens relative to their image's first, and the image's extent.

    Args:
        config: the model's shape.
        grid: rows and columns of each image's patches.
        place: index of each token in its image.

    Returns:
        Offsets [..., 1, k], which equal `place`, and the number of positions that an unpruned image
        occupies.
    """
    return place[..., None, :], jnp.asarray(num_tokens(config, grid))


def vision_flops(config: LlavaConfig, grid: tuple[int, int]) -> dict[str, int]:
    """Counts the operations of encoding and projecting an image.

    Args:
        config: the model's shape; blocks after `feature_layer` are neither run nor counted.
        grid: rows and columns of the image's patches.

    Returns:
        FLOPs of the matrix products of the `tower` and the `projector`.
    """
    vision, width = config.vision, config.text.hidden_size
    d, n = vision.hidden_size, grid[0] * grid[1]
    t = n + 1
    layers = config.feature_layer % (vision.num_layers + 1)
    block = t * (4 * d * d + 2 * d * t + 2 * d * vision.intermediate_size)
    tower = n * 3 * vision.patch_size**2 * d + layers * block
    projected = n + int(config.feature_select == "full")
    return {"tower": 2 * tower, "projector": 2 * projected * width * (d + width)}
