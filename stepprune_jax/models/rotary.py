"""Rotary positions (https://arxiv.org/abs/2104.09864) in the half-split channel order of Llama."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from stepprune_jax.models.config import LlamaConfig


def rotary_frequencies(config: LlamaConfig) -> np.ndarray:
    """Angle per position of each pair of channels, with the config's stretching applied.

    Args:
        config: the model's shape.

    Returns:
        [c / 2] float32 radians, from fast to slow.
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    # The reference raises to the power and inverts in float32; at position 600 one last bit of a
    # frequency already turns the angle by 4e-5, so the same roundings are made here.
    power = (np.float64(config.rope_theta) ** exponent.astype(np.float64)).astype(np.float32)
    frequency = np.float32(1) / power
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    slow = frequency / np.float32(scaling.factor)
    if scaling.kind == "linear":
        return slow
    waves = scaling.original_max_positions / (2 * np.pi / frequency)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    fast_share = np.clip((waves - low) / (high - low), 0.0, 1.0).astype(np.float32)
    return (1 - fast_share) * slow + fast_share * frequency


def rotary(
    config: LlamaConfig, position: Int[Array, "b s"]
) -> tuple[Float[Array, "b s c"], Float[Array, "b s c"]]:
    """Cosine and sine of the rotary angles, float32 [b, s, c], for integer positions [b, s]."""
    angle = position[..., None].astype(jnp.float32) * rotary_frequencies(config)
    angle = jnp.concatenate([angle, angle], axis=-1)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "b h s c"], cosine: Float[Array, "b s c"], sine: Float[Array, "b s c"]
) -> Float[Array, "b h s c"]:
    """Turns channel pairs (i, i + c/2) of queries or keys by their position's angles.

    Args:
        x: [b, h, s, c].
        cosine: [b, s, c] float32.
        sine: [b, s, c] float32.

    Returns:
        [b, h, s, c] in the dtype of x; computed in float32.
    """
    wide = x.astype(jnp.float32)
    first, second = jnp.split(wide, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return (wide * cosine[:, None] + turned * sine[:, None]).astype(x.dtype)
