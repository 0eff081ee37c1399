"""The vision transformer of Qwen3-VL, as pure functions of stacked weights.

Qwen Team, "Qwen3-VL Technical Report" (https://arxiv.org/abs/2511.21631). Pre-norm blocks with
global attention and rotary positions by row and by column. A learned square table of position
embeddings is interpolated to the size of the image and added to the patches. A merger turns each
square of patches into a token. Further mergers turn the outputs of some blocks into DeepStack
features (https://arxiv.org/abs/2406.04334): one vector per token for each of these blocks.

The patches of a merged patch are consecutive, and merged patches have raster order.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.attention import Tap, resolve_taps, self_attend
from stepprune_jax.models.layers import BlockOutput, Dense, LayerNorm, activate
from stepprune_jax.models.qwen2_5_vl.images import Patches
from stepprune_jax.models.qwen2_5_vl.tower import (
    embed_patches,
    mean_over_squares,
    read_patch_tap,
    rotary_frequencies,
)
from stepprune_jax.models.qwen3_vl.config import Qwen3VisionConfig
from stepprune_jax.models.rotary import axial_cos_sin, rotate
from stepprune_jax.models.stack import (
    Execution,
    Params,
    checkpoint_layer,
    run_stack,
    take_layer,
)
from stepprune_jax.policy.layers import merge_heads, split_heads

TAP_KINDS = ("received", "keys", "hidden")
_EPS = 1e-6


class TowerInputs(NamedTuple):
    """Inputs that all blocks share.

    Attributes:
        cosine: [i, m, c] float32 cosine of the rotary angles of patches.
        sine: [i, m, c] float32 sine of the rotary angles.
        length: [i] number of patches of each image; the patches are a prefix of the m slots.
    """

    cosine: Float[Array, "i m c"]
    sine: Float[Array, "i m c"]
    length: Int[Array, "i"]

    @property
    def is_patch(self) -> Bool[Array, "i m"]:
        """Mask of patches; False for padding."""
        return jnp.arange(self.cosine.shape[1]) < self.length[:, None]


def patch_coordinates(
    config: Qwen3VisionConfig, grid: Int[Array, "i 2"], num_slots: int
) -> Int[Array, "i 2 m"]:
    """Returns the row and column of each patch; arbitrary numbers for padding.

    Args:
        config: shape of the tower.
        grid: [i, 2] rows and columns of merged patches of each of i images. A merged patch is a
            square of `config.unit` patches, which are consecutive.
        num_slots: number of merged patches, including padding.

    Returns:
        [i, 2, m] row and column of each of the m = `num_slots` * `config.unit` patches.
    """
    side, unit = config.merge_size, config.unit
    merged_index = jnp.arange(num_slots, dtype=jnp.int32)
    columns = jnp.maximum(grid[:, 1:], 1)  # avoids a division by 0 for an absent image
    merged_coordinates = jnp.stack([merged_index // columns, merged_index % columns], axis=1)
    offset_in_square = jnp.stack(jnp.divmod(jnp.arange(unit, dtype=jnp.int32), side))
    coordinates = merged_coordinates[..., None] * side + offset_in_square[:, None]
    return coordinates.reshape(len(grid), 2, num_slots * unit)


def interpolate_positions(
    table: Float[Array, "p d"],
    side: int,
    size: Int[Array, "i 2"],
    place: Int[Array, "i 2 m"],
) -> Float[Array, "i m d"]:
    """Interpolates a square table of position embeddings at the patches of images, in float32.

    The interpolation is bilinear. The corners of the image map to the corners of the table.

    Args:
        table: [p, d] embeddings in raster order, with p = side * side.
        side: rows and columns of the table.
        size: [i, 2] rows and columns of patches of each image.
        place: [i, 2, m] row and column of each patch.

    Returns:
        [i, m, d] float32 position embeddings.
    """
    # [i, 2, m] coordinates in the table; a side of one patch maps to 0.
    coordinate = place.astype(jnp.float32) * (side - 1) / jnp.maximum(size - 1, 1)[..., None]
    low = jnp.floor(coordinate)
    fraction, low = coordinate - low, low.astype(jnp.int32)
    interpolated = jnp.float32(0)
    # Sum over the four table entries around each coordinate.
    for row_step in (0, 1):
        for column_step in (0, 1):
            step = jnp.array([row_step, column_step])[:, None]
            corner = jnp.clip(low + step, 0, side - 1)
            weight = jnp.where(step == 1, fraction, 1 - fraction).prod(1)
            interpolated += table[corner[:, 0] * side + corner[:, 1]] * weight[..., None]
    return interpolated


class TowerAttention(nn.Module):
    """Global self-attention with biases and rotary positions."""

    config: Qwen3VisionConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "i m d"], context: TowerInputs, attention: str = "matmul"
    ) -> BlockOutput:
        """Returns the projected attention output as `hidden`, with queries, keys and values."""
        config = self.config
        qkv = jnp.split(Dense(3 * config.hidden_size, name="qkv")(x), 3, axis=2)
        query, key, value = (split_heads(part, config.num_heads) for part in qkv)
        query = rotate(query, context.cosine, context.sine)
        key = rotate(key, context.cosine, context.sine)
        attended = self_attend(
            query, key, value, causal=False, implementation=attention, length=context.length
        )
        hidden = Dense(config.hidden_size, name="out")(merge_heads(attended))
        return BlockOutput(hidden, query, key, value)


class TowerMlp(nn.Module):
    """MLP with two layers and a GELU between them."""

    config: Qwen3VisionConfig

    @nn.compact
    def __call__(self, x: Float[Array, "i m d"]) -> Float[Array, "i m d"]:
        """Applies the MLP."""
        config = self.config
        x = activate("gelu_tanh", Dense(config.intermediate_size, name="up")(x))
        return Dense(config.hidden_size, name="down")(x)


class TowerBlock(nn.Module):
    """Pre-norm transformer block: attention, then an MLP, each with a residual connection."""

    config: Qwen3VisionConfig

    @nn.compact
    def __call__(
        self, hidden: Float[Array, "i m d"], context: TowerInputs, attention: str = "matmul"
    ) -> BlockOutput:
        """Runs the block."""
        config = self.config
        output = TowerAttention(config, name="attention")(
            LayerNorm(_EPS, name="norm1")(hidden), context, attention
        )
        hidden = hidden + output.hidden
        mlp = TowerMlp(config, name="mlp")
        return output._replace(hidden=hidden + mlp(LayerNorm(_EPS, name="norm2")(hidden)))


class Merger(nn.Module):
    """Merges each square of patches into a vector of the language model's width.

    Attributes:
        config: shape of the tower.
        norm_after_merge: whether the norm applies to the concatenated patches of a square, as in
            DeepStack mergers, instead of to each patch.
    """

    config: Qwen3VisionConfig
    norm_after_merge: bool = False

    @nn.compact
    def __call__(self, hidden: Float[Array, "i m d"]) -> Float[Array, "i n e"]:
        """Merges patches; the patches of a square must be consecutive."""
        i, m, d = hidden.shape
        unit, norm = self.config.unit, LayerNorm(_EPS, name="norm")
        merged_shape = (i, m // unit, unit * d)
        if self.norm_after_merge:
            x = norm(hidden.reshape(merged_shape))
        else:
            x = norm(hidden).reshape(merged_shape)
        x = activate("gelu", Dense(unit * d, name="up")(x))
        return Dense(self.config.out_size, name="down")(x)


def init_vision(key: Array, config: Qwen3VisionConfig) -> Params:
    """Initialises random float32 weights of the tower and its mergers.

    Returns:
        The weights. There is no "deepstack_mergers" for a tower without DeepStack blocks.
    """
    patch_key, table_key, layers_key, merger_key, deepstack_key = jax.random.split(key, 5)
    d, unit, num_deepstack = config.hidden_size, config.unit, len(config.deepstack_blocks)
    patch_values = config.temporal_patch_size * config.patch_size**2 * 3
    angles = jnp.ones((1, unit, d // config.num_heads))
    context = TowerInputs(angles, angles, jnp.full(1, unit))
    sample = jnp.zeros((1, unit, d))

    def init_stack(module: nn.Module, key: Array, count: int, *inputs: TowerInputs) -> Params:
        init = jax.vmap(lambda key: module.init(key, sample, *inputs)["params"])
        return dict(init(jax.random.split(key, count)))

    params = {
        "vision": {
            "patch_embedding": {
                "kernel": jax.random.normal(patch_key, (patch_values, d)) * patch_values**-0.5,
                "bias": jnp.zeros(d),
            },
            "positions": jax.random.normal(table_key, (config.positions, d)) * 0.02,
            "layers": init_stack(TowerBlock(config), layers_key, config.num_layers, context),
        },
        "merger": Merger(config).init(merger_key, sample)["params"],
    }
    if num_deepstack:
        merger = Merger(config, norm_after_merge=True)
        params["deepstack_mergers"] = init_stack(merger, deepstack_key, num_deepstack)
    return params


def encode(
    params: Params,
    config: Qwen3VisionConfig,
    pixels: Patches,
    taps: Sequence[Tap] = (),
    execution: Execution = Execution(),
) -> tuple[Float[Array, "i n w"], dict[str, Array]]:
    """Runs the tower and the mergers.

    Args:
        params: weights of the model.
        config: shape of the tower.
        pixels: images; their values are normalized.
        taps: intermediates to return; see `qwen2_5_vl.tower.encode`. Every block supports
            "received".
        execution: how the blocks are run.

    Returns:
        [i, n, w] tokens in raster order, and the taps by name. Each token is followed by its
        DeepStack features: one vector of the token's width for each of `deepstack_blocks`.
    """
    vision, unit = params["vision"], config.unit
    taps_by_name = resolve_taps(taps, config.num_layers, TAP_KINDS)
    grid = jnp.asarray(pixels.grid)
    place = patch_coordinates(config, grid, pixels.values.shape[1] // unit)
    frequencies = rotary_frequencies(config)
    cosine, sine = axial_cos_sin((frequencies, frequencies), place)
    context = TowerInputs(cosine, sine, grid.prod(1).astype(jnp.int32) * unit)
    tower_block = TowerBlock(config)

    def body(hidden, index):
        weights = {"params": take_layer(vision["layers"], index)}
        output = cast(BlockOutput, tower_block.apply(weights, hidden, context, execution.attention))
        return output.hidden, output

    hidden = embed_patches(vision, config, jnp.asarray(pixels.values))
    position = interpolate_positions(
        vision["positions"], config.side, grid * config.merge_size, place
    )
    # The output of a block is the state before the next block.
    deepstack_layers = [block + 1 for block in config.deepstack_blocks]
    state_layers = [layer for kind, layer in taps_by_name.values() if kind == "hidden"]
    hidden, outputs, states = run_stack(
        vision["layers"],
        checkpoint_layer(body, remat=False),
        hidden + position.astype(hidden.dtype),
        (0, config.num_layers),
        output_blocks=[layer for kind, layer in taps_by_name.values() if kind != "hidden"],
        carry_layers=[*deepstack_layers, *state_layers],
    )
    tokens = [Merger(config).apply({"params": params["merger"]}, hidden)]
    for merger_index, layer in enumerate(deepstack_layers):
        weights = {"params": take_layer(params["deepstack_mergers"], merger_index)}
        tokens.append(Merger(config, norm_after_merge=True).apply(weights, states[layer]))
    tapped = {}
    for name, (kind, layer) in taps_by_name.items():
        if kind == "hidden":
            per_patch = states[layer]
        else:
            per_patch = read_patch_tap(kind, outputs[layer], context.is_patch)
        tap = mean_over_squares(per_patch, unit)
        tapped[name] = tap[..., 0] if kind == "received" else tap
    return jnp.concatenate(cast(list[Array], tokens), axis=2), tapped
