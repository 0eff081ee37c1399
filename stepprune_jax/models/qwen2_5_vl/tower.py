"""Qwen2.5-VL's vision transformer, as pure functions over a tree of stacked weights.

Bai et al., "Qwen2.5-VL Technical Report" (https://arxiv.org/abs/2502.13923). Pre-norm blocks with
rotary positions by row and by column; most attend within windows of the image, a few to all of it.
A merger turns each square of patches into a token.

Patches are ordered by window, so that a window is a run of at most as many patches as a full one
has. Rows of patches are cut into blocks of that length: a patch's window lies in its own block and
the two neighbouring ones, wherever windows begin. No window is padded.
"""

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.attention import (
    Segment,
    Tap,
    attend,
    received_attention,
    resolve_taps,
    self_attend,
)
from stepprune_jax.models.layers import (
    BlockOutput,
    Dense,
    GatedMlp,
    RmsNorm,
    activate,
    wide_product,
)
from stepprune_jax.models.qwen2_5_vl.config import PatchTowerConfig, QwenVisionConfig
from stepprune_jax.models.qwen2_5_vl.images import Patches
from stepprune_jax.models.rotary import axial_rotary, inverse_powers, rotate
from stepprune_jax.models.stack import (
    Execution,
    Params,
    checkpoint_layer,
    run_stack,
    take_layer,
)
from stepprune_jax.policy.layers import merge_heads, split_heads
from stepprune_jax.user_input import UserError

TAP_KINDS = ("received", "keys", "hidden")
_EPS = 1e-6
_ROPE_BASE = 10000.0


class Layout(NamedTuple):
    """Order of merged patches by window: [i, n] of slots, padding last.

    `raster` is the raster index of each slot's merged patch, `slot` its inverse, `window` a number,
    -1 in the padding, `place` row and column, `size` [i] the merged patches of each image.
    """

    raster: Int[Array, "i n"]
    slot: Int[Array, "i n"]
    window: Int[Array, "i n"]
    place: Int[Array, "i 2 n"]
    size: Int[Array, "i"]


class TowerInputs(NamedTuple):
    """Inputs shared by all blocks: rotary angles, the window of each patch (-1 in the padding)."""

    cosine: Float[Array, "i m c"]
    sine: Float[Array, "i m c"]
    window: Int[Array, "i m"]
    length: Int[Array, "i"]

    @property
    def valid(self) -> Bool[Array, "i 1 m"]:
        """Mask of real patches, for keys."""
        return (self.window >= 0)[:, None]


def lay_out_windows(grid: Int[Array, "i 2"], side: int, slots: int) -> Layout:
    """Orders the merged patches of grids [i, 2] in n slots by windows of `side` x `side`.

    Windows begin at the image's first row and column; those at its other edges may be smaller.
    """
    number = jnp.arange(slots, dtype=jnp.int32)
    columns = jnp.maximum(grid[:, 1:], 1)  # an absent image has none
    size = grid.prod(1).astype(jnp.int32)
    real = number < size[:, None]
    row, column = number // columns, number % columns
    window = row // side * -(-columns // side) + column // side
    window = jnp.where(real, window, slots)  # sorts the padding last
    raster = jnp.argsort(window, axis=1, stable=True)
    slot = jnp.argsort(raster, axis=1)
    row, column, window = (
        jnp.take_along_axis(of_patch, raster, axis=1) for of_patch in (row, column, window)
    )
    place = jnp.where(real[:, None], jnp.stack([row, column], axis=1), 0)
    return Layout(raster, slot, jnp.where(real, window, -1), place, size)


def rotary_frequencies(config: PatchTowerConfig) -> np.ndarray:
    """Returns the angles [c / 4] of one step to the next row; columns have the same."""
    return inverse_powers(_ROPE_BASE, config.hidden_size // config.num_heads // 2)


def _context(config: QwenVisionConfig, layout: Layout) -> TowerInputs:
    """Computes angles and windows of patches in window order."""
    k, unit = config.merge_size, config.unit
    within = jnp.stack(jnp.divmod(jnp.arange(unit), k))  # row and column in the merged patch
    position = layout.place[..., None] * k + within[:, None]
    position = position.reshape(*position.shape[:2], -1)
    pairs = rotary_frequencies(config)
    angles = axial_rotary((pairs, pairs), position)
    return TowerInputs(*angles, jnp.repeat(layout.window, unit, axis=1), layout.size * unit)


def _attend_in_windows(
    query: Float[Array, "i h m c"],
    key: Float[Array, "i h m c"],
    value: Float[Array, "i h m c"],
    window: Int[Array, "i m"],
    length: int,
) -> Float[Array, "i h m c"]:
    """Attends from each patch to its window, of at most `length` patches."""
    i, h, m, c = query.shape
    missing = -m % length
    blocks = (m + missing) // length

    def cut(x, axis, fill):
        """Cuts patches into blocks [i, blocks, ...], and lists each block's neighbours."""
        widths = [(0, 0)] * x.ndim
        widths[axis] = (length, missing + length)
        x = jnp.pad(x, widths, constant_values=fill)
        parts = x.reshape(*x.shape[:axis], blocks + 2, length, *x.shape[axis + 1 :])
        parts = jnp.moveaxis(parts, axis, 1)
        beside = (parts[:, start : start + blocks] for start in range(3))
        return [part.reshape(i * blocks, *part.shape[2:]) for part in beside]

    own = cut(query, 2, 0)[1]
    windows = cut(window, 1, -1)
    segments = [
        Segment(keys, values, (windows[1][:, :, None] == other[:, None]) & (other >= 0)[:, None])
        for keys, values, other in zip(cut(key, 2, 0), cut(value, 2, 0), windows, strict=True)
    ]
    mixed = attend(own, segments).reshape(i, blocks, h, length, c)
    return jnp.moveaxis(mixed, 1, 2).reshape(i, h, blocks * length, c)[:, :, :m]


class QwenVisionAttention(nn.Module):
    """Self-attention with biases and rotary positions, within windows or to the whole image."""

    config: QwenVisionConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "i m d"],
        context: TowerInputs,
        full: Bool[Array, ""] | bool,
        attention: str = "matmul",
    ) -> BlockOutput:
        """Returns the projected result as `hidden`, with queries, keys and values."""
        config = self.config
        parts = jnp.split(Dense(3 * config.hidden_size, name="qkv")(x), 3, axis=2)
        query, key, value = (split_heads(part, config.num_heads) for part in parts)
        query = rotate(query, context.cosine, context.sine)
        key = rotate(key, context.cosine, context.sine)
        length = config.unit * config.window**2

        def to_all():
            return self_attend(query, key, value, False, attention, context.length)

        def in_windows():
            return _attend_in_windows(query, key, value, context.window, length)

        if isinstance(full, bool):
            mixed = to_all() if full else in_windows()
        else:
            mixed = jax.lax.cond(full, to_all, in_windows)
        mixed = Dense(config.hidden_size, name="out")(merge_heads(mixed))
        return BlockOutput(mixed, query, key, value)


class QwenVisionBlock(nn.Module):
    """One pre-norm block."""

    config: QwenVisionConfig

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "i m d"],
        context: TowerInputs,
        full: Bool[Array, ""] | bool,
        attention: str = "matmul",
    ) -> BlockOutput:
        """Runs the block; `full` selects attention to the whole image."""
        mixed = QwenVisionAttention(self.config, name="attention")(
            RmsNorm(_EPS, name="norm1")(hidden), context, full, attention
        )
        hidden = hidden + mixed.hidden
        mlp = GatedMlp(self.config.intermediate_size, True, name="mlp")
        return mixed._replace(hidden=hidden + mlp(RmsNorm(_EPS, name="norm2")(hidden)))


class Merger(nn.Module):
    """Merges each square of patches into a token of the language model's width."""

    config: QwenVisionConfig

    @nn.compact
    def __call__(self, hidden: Float[Array, "i m d"]) -> Float[Array, "i n e"]:
        """Merges patches that are grouped by square."""
        i, m, d = hidden.shape
        unit = self.config.unit
        x = RmsNorm(_EPS, name="norm")(hidden).reshape(i, m // unit, unit * d)
        x = activate("gelu", Dense(unit * d, name="up")(x))
        return Dense(self.config.out_size, name="down")(x)


def init_vision(key: Array, config: QwenVisionConfig) -> Params:
    """Draws float32 weights of the tower and its merger."""
    patch_key, layers_key, merger_key = jax.random.split(key, 3)
    d, unit = config.hidden_size, config.unit
    values = config.temporal_patch_size * config.patch_size**2 * 3
    angles = jnp.ones((1, unit, d // config.num_heads))
    context = TowerInputs(angles, angles, jnp.zeros((1, unit), jnp.int32), jnp.full(1, unit))
    block, sample = QwenVisionBlock(config), jnp.zeros((1, unit, d))
    return {
        "vision": {
            "patch_embedding": {"kernel": jax.random.normal(patch_key, (values, d)) * values**-0.5},
            "layers": jax.vmap(lambda k: block.init(k, sample, context, True)["params"])(
                jax.random.split(layers_key, config.num_layers)
            ),
        },
        "merger": Merger(config).init(merger_key, sample)["params"],
    }


def embed_patches(
    params: Params, config: PatchTowerConfig, values: Float[Array, "i m v"]
) -> Float[Array, "i m d"]:
    """Projects patches, whose frames all equal the image; adds a bias if there is one."""
    kernel, bias = params["patch_embedding"]["kernel"], params["patch_embedding"].get("bias")
    p, frames = config.patch_size, config.temporal_patch_size
    # The kernel runs over (frame, row, column, channel), the values over (channel, row, column).
    kernel = kernel.reshape(frames, p, p, 3, -1).transpose(0, 3, 1, 2, 4)
    values = values.astype(kernel.dtype)
    parts = [wide_product(values, frame.reshape(3 * p * p, -1)) for frame in kernel]
    parts += [] if bias is None else [bias]
    return functools.reduce(operator.add, parts).astype(kernel.dtype)


def _taken(x: Float[Array, "i n w"], index: Int[Array, "i n"]) -> Float[Array, "i n w"]:
    """Reorders the rows of each image."""
    return jnp.take_along_axis(x, index[..., None], axis=1)


def encode(
    params: Params,
    config: QwenVisionConfig,
    pixels: Patches,
    taps: Sequence[Tap] = (),
    execution: Execution = Execution(),
) -> tuple[Float[Array, "i n e"], dict[str, Array]]:
    """Runs the tower and the merger; returns tokens in raster order, and the taps by name.

    Taps by merged patch, in raster order: "received" [i, n] float32, the attention received in a
    block that attends to the whole image, averaged over heads, the image's patches and those of the
    merged one; "keys" [i, n, c] float32, the mean over heads and the patches of the merged one,
    after rotary positions; "hidden" [i, n, d], the mean over these patches.
    """
    vision, unit = params["vision"], config.unit
    named = resolve_taps(taps, config.num_layers, TAP_KINDS)
    for name, (kind, at) in named.items():
        if kind == "received" and at not in config.full_blocks:
            raise UserError(f"tap {name} belongs to a block that attends within windows")
    i, m, values = pixels.values.shape
    layout = lay_out_windows(jnp.asarray(pixels.grid), config.window, m // unit)
    context = _context(config, layout)
    block = QwenVisionBlock(config)
    is_full = jnp.isin(jnp.arange(config.num_layers), jnp.array(config.full_blocks, jnp.int32))

    def body(hidden, index):
        weights = {"params": take_layer(vision["layers"], index)}
        full = index in config.full_blocks if isinstance(index, int) else is_full[index]
        output = cast(BlockOutput, block.apply(weights, hidden, context, full, execution.attention))
        return output.hidden, output

    merged = jnp.reshape(cast(Array, pixels.values), (i, m // unit, unit * values))
    hidden = embed_patches(vision, config, _taken(merged, layout.raster).reshape(i, m, values))
    watched = [at for kind, at in named.values() if kind != "hidden"]
    hidden, outputs, states = run_stack(
        vision["layers"],
        checkpoint_layer(body, remat=False),
        hidden,
        (0, config.num_layers),
        watched,
        [at for kind, at in named.values() if kind == "hidden"],
    )
    tokens = cast(Array, Merger(config).apply({"params": params["merger"]}, hidden))
    tapped = {}
    for name, (kind, at) in named.items():
        if kind == "received":
            query, key = outputs[at].query, outputs[at].key
            found = received_attention(query, key, context.window >= 0)[..., None]
        elif kind == "hidden":
            found = states[at]
        else:
            found = outputs[at].key.astype(jnp.float32).mean(1)
        found = _taken(found.reshape(i, m // unit, unit, -1).mean(2), layout.slot)
        tapped[name] = found[..., 0] if kind == "received" else found
    return _taken(tokens, layout.slot), tapped
