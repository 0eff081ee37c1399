"""The vision transformer of Qwen2.5-VL, as pure functions of stacked weights.

Bai et al., "Qwen2.5-VL Technical Report" (https://arxiv.org/abs/2502.13923). Pre-norm blocks with
rotary positions by row and by column. Most blocks attend within windows of the image; a few blocks
have global attention. A merger turns each square of patches into a token.

Patches are ordered by window, so the patches of a window are consecutive; their number is at most
the number of a complete window. The sequence of patches is cut into chunks of that length. The
window of a patch then lies in the chunk of the patch and the two neighboring chunks, wherever
windows begin. Windows need no padding.
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
    matmul_float32,
)
from stepprune_jax.models.qwen2_5_vl.config import PatchTowerConfig, QwenVisionConfig
from stepprune_jax.models.qwen2_5_vl.images import Patches
from stepprune_jax.models.rotary import axial_cos_sin, geometric_frequencies, rotate
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


class WindowLayout(NamedTuple):
    """Order of merged patches by window. n slots contain the patches, then padding.

    Attributes:
        raster: [i, n] raster index of the merged patch in each slot.
        slot: [i, n] slot of each merged patch; the inverse of `raster`.
        window: [i, n] number of each slot's window; -1 for padding.
        place: [i, 2, n] row and column of the merged patch in each slot; 0 for padding.
        size: [i] number of merged patches of each image.
    """

    raster: Int[Array, "i n"]
    slot: Int[Array, "i n"]
    window: Int[Array, "i n"]
    place: Int[Array, "i 2 n"]
    size: Int[Array, "i"]


class TowerInputs(NamedTuple):
    """Inputs that all blocks share, in window order.

    Attributes:
        cosine: [i, m, c] float32 cosine of the rotary angles of patches.
        sine: [i, m, c] float32 sine of the rotary angles.
        window: [i, m] number of each patch's window; -1 for padding.
        length: [i] number of patches of each image.
    """

    cosine: Float[Array, "i m c"]
    sine: Float[Array, "i m c"]
    window: Int[Array, "i m"]
    length: Int[Array, "i"]


def lay_out_windows(grid: Int[Array, "i 2"], side: int, num_slots: int) -> WindowLayout:
    """Orders the merged patches of images by window.

    Windows begin at the first row and column of the image. Windows at the opposite edges may be
    smaller.

    Args:
        grid: [i, 2] rows and columns of merged patches of each of i images.
        side: number of merged patches on each side of a complete window.
        num_slots: number n of slots, at least the number of merged patches of the largest image.

    Returns:
        The layout of each image.
    """
    raster_index = jnp.arange(num_slots, dtype=jnp.int32)
    columns = jnp.maximum(grid[:, 1:], 1)  # avoids a division by 0 for an absent image
    size = grid.prod(1).astype(jnp.int32)
    is_patch = raster_index < size[:, None]
    row, column = raster_index // columns, raster_index % columns
    windows_per_row = -(-columns // side)  # rounded up
    window = row // side * windows_per_row + column // side
    window = jnp.where(is_patch, window, num_slots)  # sorts padding last
    raster = jnp.argsort(window, axis=1, stable=True)
    slot = jnp.argsort(raster, axis=1)
    row, column, window = (
        jnp.take_along_axis(values, raster, axis=1) for values in (row, column, window)
    )
    place = jnp.where(is_patch[:, None], jnp.stack([row, column], axis=1), 0)
    return WindowLayout(raster, slot, jnp.where(is_patch, window, -1), place, size)


def rotary_frequencies(config: PatchTowerConfig) -> np.ndarray:
    """Returns [c / 4] radians per row; columns have the same frequencies."""
    return geometric_frequencies(_ROPE_BASE, config.hidden_size // config.num_heads // 2)


def _make_context(config: QwenVisionConfig, layout: WindowLayout) -> TowerInputs:
    """Computes the rotary angles and the windows of patches, in window order.

    A merged patch is a square of `unit` patches. Its patches have consecutive slots.
    """
    side, unit = config.merge_size, config.unit
    # Row and column of a patch: (row and column of the merged patch) * side + offset.
    offset_in_square = jnp.stack(jnp.divmod(jnp.arange(unit), side))
    position = layout.place[..., None] * side + offset_in_square[:, None]
    position = position.reshape(*position.shape[:2], -1)  # [i, 2, m]
    frequencies = rotary_frequencies(config)
    cosine, sine = axial_cos_sin((frequencies, frequencies), position)
    window = jnp.repeat(layout.window, unit, axis=1)
    return TowerInputs(cosine, sine, window, layout.size * unit)


def _attend_in_windows(
    query: Float[Array, "i h m c"],
    key: Float[Array, "i h m c"],
    value: Float[Array, "i h m c"],
    window: Int[Array, "i m"],
    max_length: int,
) -> Float[Array, "i h m c"]:
    """Computes attention from each patch to the patches of its window.

    The m patches are cut into chunks of `max_length` patches. A window may begin anywhere, so a
    chunk attends to the previous chunk, to itself and to the next chunk, with a mask for windows.

    Args:
        query: [i, h, m, c] queries in window order.
        key: [i, h, m, c] keys in window order.
        value: [i, h, m, c] values in window order.
        window: [i, m] number of each patch's window; -1 for padding.
        max_length: number of patches of a complete window, which is the length of a chunk.

    Returns:
        [i, h, m, c] attention outputs; undefined for padding.
    """
    i, h, m, c = query.shape
    padding = -m % max_length  # completes the last chunk
    num_chunks = (m + padding) // max_length

    def to_neighbouring_chunks(x, axis, fill):
        """Returns the previous, the same and the next chunk for each chunk of patches.

        Args:
            x: array with m patches along an axis.
            axis: axis of the patches.
            fill: value of padding.

        Returns:
            Three arrays [i * num_chunks, ...] with `max_length` patches along the axis.
        """
        pad_widths = [(0, 0)] * x.ndim
        # The first and the last chunk get an empty neighbor.
        pad_widths[axis] = (max_length, padding + max_length)
        x = jnp.pad(x, pad_widths, constant_values=fill)
        chunks = x.reshape(*x.shape[:axis], num_chunks + 2, max_length, *x.shape[axis + 1 :])
        chunks = jnp.moveaxis(chunks, axis, 1)
        shifted = (chunks[:, start : start + num_chunks] for start in range(3))
        return [chunk.reshape(i * num_chunks, *chunk.shape[2:]) for chunk in shifted]

    _, query_chunk, _ = to_neighbouring_chunks(query, 2, 0)
    key_windows = to_neighbouring_chunks(window, 1, -1)
    query_window = key_windows[1][:, :, None]
    segments = []
    for key_chunk, value_chunk, key_window in zip(
        to_neighbouring_chunks(key, 2, 0),
        to_neighbouring_chunks(value, 2, 0),
        key_windows,
        strict=True,
    ):
        is_patch = key_window >= 0
        mask = (query_window == key_window[:, None]) & is_patch[:, None]
        segments.append(Segment(key_chunk, value_chunk, mask))
    attended = attend(query_chunk, segments).reshape(i, num_chunks, h, max_length, c)
    return jnp.moveaxis(attended, 1, 2).reshape(i, h, num_chunks * max_length, c)[:, :, :m]


class QwenVisionAttention(nn.Module):
    """Self-attention with biases and rotary positions, within windows or global."""

    config: QwenVisionConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "i m d"],
        context: TowerInputs,
        is_global: Bool[Array, ""] | bool,
        attention: str = "matmul",
    ) -> BlockOutput:
        """Computes the attention of one block.

        Args:
            x: [i, m, d] normalized residual stream in window order.
            context: rotary angles and windows.
            is_global: whether patches attend to the entire image; a Python bool if blocks are
                unrolled.
            attention: see `Execution.attention`, for global attention.

        Returns:
            A `BlockOutput` whose `hidden` is the projected attention output.
        """
        config = self.config
        qkv = jnp.split(Dense(3 * config.hidden_size, name="qkv")(x), 3, axis=2)
        query, key, value = (split_heads(part, config.num_heads) for part in qkv)
        query = rotate(query, context.cosine, context.sine)
        key = rotate(key, context.cosine, context.sine)
        window_length = config.unit * config.window**2

        def attend_globally():
            return self_attend(
                query, key, value, causal=False, implementation=attention, length=context.length
            )

        def attend_in_windows():
            return _attend_in_windows(query, key, value, context.window, window_length)

        if isinstance(is_global, bool):
            attended = attend_globally() if is_global else attend_in_windows()
        else:
            attended = jax.lax.cond(is_global, attend_globally, attend_in_windows)
        hidden = Dense(config.hidden_size, name="out")(merge_heads(attended))
        return BlockOutput(hidden, query, key, value)


class QwenVisionBlock(nn.Module):
    """Pre-norm transformer block: attention, then a gated MLP, each with a residual connection."""

    config: QwenVisionConfig

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "i m d"],
        context: TowerInputs,
        is_global: Bool[Array, ""] | bool,
        attention: str = "matmul",
    ) -> BlockOutput:
        """Runs the block with global attention, or with attention within windows."""
        output = QwenVisionAttention(self.config, name="attention")(
            RmsNorm(_EPS, name="norm1")(hidden), context, is_global, attention
        )
        hidden = hidden + output.hidden
        mlp = GatedMlp(self.config.intermediate_size, True, name="mlp")
        return output._replace(hidden=hidden + mlp(RmsNorm(_EPS, name="norm2")(hidden)))


class Merger(nn.Module):
    """Merges each square of patches into a token of the language model's width."""

    config: QwenVisionConfig

    @nn.compact
    def __call__(self, hidden: Float[Array, "i m d"]) -> Float[Array, "i n e"]:
        """Merges patches; the patches of a square must be consecutive."""
        i, m, d = hidden.shape
        unit = self.config.unit
        x = RmsNorm(_EPS, name="norm")(hidden).reshape(i, m // unit, unit * d)
        x = activate("gelu", Dense(unit * d, name="up")(x))
        return Dense(self.config.out_size, name="down")(x)


def init_vision(key: Array, config: QwenVisionConfig) -> Params:
    """Initialises random float32 weights of the tower and its merger."""
    patch_key, layers_key, merger_key = jax.random.split(key, 3)
    d, unit = config.hidden_size, config.unit
    patch_values = config.temporal_patch_size * config.patch_size**2 * 3
    angles = jnp.ones((1, unit, d // config.num_heads))
    context = TowerInputs(angles, angles, jnp.zeros((1, unit), jnp.int32), jnp.full(1, unit))
    block, sample = QwenVisionBlock(config), jnp.zeros((1, unit, d))
    return {
        "vision": {
            "patch_embedding": {
                "kernel": jax.random.normal(patch_key, (patch_values, d)) * patch_values**-0.5
            },
            "layers": jax.vmap(lambda key: block.init(key, sample, context, True)["params"])(
                jax.random.split(layers_key, config.num_layers)
            ),
        },
        "merger": Merger(config).init(merger_key, sample)["params"],
    }


def embed_patches(
    params: Params, config: PatchTowerConfig, values: Float[Array, "i m v"]
) -> Float[Array, "i m d"]:
    """Embeds patches of videos, or of still images as every frame.

    Args:
        params: weights of the tower; its patch embedding may have a bias.
        config: shape of the tower.
        values: [i, m, v] normalized values of each patch, either of one frame, which is used as
            every frame, or of all frames.

    Returns:
        [i, m, d] embeddings.
    """
    kernel, bias = params["patch_embedding"]["kernel"], params["patch_embedding"].get("bias")
    p, frames = config.patch_size, config.temporal_patch_size
    # The kernel runs over (frame, row, column, channel), the values over (channel, row, column).
    kernel = kernel.reshape(frames, p, p, 3, -1).transpose(0, 3, 1, 2, 4)
    values = values.astype(kernel.dtype)
    is_still = values.shape[-1] == 3 * p * p
    frame_values = [values] * frames if is_still else jnp.split(values, frames, axis=-1)
    terms = [
        matmul_float32(of_frame, frame_kernel.reshape(3 * p * p, -1))
        for of_frame, frame_kernel in zip(frame_values, kernel, strict=True)
    ]
    terms += [] if bias is None else [bias]
    return functools.reduce(operator.add, terms).astype(kernel.dtype)


def _gather_rows(x: Float[Array, "i n w"], index: Int[Array, "i n"]) -> Float[Array, "i n w"]:
    """Reorders the rows of each image by index."""
    return jnp.take_along_axis(x, index[..., None], axis=1)


def encode(
    params: Params,
    config: QwenVisionConfig,
    pixels: Patches,
    taps: Sequence[Tap] = (),
    execution: Execution = Execution(),
) -> tuple[Float[Array, "i n e"], dict[str, Array]]:
    """Runs the tower and the merger.

    Args:
        params: weights of the model.
        config: shape of the tower.
        pixels: images; their values are normalized.
        taps: intermediates to return, per merged patch in raster order.
            "received": [i, n] float32 attention that a merged patch receives in a block with global
            attention, averaged over heads, over all patches of the image as queries, and over the
            patches of the merged patch.
            "keys": [i, n, c] float32 keys after rotary positions, averaged over heads and over the
            patches of the merged patch.
            "hidden": [i, n, d] hidden state, averaged over the patches of the merged patch.
        execution: how the blocks are run.

    Returns:
        [i, n, e] tokens in raster order, and the taps by name.

    Raises:
        ValueError: a "received" tap of a block that attends within windows.
    """
    vision, unit = params["vision"], config.unit
    taps_by_name = resolve_taps(taps, config.num_layers, TAP_KINDS)
    for name, (kind, layer) in taps_by_name.items():
        if kind == "received" and layer not in config.full_blocks:
            raise UserError(f"tap {name} belongs to a block that attends within windows")
    i, m, v = pixels.values.shape
    layout = lay_out_windows(jnp.asarray(pixels.grid), config.window, m // unit)
    context = _make_context(config, layout)
    vision_block = QwenVisionBlock(config)
    global_mask = jnp.isin(jnp.arange(config.num_layers), jnp.array(config.full_blocks, jnp.int32))

    def body(hidden, index):
        weights = {"params": take_layer(vision["layers"], index)}
        is_global = index in config.full_blocks if isinstance(index, int) else global_mask[index]
        output = cast(
            BlockOutput,
            vision_block.apply(weights, hidden, context, is_global, execution.attention),
        )
        return output.hidden, output

    merged_values = jnp.reshape(cast(Array, pixels.values), (i, m // unit, unit * v))
    values = _gather_rows(merged_values, layout.raster).reshape(i, m, v)
    hidden, outputs, states = run_stack(
        vision["layers"],
        checkpoint_layer(body, remat=False),
        embed_patches(vision, config, values),
        (0, config.num_layers),
        output_blocks=[layer for kind, layer in taps_by_name.values() if kind != "hidden"],
        carry_layers=[layer for kind, layer in taps_by_name.values() if kind == "hidden"],
    )
    tokens = cast(Array, Merger(config).apply({"params": params["merger"]}, hidden))
    tapped = {}
    for name, (kind, layer) in taps_by_name.items():
        if kind == "hidden":
            per_patch = states[layer]
        else:
            per_patch = read_patch_tap(kind, outputs[layer], context.window >= 0)
        tap = _gather_rows(mean_over_squares(per_patch, unit), layout.slot)
        tapped[name] = tap[..., 0] if kind == "received" else tap
    return _gather_rows(tokens, layout.slot), tapped


def read_patch_tap(
    kind: str, output: BlockOutput, is_patch: Bool[Array, "i m"]
) -> Float[Array, "i m w"]:
    """Computes a "received" [i, m, 1] or "keys" [i, m, c] tap per patch, as float32."""
    if kind == "received":
        return received_attention(output.query, output.key, is_patch)[..., None]
    return output.key.astype(jnp.float32).mean(1)


def mean_over_squares(x: Float[Array, "i m w"], unit: int) -> Float[Array, "i n w"]:
    """Averages over the `unit` consecutive patches of each merged patch."""
    i, m, w = x.shape
    return x.reshape(i, m // unit, unit, w).mean(2)
