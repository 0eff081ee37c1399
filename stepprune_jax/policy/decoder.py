"""Pointer decoder: the logits of one step, Eq. (5), and of all steps at once."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.policy import layers
from stepprune_jax.policy.base import DecoderFns, Params
from stepprune_jax.policy.config import PolicyConfig


class PointerContext(NamedTuple):
    """What the decoder computes once from the memory; its last slot is the stop.

    Cross-attention has keys and values for each inner layer, and for the hazard after them.
    """

    pointer_key: Float[Array, "b m d"]
    cross_key: tuple[Float[Array, "b h m c"], ...]
    cross_value: tuple[Float[Array, "b h m c"], ...]
    memory_mask: Bool[Array, "b m"]
    stop: Float[Array, "b d"]


class History(NamedTuple):
    """Keys and values of the queries so far, as one attention sees them."""

    key: Float[Array, "b h t c"]
    value: Float[Array, "b h t c"]


# One for each inner layer, for the hazard if there is one, and for the pointer.
Cache = tuple[History, ...]


def empty_history(config: PolicyConfig, memory: Float[Array, "b m d"], rows: int) -> History:
    """Allocates keys and values for `rows` queries."""
    b, _, d = memory.shape
    empty = jnp.zeros((b, config.num_heads, rows, d // config.num_heads), memory.dtype)
    return History(empty, empty)


def pointer_init(
    params: Params,
    config: PolicyConfig,
    memory: Float[Array, "b m d"],
    memory_mask: Bool[Array, "b m"],
    steps: int,
) -> tuple[Float[Array, "b d"], PointerContext, Cache]:
    """Prepares `steps` steps of the pointer decoder over `memory`."""
    b, _, d = memory.shape
    weights, heads = params["decoder"], config.num_heads
    pointer = weights["pointer"]
    slots = layers.layer_norm(pointer["memory_norm"], memory)
    keys, values = [], []
    readers = [(weights[f"layer_{i}"], memory) for i in range(config.decoder_layers - 1)]
    hazard = config.stop == "hazard"
    if hazard:
        readers.append((weights["hazard"], jax.lax.stop_gradient(memory)))
    for layer, seen in readers:
        cross = layer["cross"]
        inner = layers.layer_norm(cross["memory_norm"], seen)
        for name, out in (("key", keys), ("value", values)):
            out.append(layers.split_heads(layers.dense(cross["attention"][name], inner), heads))
    context = PointerContext(
        layers.dense(pointer["key"], slots), tuple(keys), tuple(values), memory_mask, memory[:, -1]
    )
    cache = (empty_history(config, memory, steps),) * (config.decoder_layers + hazard)
    start = jnp.broadcast_to(weights["start"].astype(memory.dtype), (b, d))
    return start, context, cache


def history_attention(params: Params, config: PolicyConfig, x, past: History, first, skip=0):
    """Causal self-attention of queries `first, first + 1, ...` over the past and themselves.

    Rows of the cache before `skip` hold no query.
    """
    y = layers.layer_norm(params["norm"], x)
    weights = params["attention"]
    q, k, v = (
        layers.split_heads(layers.dense(weights[name], y), config.num_heads)
        for name in ("query", "key", "value")
    )
    key = jax.lax.dynamic_update_slice_in_dim(past.key, k, first, axis=2)
    value = jax.lax.dynamic_update_slice_in_dim(past.value, v, first, axis=2)
    row, last = jnp.arange(key.shape[2]), first + jnp.arange(x.shape[1])
    mask = (row >= skip) & (row <= last[:, None])
    mixed = layers.merge_heads(layers.attention(q, key, value, mask[None, None]))
    return x + layers.dense(weights["out"], mixed), History(key, value)


def finish_layer(layer: Params, config: PolicyConfig, context: PointerContext, i: int, x):
    """Applies a decoder layer after its history: cross-attention number `i`, and the MLP."""
    weights = layer["cross"]["attention"]
    q = layers.dense(weights["query"], layers.layer_norm(layer["cross"]["norm"], x))
    q = layers.split_heads(q, config.num_heads)
    mask = context.memory_mask[:, None, None]
    mixed = layers.attention(q, context.cross_key[i], context.cross_value[i], mask)
    x = x + layers.dense(weights["out"], layers.merge_heads(mixed))
    return x + layers.mlp(layer["mlp"], layers.layer_norm(layer["norm"], x))


def decoder_layer(
    layer: Params,
    config: PolicyConfig,
    context: PointerContext,
    i: int,
    x,
    past: History,
    first,
    skip=0,
):
    """Applies a whole decoder layer, number `i` of those with cross-attention."""
    x, past = history_attention(layer["history"], config, x, past, first, skip)
    return finish_layer(layer, config, context, i, x), past


def hazard_logits(
    params: Params, config: PolicyConfig, context: PointerContext, x, past: History, first
):
    """Returns stop logits [b, t] of queries `first, first + 1, ...` and the hazard's new history.

    No gradient reaches queries or memory. The stop slot is the readout, and the step serves as a
    clock, since attention over a history does not reveal its length.
    """
    layer = params["decoder"]["hazard"]
    wide = layers.score_dtype(x.dtype)
    elapsed = jnp.log1p((first + jnp.arange(x.shape[1])).astype(wide))[:, None]
    x = jax.lax.stop_gradient(x) + (elapsed * layer["clock"]).astype(x.dtype)
    x, past = decoder_layer(layer, config, context, config.decoder_layers - 1, x, past, first)
    read = layers.layer_norm(layer["read"], x).astype(wide)
    return jnp.einsum("btd,bd->bt", read, context.stop.astype(wide)), past


def _decode(params, config, context, queries, cache, first):
    """Computes pointer logits of queries `[b, t, d]` at steps `first, first + 1, ...`."""
    weights, x = params["decoder"], queries
    histories = []
    for i in range(config.decoder_layers - 1):
        layer = weights[f"layer_{i}"]
        x, past = decoder_layer(layer, config, context, i, x, cache[i], first)
        histories.append(past)
    pointer = weights["pointer"]
    x, history = history_attention(pointer["history"], config, x, cache[-1], first)
    query = layers.dense(pointer["query"], layers.layer_norm(pointer["norm"], x))
    # Full float32 even where the hardware would round products: near-ties decide the selection.
    logits = jnp.matmul(
        query,
        context.pointer_key.swapaxes(-1, -2),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=layers.score_dtype(query.dtype),
    ) / math.sqrt(query.shape[-1])
    if config.stop == "hazard":
        past = cache[config.decoder_layers - 1]
        stop, past = hazard_logits(params, config, context, queries, past, first)
        # Not a concatenation: fused with the readout, XLA's CUDA backend fails to compile it.
        logits = logits.at[..., -1].set(stop)
        histories.append(past)
    return logits, (*histories, history)


def pointer_step(
    params: Params,
    config: PolicyConfig,
    context: PointerContext,
    query: Float[Array, "b d"],
    cache: Cache,
    step: Int[Array, ""],
) -> tuple[Float[Array, "b m"], Cache]:
    """Runs one step of the pointer decoder, Eq. (5) without its mask.

    Causal self-attention over the queries so far, then cross-attention to the memory, whose logits
    in the last layer (one head of width d, scaled by 1/sqrt(d)) are the pointer logits, in at
    least float32.
    """
    logits, cache = _decode(params, config, context, query[:, None], cache, step)
    return logits[:, 0], cache


def pointer_sequence(
    params: Params,
    config: PolicyConfig,
    context: PointerContext,
    queries: Float[Array, "b t d"],
    cache: Cache,
) -> Float[Array, "b t m"]:
    """Runs `pointer_step` for all steps in one causal pass, given the queries."""
    return _decode(params, config, context, queries, cache, 0)[0]


# The paper's decoder.
POINTER = DecoderFns(pointer_init, pointer_step, pointer_sequence)
