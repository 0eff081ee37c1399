"""Rotary positions (https://arxiv.org/abs/2104.09864) in Llama's half-split channel order.

Channel i forms a pair with channel i + c / 2.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from stepprune_jax.models.config import LlamaConfig


def geometric_frequencies(base: float, channels: int) -> np.ndarray:
    """Returns the rotary frequencies base^(-2 i / c) of channel pairs i, from fast to slow.

    Args:
        base: base of the frequencies, such as 10000.
        channels: number c of channels.

    Returns:
        [c / 2] float32 radians per position.
    """
    exponent = np.arange(0, channels, 2, dtype=np.float32) / np.float32(channels)
    # `transformers` computes the power and its inverse in float32. The last bit of a frequency
    # changes the angle at position 600 by 4e-5, so this function rounds in the same places.
    power = (np.float64(base) ** exponent.astype(np.float64)).astype(np.float32)
    return np.float32(1) / power


def rotary_frequencies(config: LlamaConfig) -> np.ndarray:
    """Returns the frequencies of a language model, in radians per position, with its scaling."""
    frequency = geometric_frequencies(config.rope_theta, config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    scaled = frequency / np.float32(scaling.factor)
    if scaling.kind == "linear":
        return scaled
    num_waves = scaling.original_max_positions / (2 * np.pi / frequency)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    unscaled_weight = np.clip((num_waves - low) / (high - low), 0.0, 1.0).astype(np.float32)
    return (1 - unscaled_weight) * scaled + unscaled_weight * frequency


def rotary_cos_sin(
    config: LlamaConfig, position: Int[Array, "b *p s"]
) -> tuple[Float[Array, "b s c"], Float[Array, "b s c"]]:
    """Computes cosine and sine of the rotary angles of a language model's tokens.

    If a token has p position ids, `config.rope_sections` assigns a section of the channel pairs to
    each id. The pairs of a section are consecutive, or the sections take pairs in turn (see
    `pair_axes`).

    Args:
        config: shape of the language model.
        position: [b, s] position ids, or [b, p, s] with p ids per token.

    Returns:
        Cosine and sine, each [b, s, c] float32. The second half of the channels repeats the first.
    """
    if position.ndim == 2:
        position = position[:, None]
    if config.rope_interleaved:
        pair_position = position[:, pair_axes(config.rope_sections)].swapaxes(1, 2)
        angle = pair_position.astype(jnp.float32) * rotary_frequencies(config)
        angle = jnp.concatenate([angle, angle], axis=-1)
        return jnp.cos(angle), jnp.sin(angle)
    # Without sections, the split returns all frequencies as one part.
    boundaries = np.cumsum(config.rope_sections)[:-1]
    return axial_cos_sin(np.split(rotary_frequencies(config), boundaries), position)


def pair_axes(sections: Sequence[int]) -> np.ndarray:
    """Returns the axis whose position id rotates each channel pair, for interleaved sections.

    With the axes (time, row, column), rows take the pairs 1, 4, 7, ... and columns take the pairs
    2, 5, 8, ..., until their sections are full. Time takes all remaining pairs.

    Args:
        sections: number of channel pairs of each axis.

    Returns:
        [c / 2] int32 axis of each pair.
    """
    axes = np.zeros(sum(sections), np.int32)
    for axis, count in enumerate(sections[1:], 1):
        axes[axis : axis + len(sections) * count : len(sections)] = axis
    return axes


def axial_cos_sin(
    frequencies: Sequence[np.ndarray], position: Int[Array, "b p s"]
) -> tuple[Float[Array, "b s c"], Float[Array, "b s c"]]:
    """Computes cosine and sine of rotary angles if each position axis has its own channel pairs.

    Args:
        frequencies: radians per position of the pairs of each axis; c / 2 pairs in total.
        position: [b, p, s] position ids on p axes.

    Returns:
        Cosine and sine, each [b, s, c] float32. The second half of the channels repeats the first.
    """
    position_float = position[..., None].astype(jnp.float32)
    angles = [position_float[:, axis] * part for axis, part in enumerate(frequencies)]
    angle = jnp.concatenate([*angles, *angles], axis=-1)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "b h s c"], cosine: Float[Array, "b s c"], sine: Float[Array, "b s c"]
) -> Float[Array, "b h s c"]:
    """Rotates queries or keys by the angles of their positions, in float32.

    Args:
        x: [b, h, s, c] queries or keys.
        cosine: [b, s, c] cosine of the angles.
        sine: [b, s, c] sine of the angles.

    Returns:
        [b, h, s, c] rotated queries or keys, in the dtype of x.
    """
    x_float32 = x.astype(jnp.float32)
    first, second = jnp.split(x_float32, 2, axis=-1)
    quarter_turn = jnp.concatenate([-second, first], axis=-1)
    return (x_float32 * cosine[:, None] + quarter_turn * sine[:, None]).astype(x.dtype)
