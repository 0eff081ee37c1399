"""Qwen3-VL's vision transformer, as pure functions over a tree of stacked weights.

Qwen Team, "Qwen3-VL Technical Report" (https://arxiv.org/abs/2511.21631). Pre-norm blocks, each of
which attends to the whole image, with rotary positions by row and by column. A learned table of
positions, stretched over the image, is added to the patches. A merger turns each square of patches
into a token. Further mergers turn what leaves some blocks into deep features (DeepStack,
https://arxiv.org/abs/2406.04334), one vector of each for every token.

Patches are grouped by merged patch, these in raster order.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.attention import Tap, received_attention, resolve_taps, self_attend
from stepprune_jax.models.layers import BlockOutput, Dense, LayerNorm, activate
from stepprune_jax.models.qwen2_5_vl.images import Patches
from stepprune_jax.models.qwen2_5_vl.tower import embed_patches, rotary_frequencies
from stepprune_jax.models.qwen3_vl.config import Qwen3VisionConfig
from stepprune_jax.models.rotary import axial_rotary, rotate
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
    """Inputs shared by all blocks: rotary angles of the patches, and how many each image has."""

    cosine: Float[Array, "i m c"]
    sine: Float[Array, "i m c"]
    length: Int[Array, "i"]

    @property
    def real(self) -> Bool[Array, "i m"]:
        """Mask of patches that are not padding."""
        return jnp.arange(self.cosine.shape[1]) < self.length[:, None]


def patch_places(
    config: Qwen3VisionConfig, grid: Int[Array, "i 2"], slots: int
) -> Int[Array, "i 2 m"]:
    """Returns row and column of each patch, for n `slots` of merged patches; any in the padding."""
    k, unit = config.merge_size, config.unit
    number = jnp.arange(slots, dtype=jnp.int32)
    columns = jnp.maximum(grid[:, 1:], 1)  # an absent image has none
    merged = jnp.stack([number // columns, number % columns], axis=1)
    within = jnp.stack(jnp.divmod(jnp.arange(unit, dtype=jnp.int32), k))
    return (merged[..., None] * k + within[:, None]).reshape(len(grid), 2, slots * unit)


def stretched(
    table: Float[Array, "p d"],
    side: int,
    size: Int[Array, "i 2"],
    place: Int[Array, "i 2 m"],
) -> Float[Array, "i m d"]:
    """Reads a square table at the places of patches of an image, in float32.

    Corners fall on corners; between four rows of the table it is linear in each axis.

    Args:
        table: learned positions in raster order.
        side: rows and columns of the square.
        size: rows and columns of patches of each image.
        place: row and column of each patch.
    """
    at = place.astype(jnp.float32) * (side - 1) / jnp.maximum(size - 1, 1)[..., None]
    low = jnp.floor(at)
    beyond, low = at - low, low.astype(jnp.int32)
    total = jnp.float32(0)
    for down in (0, 1):
        for right in (0, 1):
            step = jnp.array([down, right])[:, None]
            tap = jnp.clip(low + step, 0, side - 1)
            weight = jnp.where(step == 1, beyond, 1 - beyond).prod(1)
            total += table[tap[:, 0] * side + tap[:, 1]] * weight[..., None]
    return total


class TowerAttention(nn.Module):
    """Self-attention to the whole image, with biases and rotary positions."""

    config: Qwen3VisionConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "i m d"], context: TowerInputs, attention: str = "matmul"
    ) -> BlockOutput:
        """Returns the projected result as `hidden`, with queries, keys and values."""
        config = self.config
        parts = jnp.split(Dense(3 * config.hidden_size, name="qkv")(x), 3, axis=2)
        query, key, value = (split_heads(part, config.num_heads) for part in parts)
        query = rotate(query, context.cosine, context.sine)
        key = rotate(key, context.cosine, context.sine)
        mixed = self_attend(query, key, value, False, attention, context.length)
        mixed = Dense(config.hidden_size, name="out")(merge_heads(mixed))
        return BlockOutput(mixed, query, key, value)


class TowerMlp(nn.Module):
    """A linear layer, GELU and a linear layer, of which none is gated."""

    config: Qwen3VisionConfig

    @nn.compact
    def __call__(self, x: Float[Array, "i m d"]) -> Float[Array, "i m d"]:
        """Applies the MLP."""
        config = self.config
        x = activate("gelu_tanh", Dense(config.intermediate_size, name="up")(x))
        return Dense(config.hidden_size, name="down")(x)


class TowerBlock(nn.Module):
    """One pre-norm block."""

    config: Qwen3VisionConfig

    @nn.compact
    def __call__(
        self, hidden: Float[Array, "i m d"], context: TowerInputs, attention: str = "matmul"
    ) -> BlockOutput:
        """Runs the block."""
        config = self.config
        mixed = TowerAttention(config, name="attention")(
            LayerNorm(_EPS, name="norm1")(hidden), context, attention
        )
        hidden = hidden + mixed.hidden
        mlp = TowerMlp(config, name="mlp")
        return mixed._replace(hidden=hidden + mlp(LayerNorm(_EPS, name="norm2")(hidden)))


class Merger(nn.Module):
    """Merges each square of patches into a vector of the language model's width.

    Patches are normalised one by one; where it `is_deep`, those of a square as one vector.
    """

    config: Qwen3VisionConfig
    is_deep: bool = False

    @nn.compact
    def __call__(self, hidden: Float[Array, "i m d"]) -> Float[Array, "i n e"]:
        """Merges patches that are grouped by square."""
        i, m, d = hidden.shape
        unit, norm = self.config.unit, LayerNorm(_EPS, name="norm")
        merged = (i, m // unit, unit * d)
        x = norm(hidden.reshape(merged)) if self.is_deep else norm(hidden).reshape(merged)
        x = activate("gelu", Dense(unit * d, name="up")(x))
        return Dense(self.config.out_size, name="down")(x)


def init_vision(key: Array, config: Qwen3VisionConfig) -> Params:
    """Draws float32 weights of the tower and its mergers; without deep ones if it has none."""
    patch_key, table_key, layers_key, merger_key, deep_key = jax.random.split(key, 5)
    d, unit, deep = config.hidden_size, config.unit, len(config.deep_blocks)
    values = config.temporal_patch_size * config.patch_size**2 * 3
    angles = jnp.ones((1, unit, d // config.num_heads))
    context = TowerInputs(angles, angles, jnp.full(1, unit))
    sample = jnp.zeros((1, unit, d))

    def stacked(module: nn.Module, key: Array, count: int, *given: TowerInputs) -> Params:
        draw = jax.vmap(lambda key: module.init(key, sample, *given)["params"])
        return dict(draw(jax.random.split(key, count)))

    deep_mergers = stacked(Merger(config, is_deep=True), deep_key, deep) if deep else {}
    params = {
        "vision": {
            "patch_embedding": {
                "kernel": jax.random.normal(patch_key, (values, d)) * values**-0.5,
                "bias": jnp.zeros(d),
            },
            "positions": jax.random.normal(table_key, (config.positions, d)) * 0.02,
            "layers": stacked(TowerBlock(config), layers_key, config.num_layers, context),
        },
        "merger": Merger(config).init(merger_key, sample)["params"],
    }
    return {**params, "deep_mergers": deep_mergers} if deep else params


def encode(
    params: Params,
    config: Qwen3VisionConfig,
    pixels: Patches,
    taps: Sequence[Tap] = (),
    execution: Execution = Execution(),
) -> tuple[Float[Array, "i n w"], dict[str, Array]]:
    """Runs the tower and the mergers; returns tokens in raster order, and the taps by name.

    Behind each token are its deep features, one vector of its own width for each of `deep_blocks`.
    Taps by merged patch are those of Qwen2.5-VL: "received" [i, n] float32, the attention received
    in a block, averaged over heads, the image's patches and those of the merged one; "keys"
    [i, n, c] float32, the mean over heads and the patches of the merged one, after rotary
    positions; "hidden" [i, n, d], the mean over these patches.
    """
    vision, unit = params["vision"], config.unit
    named = resolve_taps(taps, config.num_layers, TAP_KINDS)
    i, m, _ = pixels.values.shape
    grid = jnp.asarray(pixels.grid)
    place = patch_places(config, grid, m // unit)
    pairs = rotary_frequencies(config)
    length = grid.prod(1).astype(jnp.int32) * unit
    context = TowerInputs(*axial_rotary((pairs, pairs), place), length)
    block = TowerBlock(config)

    def body(hidden, index):
        weights = {"params": take_layer(vision["layers"], index)}
        output = cast(BlockOutput, block.apply(weights, hidden, context, execution.attention))
        return output.hidden, output

    hidden = embed_patches(vision, config, jnp.asarray(pixels.values))
    table = vision["positions"]
    position = stretched(table, config.side, grid * config.merge_size, place)
    behind = [block + 1 for block in config.deep_blocks]
    hidden, outputs, states = run_stack(
        vision["layers"],
        checkpoint_layer(body, remat=False),
        hidden + position.astype(hidden.dtype),
        (0, config.num_layers),
        [at for kind, at in named.values() if kind != "hidden"],
        [*behind, *(at for kind, at in named.values() if kind == "hidden")],
    )
    merged = [Merger(config).apply({"params": params["merger"]}, hidden)]
    for number, state in enumerate(behind):
        weights = {"params": take_layer(params["deep_mergers"], number)}
        merged.append(Merger(config, is_deep=True).apply(weights, states[state]))
    tapped = {}
    for name, (kind, at) in named.items():
        if kind == "received":
            query, key = outputs[at].query, outputs[at].key
            found = received_attention(query, key, context.real)[..., None]
        elif kind == "hidden":
            found = states[at]
        else:
            found = outputs[at].key.astype(jnp.float32).mean(1)
        found = found.reshape(i, m // unit, unit, -1).mean(2)
        tapped[name] = found[..., 0] if kind == "received" else found
    return jnp.concatenate(cast(list[Array], merged), axis=2), tapped
