"""Rotary positions (https://arxiv.org/abs/2104.09864) in the half-split channel order of Llama."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from stepprune_jax.models.config import LlamaConfig


def inverse_powers(base: float, channels: int) -> np.ndarray:
    """Returns radians per position [c / 2] of channel pairs, base^(-2 i / c), from fast to slow."""
    exponent = np.arange(0, channels, 2, dtype=np.float32) / np.float32(channels)
    # The reference raises to the power and inverts in float32; at position 600 the last bit of a
    # frequency already changes the angle by 4e-5, so the same rounding is applied here.
    power = (np.float64(base) ** exponent.astype(np.float64)).astype(np.float32)
    return np.float32(1) / power


def rotary_frequencies(config: LlamaConfig) -> np.ndarray:
    """Returns radians per position [c / 2] of each channel pair, with the config's scaling."""
    frequency = inverse_powers(config.rope_theta, config.head_dim)
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
    config: LlamaConfig, position: Int[Array, "b *p s"]
) -> tuple[Float[Array, "b s c"], Float[Array, "b s c"]]:
    """Computes float32 cosine and sine of the rotary angles of position ids.

    Where a token has p ids, each rotates the next of `rope_sections` channel pairs, or they take
    turns: `pair_axes`.
    """
    if position.ndim == 2:
        position = position[:, None]
    if config.rope_interleaved:
        own = position[:, pair_axes(config.rope_sections)].swapaxes(1, 2).astype(jnp.float32)
        angle = own * rotary_frequencies(config)
        angle = jnp.concatenate([angle, angle], axis=-1)
        return jnp.cos(angle), jnp.sin(angle)
    sections = np.cumsum(config.rope_sections)[:-1]  # if empty, one part holds all
    return axial_rotary(np.split(rotary_frequencies(config), sections), position)


def pair_axes(sections: Sequence[int]) -> np.ndarray:
    """Returns the axis of the position id that rotates each pair, where sections take turns.

    Of (time, row, column), row and column have every third pair from the second and the third on,
    as many as their sections say; time has the others.
    """
    axes = np.zeros(sum(sections), np.int32)
    for axis, count in enumerate(sections[1:], 1):
        axes[axis : axis + len(sections) * count : len(sections)] = axis
    return axes


def axial_rotary(
    frequencies: Sequence[np.ndarray], position: Int[Array, "b p s"]
) -> tuple[Float[Array, "b s c"], Float[Array, "b s c"]]:
    """Computes float32 cosine and sine where each of p position ids turns pairs of its own."""
    wide = position[..., None].astype(jnp.float32)
    parts = [wide[:, axis] * part for axis, part in enumerate(frequencies)]
    angle = jnp.concatenate([*parts, *parts], axis=-1)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "b h s c"], cosine: Float[Array, "b s c"], sine: Float[Array, "b s c"]
) -> Float[Array, "b h s c"]:
    """Rotates channel pairs (i, i + c/2) by their position's angles, in float32."""
    wide = x.astype(jnp.float32)
    first, second = jnp.split(wide, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    return (wide * cosine[:, None] + turned * sine[:, None]).astype(x.dtype)
