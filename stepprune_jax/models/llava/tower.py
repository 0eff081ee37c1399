"""The CLIP vision transformer, as pure functions over a tree of stacked weights.

Radford et al., "Learning transferable visual models from natural language supervision"
(https://arxiv.org/abs/2103.00020). Pre-norm blocks over a class token and the patches.
"""

from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

from stepprune_jax.models.attention import (
    Segment,
    Tap,
    attention_weights,
    received_attention,
    resolve_taps,
    self_attend,
)
from stepprune_jax.models.layers import (
    BlockOutput,
    Dense,
    LayerNorm,
    activate,
    joined_dense,
    matmul,
)
from stepprune_jax.models.llava.config import ClipConfig
from stepprune_jax.models.stack import (
    Execution,
    Params,
    checkpoint_layer,
    run_stack,
    take_layer,
)
from stepprune_jax.policy.layers import merge_heads, split_heads

TAP_KINDS = ("hidden", "attention", "received", "keys", "query")


class ClipAttention(nn.Module):
    """Unmasked multi-head self-attention with biases."""

    config: ClipConfig

    @nn.compact
    def __call__(self, x: Float[Array, "i t d"], attention: str = "matmul") -> BlockOutput:
        """Returns the projected attention output as `hidden`, with queries, keys and values."""
        width, heads = self.config.hidden_size, self.config.num_heads
        widths = {"query": width, "key": width, "value": width}
        outputs = joined_dense(self, x, widths, True)
        outputs = [split_heads(output, output.shape[-1] * heads // width) for output in outputs]
        query, key, value = outputs if len(outputs) == 3 else jnp.split(outputs[0], 3, axis=1)
        attended = self_attend(query, key, value, causal=False, implementation=attention)
        hidden = Dense(width, name="out")(merge_heads(attended))
        return BlockOutput(hidden, query, key, value)


class ClipMlp(nn.Module):
    """MLP with two layers and an activation between them."""

    config: ClipConfig

    @nn.compact
    def __call__(self, x: Float[Array, "i t d"]) -> Float[Array, "i t d"]:
        """Applies the MLP."""
        x = Dense(self.config.intermediate_size, name="up")(x)
        return Dense(self.config.hidden_size, name="down")(activate(self.config.activation, x))


class ClipBlock(nn.Module):
    """Pre-norm transformer block: attention, then an MLP, each with a residual connection."""

    config: ClipConfig

    @nn.compact
    def __call__(self, hidden: Float[Array, "i t d"], attention: str = "matmul") -> BlockOutput:
        """Runs the block on [i, t, d], where t counts the class token and the patches."""
        eps = self.config.layer_norm_eps
        output = ClipAttention(self.config, name="attention")(
            LayerNorm(eps, name="norm1")(hidden), attention
        )
        hidden = hidden + output.hidden
        hidden = hidden + ClipMlp(self.config, name="mlp")(LayerNorm(eps, name="norm2")(hidden))
        return output._replace(hidden=hidden)


def init_vision(key: Array, config: ClipConfig) -> Params:
    """Initialises random float32 weights of the tower."""
    keys = iter(jax.random.split(key, 4))
    d, p, num_positions = config.hidden_size, config.patch_size, config.trained.num_patches + 1
    norm = {"scale": jnp.ones(d), "bias": jnp.zeros(d)}
    block, sample = ClipBlock(config), jnp.zeros((1, 1, d))
    return {
        "class_embedding": jax.random.normal(next(keys), (d,)) * d**-0.5,
        "patch_embedding": {
            "kernel": jax.random.normal(next(keys), (p * p * 3, d)) * (p * p * 3) ** -0.5
        },
        "position_embedding": jax.random.normal(next(keys), (num_positions, d)) * 0.02,
        "pre_norm": norm,
        "post_norm": norm,
        "layers": jax.vmap(lambda key: block.init(key, sample)["params"])(
            jax.random.split(next(keys), config.num_layers)
        ),
    }


def embed_patches(
    params: Params, config: ClipConfig, pixels: Float[Array, "i 3 H W"]
) -> Float[Array, "i t d"]:
    """Embeds the class token and the patches: computes hidden state 0 of the tower.

    Args:
        params: weights of the tower.
        config: shape of the tower.
        pixels: [i, 3, H, W] normalized images.

    Returns:
        [i, t, d] the class token, then the patches in raster order, after the first norm.
    """
    i = pixels.shape[0]
    kernel = params["patch_embedding"]["kernel"]
    p, side = config.patch_size, config.image_size // config.patch_size
    # A convolution without overlap is a matrix product over patches, whose values run over
    # (row, column, channel). An incomplete patch at the border is dropped.
    patches = pixels[:, :, : side * p, : side * p].astype(kernel.dtype)
    patches = patches.reshape(i, 3, side, p, side, p).transpose(0, 2, 4, 3, 5, 1)
    patches = matmul(patches.reshape(i, side * side, p * p * 3), kernel)
    class_token = jnp.broadcast_to(params["class_embedding"], (i, 1, config.hidden_size))
    hidden = jnp.concatenate([class_token, patches], axis=1) + position_embeddings(params, config)
    norm = LayerNorm(config.layer_norm_eps)
    return cast(Array, norm.apply({"params": params["pre_norm"]}, hidden))


def position_embeddings(params: Params, config: ClipConfig) -> Float[Array, "t d"]:
    """Returns the position embeddings of the class token and the patches.

    For images of another size than in training, the embeddings of the patches are resized by
    bicubic interpolation.
    """
    table, side = params["position_embedding"], config.image_size // config.patch_size
    trained_side = config.trained.image_size // config.patch_size
    if trained_side == side:
        return table
    weights = jnp.asarray(bicubic_weights(trained_side, side))
    grid = table[1:].astype(jnp.float32).reshape(trained_side, trained_side, -1)
    resized = jnp.einsum(
        "as,bt,std->abd", weights, weights, grid, precision=jax.lax.Precision.HIGHEST
    )
    resized = resized.reshape(side * side, -1).astype(table.dtype)
    return jnp.concatenate([table[:1], resized])


def bicubic_weights(size: int, new_size: int) -> Float[np.ndarray, "new_size size"]:
    """Returns the matrix of bicubic interpolation along an axis, as torch resizes it.

    The function uses Keys' kernel (https://doi.org/10.1109/TASSP.1981.1163711) with a = -0.75.

    Args:
        size: length of the axis.
        new_size: length of the resized axis.

    Returns:
        [new_size, size] weights of the old values for each new value.
    """
    # Coordinates of the new values on the old axis. Values lie at the centers of their pixels.
    center = (np.arange(new_size) + 0.5) * size / new_size - 0.5
    weights = np.zeros((new_size, size), np.float32)
    for shift in range(-1, 3):  # each new value depends on four old values
        source = np.floor(center).astype(int) + shift
        x, a = np.abs(center - source), -0.75
        # Keys' kernel for a distance x <= 1, and for 1 < x < 2.
        within_one = ((a + 2) * x - (a + 3)) * x * x + 1
        beyond_one = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
        # Sources outside the axis repeat the value at the border.
        entries = np.arange(new_size), np.clip(source, 0, size - 1)
        np.add.at(weights, entries, np.where(x <= 1, within_one, beyond_one))
    return weights


def encode(
    params: Params,
    config: ClipConfig,
    pixels: Float[Array, "i 3 H W"],
    layer: int = -2,
    *,
    taps: Sequence[Tap] = (),
    execution: Execution = Execution(),
) -> tuple[Float[Array, "i t d"], dict[str, Array]]:
    """Runs the tower up to a hidden state.

    Later blocks run only if a tap needs them.

    Args:
        params: weights of the tower.
        config: shape of the tower.
        pixels: [i, 3, H, W] normalized images.
        layer: number of the hidden state: 0 is the embedding, -1 the output of the last block.
        taps: intermediates to return; n is the number of patches.
            "hidden": [i, n+1, d] hidden state, the class token first.
            "attention": [i, h, n+1] float32 softmax weights of the class token's query.
            "received": [i, n] float32 attention that patches receive, averaged over heads and over
            all tokens.
            "keys": [i, h, n+1, c] keys.
            "query": [i, h, c] query of the class token.
        execution: how the blocks are run.

    Returns:
        [i, n+1, d] the hidden state, without the final norm, and the taps by name.
    """
    taps_by_name = resolve_taps(taps, config.num_layers, TAP_KINDS)
    # Counts a negative layer from the start.
    ((_, layer),) = resolve_taps([Tap("hidden", layer)], config.num_layers, TAP_KINDS).values()
    state_layers = [index for kind, index in taps_by_name.values() if kind == "hidden"] + [layer]
    output_blocks = [index for kind, index in taps_by_name.values() if kind != "hidden"]
    num_blocks = max([*state_layers, *(index + 1 for index in output_blocks)])
    clip_block = ClipBlock(config)

    def body(hidden, index):
        weights = {"params": take_layer(params["layers"], index)}
        output = cast(BlockOutput, clip_block.apply(weights, hidden, execution.attention))
        return output.hidden, output

    _, outputs, states = run_stack(
        params["layers"],
        checkpoint_layer(body, remat=False),
        embed_patches(params, config, pixels),
        (0, num_blocks),
        output_blocks=output_blocks,
        carry_layers=state_layers,
    )
    tapped = {
        name: states[index] if kind == "hidden" else _read_tap(kind, outputs[index])
        for name, (kind, index) in taps_by_name.items()
    }
    return states[layer], tapped


def _read_tap(kind: str, output: BlockOutput) -> Array:
    """Computes the value of a tap from the output of its block."""
    if kind == "keys":
        return output.key
    if kind == "query":
        return output.query[:, :, 0]
    if kind == "received":
        is_token = jnp.ones((len(output.query), output.query.shape[2]), bool)
        return received_attention(output.query, output.key, is_token)[:, 1:]
    segment = Segment(output.key, output.value, None)
    return attention_weights(output.query[:, :, :1], [segment])[:, :, 0]
