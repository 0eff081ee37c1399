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
    product,
    side_by_side,
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

_EXACT = jax.lax.Precision.HIGHEST

TAP_KINDS = ("hidden", "attention", "received", "keys", "query")


class ClipAttention(nn.Module):
    """Unmasked multi-head self-attention with biases."""

    config: ClipConfig

    @nn.compact
    def __call__(self, x: Float[Array, "i t d"], attention: str = "matmul") -> BlockOutput:
        """Returns the projected result as `hidden`, with queries, keys and values."""
        width, heads = self.config.hidden_size, self.config.num_heads
        widths = {"query": width, "key": width, "value": width}
        parts = side_by_side(self, x, widths, True)
        parts = [split_heads(part, part.shape[-1] * heads // width) for part in parts]
        query, key, value = parts if len(parts) == 3 else jnp.split(parts[0], 3, axis=1)
        mixed = self_attend(query, key, value, False, attention)
        mixed = Dense(width, name="out")(merge_heads(mixed))
        return BlockOutput(mixed, query, key, value)


class ClipMlp(nn.Module):
    """Two projections with an activation between them."""

    config: ClipConfig

    @nn.compact
    def __call__(self, x: Float[Array, "i t d"]) -> Float[Array, "i t d"]:
        """Applies the MLP."""
        x = Dense(self.config.intermediate_size, name="up")(x)
        return Dense(self.config.hidden_size, name="down")(activate(self.config.activation, x))


class ClipBlock(nn.Module):
    """One pre-norm block."""

    config: ClipConfig

    @nn.compact
    def __call__(self, hidden: Float[Array, "i t d"], attention: str = "matmul") -> BlockOutput:
        """Runs the block on [i, t, d], t the class token and the patches."""
        eps = self.config.layer_norm_eps
        mixed = ClipAttention(self.config, name="attention")(
            LayerNorm(eps, name="norm1")(hidden), attention
        )
        hidden = hidden + mixed.hidden
        hidden = hidden + ClipMlp(self.config, name="mlp")(LayerNorm(eps, name="norm2")(hidden))
        return mixed._replace(hidden=hidden)


def init_vision(key: Array, config: ClipConfig) -> Params:
    """Draws float32 weights of the tower."""
    keys = iter(jax.random.split(key, 4))
    d, p, places = config.hidden_size, config.patch_size, config.trained.num_patches + 1
    norm = {"scale": jnp.ones(d), "bias": jnp.zeros(d)}
    block, sample = ClipBlock(config), jnp.zeros((1, 1, d))
    return {
        "class_embedding": jax.random.normal(next(keys), (d,)) * d**-0.5,
        "patch_embedding": {
            "kernel": jax.random.normal(next(keys), (p * p * 3, d)) * (p * p * 3) ** -0.5
        },
        "position_embedding": jax.random.normal(next(keys), (places, d)) * 0.02,
        "pre_norm": norm,
        "post_norm": norm,
        "layers": jax.vmap(lambda k: block.init(k, sample)["params"])(
            jax.random.split(next(keys), config.num_layers)
        ),
    }


def embed_patches(
    params: Params, config: ClipConfig, pixels: Float[Array, "i 3 H W"]
) -> Float[Array, "i t d"]:
    """Embeds the class token and patches in raster order, after the first norm: hidden state 0."""
    i = pixels.shape[0]
    kernel = params["patch_embedding"]["kernel"]
    p, side = config.patch_size, config.image_size // config.patch_size
    # A strided convolution without overlap is one matrix product over cut-out patches, whose
    # values run over (row, column, channel). An incomplete patch at the border is dropped.
    patches = pixels[:, :, : side * p, : side * p].astype(kernel.dtype)
    patches = patches.reshape(i, 3, side, p, side, p).transpose(0, 2, 4, 3, 5, 1)
    patches = product(patches.reshape(i, side * side, p * p * 3), kernel)
    first = jnp.broadcast_to(params["class_embedding"], (i, 1, config.hidden_size))
    hidden = jnp.concatenate([first, patches], axis=1) + positions(params, config)
    norm = LayerNorm(config.layer_norm_eps)
    return cast(Array, norm.apply({"params": params["pre_norm"]}, hidden))


def positions(params: Params, config: ClipConfig) -> Float[Array, "t d"]:
    """Returns the position embeddings, between those of the trained size for images of another."""
    table, side = params["position_embedding"], config.image_size // config.patch_size
    trained = config.trained.image_size // config.patch_size
    if trained == side:
        return table
    weights = jnp.asarray(bicubic(trained, side))
    grid = table[1:].astype(jnp.float32).reshape(trained, trained, -1)
    between = jnp.einsum("as,bt,std->abd", weights, weights, grid, precision=_EXACT)
    between = between.reshape(side * side, -1).astype(table.dtype)
    return jnp.concatenate([table[:1], between])


def bicubic(size: int, wanted: int) -> Float[np.ndarray, "wanted size"]:
    """Returns the weights by which torch's bicubic interpolation resizes an axis."""
    place = (np.arange(wanted) + 0.5) * size / wanted - 0.5
    weights = np.zeros((wanted, size), np.float32)
    for shift in range(-1, 3):
        source = np.floor(place).astype(int) + shift
        x, a = np.abs(place - source), -0.75  # Keys' kernel, with torch's slope
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
        # Places outside repeat the border.
        at = np.arange(wanted), np.clip(source, 0, size - 1)
        np.add.at(weights, at, np.where(x <= 1, near, far))
    return weights


def encode(
    params: Params,
    config: ClipConfig,
    pixels: Float[Array, "i 3 H W"],
    layer: int = -2,
    taps: Sequence[Tap] = (),
    execution: Execution = Execution(),
) -> tuple[Float[Array, "i t d"], dict[str, Array]]:
    """Runs the tower up to hidden state `layer`; later blocks run only if a tap needs them.

    Returns the state [i, n+1, d] without the final norm, and the taps by name: "hidden"
    [i, n+1, d]; "attention", the class token's row of softmax weights, heads kept, [i, h, n+1]
    float32; "received" [i, n] float32, the attention that patches receive, averaged over heads and
    all tokens; "keys" [i, h, n+1, c]; "query" [i, h, c], the class token's.
    """
    named = resolve_taps(taps, config.num_layers, TAP_KINDS)
    result = next(iter(resolve_taps([Tap("hidden", layer)], config.num_layers, TAP_KINDS).values()))
    cuts = [at for kind, at in [*named.values(), result] if kind == "hidden"]
    watched = [at for kind, at in named.values() if kind != "hidden"]
    last = max([*cuts, *(at + 1 for at in watched)])
    block = ClipBlock(config)

    def body(hidden, index):
        weights = take_layer(params["layers"], index)
        output = cast(BlockOutput, block.apply({"params": weights}, hidden, execution.attention))
        return output.hidden, output

    hidden = embed_patches(params, config, pixels)
    body = checkpoint_layer(body, remat=False)
    _, outputs, states = run_stack(params["layers"], body, hidden, (0, last), watched, cuts)
    found = {}
    for name, (kind, at) in named.items():
        if kind == "hidden":
            found[name] = states[at]
        elif kind == "keys":
            found[name] = outputs[at].key
        elif kind == "query":
            found[name] = outputs[at].query[:, :, 0]
        elif kind == "received":
            query, key = outputs[at].query, outputs[at].key
            everywhere = jnp.ones((len(query), query.shape[2]), bool)
            found[name] = received_attention(query, key, everywhere)[:, 1:]
        else:
            output = outputs[at]
            keys = Segment(output.key, output.value, None)
            found[name] = attention_weights(output.query[:, :, :1], [keys])[:, :, 0]
    return states[result[1]], found
