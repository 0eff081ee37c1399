"""Pointer decoder: the logits of one step, Eq. (5), and of all steps at once."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.policy import layers
from stepprune_jax.policy.base import DecoderFns, Params
from stepprune_jax.policy.config import PolicyConfig


class PointerContext(NamedTuple):
    """Arrays that the decoder computes once per episode from the memory.

    Attributes:
        pointer_key: [b, m, d] keys of the pointer.
        cross_key: cross-attention keys, [b, h, m, c] for each inner layer, then for the hazard
            layer if there is one.
        cross_value: cross-attention values, in the same order.
        memory_mask: [b, m] True at slots of real tokens and at the stop slot.
        stop: [b, d] the stop slot of the memory, which is its last slot.
    """

    pointer_key: Float[Array, "b m d"]
    cross_key: tuple[Float[Array, "b h m c"], ...]
    cross_value: tuple[Float[Array, "b h m c"], ...]
    memory_mask: Bool[Array, "b m"]
    stop: Float[Array, "b d"]


class History(NamedTuple):
    """KV cache of one causal self-attention over the queries of an episode."""

    key: Float[Array, "b h t c"]
    value: Float[Array, "b h t c"]


# The histories of the inner layers, of the hazard layer if there is one, and of the pointer.
Cache = tuple[History, ...]


def empty_history(config: PolicyConfig, memory: Float[Array, "b m d"], steps: int) -> History:
    """Allocates keys and values for the queries of `steps` steps, in the dtype of `memory`."""
    b, _, d = memory.shape
    empty = jnp.zeros((b, config.num_heads, steps, d // config.num_heads), memory.dtype)
    return History(empty, empty)


def pointer_init(
    params: Params,
    config: PolicyConfig,
    memory: Float[Array, "b m d"],
    memory_mask: Bool[Array, "b m"],
    steps: int,
) -> tuple[Float[Array, "b d"], PointerContext, Cache]:
    """Prepares the pointer decoder for `steps` steps over `memory`; see `InitFn`."""
    b, _, d = memory.shape
    weights, heads = params["decoder"], config.num_heads
    pointer = weights["pointer"]
    slots = layers.layer_norm(pointer["memory_norm"], memory)
    cross_keys, cross_values = [], []
    layers_and_memories = [
        (weights[f"layer_{i}"], memory) for i in range(config.decoder_layers - 1)
    ]
    has_hazard = config.stop == "hazard"
    if has_hazard:
        layers_and_memories.append((weights["hazard"], jax.lax.stop_gradient(memory)))
    for layer, layer_memory in layers_and_memories:
        cross = layer["cross"]
        normed = layers.layer_norm(cross["memory_norm"], layer_memory)
        for name, projections in (("key", cross_keys), ("value", cross_values)):
            projected = layers.dense(cross["attention"][name], normed)
            projections.append(layers.split_heads(projected, heads))
    context = PointerContext(
        pointer_key=layers.dense(pointer["key"], slots),
        cross_key=tuple(cross_keys),
        cross_value=tuple(cross_values),
        memory_mask=memory_mask,
        stop=memory[:, -1],
    )
    cache = (empty_history(config, memory, steps),) * (config.decoder_layers + has_hazard)
    start = jnp.broadcast_to(weights["start"].astype(memory.dtype), (b, d))
    return start, context, cache


def history_attention(
    params: Params,
    config: PolicyConfig,
    x: Float[Array, "b t d"],
    history: History,
    first: ArrayLike,
    skip: ArrayLike = 0,
) -> tuple[Float[Array, "b t d"], History]:
    """Applies causal self-attention over the previous queries and the new queries.

    Args:
        params: weights of the self-attention and its pre-norm.
        config: policy configuration.
        x: [b, t, d] activations of the queries at steps `first, first + 1, ...`.
        history: keys and values of the previous queries.
        first: step of the first new query.
        skip: number of leading cache entries that hold no query and are masked.

    Returns:
        The activations with the residual added, and the history with the new keys and values.
    """
    y = layers.layer_norm(params["norm"], x)
    weights = params["attention"]
    q, k, v = (
        layers.split_heads(layers.dense(weights[name], y), config.num_heads)
        for name in ("query", "key", "value")
    )
    key = jax.lax.dynamic_update_slice_in_dim(history.key, k, first, axis=2)
    value = jax.lax.dynamic_update_slice_in_dim(history.value, v, first, axis=2)
    key_step, query_step = jnp.arange(key.shape[2]), first + jnp.arange(x.shape[1])
    mask = (key_step >= skip) & (key_step <= query_step[:, None])
    mixed = layers.merge_heads(layers.attention(q, key, value, mask[None, None]))
    return x + layers.dense(weights["out"], mixed), History(key, value)


def finish_layer(
    layer: Params, config: PolicyConfig, context: PointerContext, i: int, x: Float[Array, "b t d"]
) -> Float[Array, "b t d"]:
    """Applies the cross-attention and the MLP that follow a layer's history attention.

    Args:
        layer: weights of the decoder layer.
        config: policy configuration.
        context: result of `pointer_init`.
        i: index of the layer's keys and values in `context`.
        x: [b, t, d] output of the history attention.
    """
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
    x: Float[Array, "b t d"],
    *,
    history: History,
    first: ArrayLike,
    skip: ArrayLike = 0,
) -> tuple[Float[Array, "b t d"], History]:
    """Applies a decoder layer: `history_attention`, then `finish_layer`."""
    x, history = history_attention(layer["history"], config, x, history, first, skip)
    return finish_layer(layer, config, context, i, x), history


def hazard_logits(
    params: Params,
    config: PolicyConfig,
    context: PointerContext,
    queries: Float[Array, "b t d"],
    history: History,
    first: ArrayLike,
) -> tuple[Float[Array, "b t"], History]:
    """Computes the stop logits of the hazard layer.

    No gradient reaches queries or memory. The layer's output is compared with the stop slot. An
    embedding of the step number is added to the queries, because attention over a history does not
    reveal its length.

    Args:
        params: policy weights.
        config: policy configuration.
        context: result of `pointer_init`.
        queries: [b, t, d] queries of steps `first, first + 1, ...`.
        history: keys and values of the hazard layer's previous queries.
        first: step of the first query.

    Returns:
        The logits, and the history with the keys and values of `queries`.
    """
    layer = params["decoder"]["hazard"]
    dtype = layers.score_dtype(queries.dtype)
    log_step = jnp.log1p((first + jnp.arange(queries.shape[1])).astype(dtype))[:, None]
    x = jax.lax.stop_gradient(queries) + (log_step * layer["clock"]).astype(queries.dtype)
    i = config.decoder_layers - 1
    x, history = decoder_layer(layer, config, context, i, x, history=history, first=first)
    readout = layers.layer_norm(layer["read"], x).astype(dtype)
    return jnp.einsum("btd,bd->bt", readout, context.stop.astype(dtype)), history


def _decode(
    params: Params,
    config: PolicyConfig,
    context: PointerContext,
    queries: Float[Array, "b t d"],
    cache: Cache,
    first: ArrayLike,
) -> tuple[Float[Array, "b t m"], Cache]:
    """Computes the logits of queries at steps `first, first + 1, ...`, and updates the cache."""
    weights, x = params["decoder"], queries
    histories = []
    for i in range(config.decoder_layers - 1):
        layer = weights[f"layer_{i}"]
        x, history = decoder_layer(layer, config, context, i, x, history=cache[i], first=first)
        histories.append(history)
    pointer = weights["pointer"]
    x, pointer_history = history_attention(pointer["history"], config, x, cache[-1], first)
    query = layers.dense(pointer["query"], layers.layer_norm(pointer["norm"], x))
    # Full float32 even where the hardware would round products: near-ties decide the selection.
    logits = jnp.matmul(
        query,
        context.pointer_key.swapaxes(-1, -2),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=layers.score_dtype(query.dtype),
    ) / math.sqrt(query.shape[-1])
    if config.stop == "hazard":
        history = cache[config.decoder_layers - 1]
        stop, history = hazard_logits(params, config, context, queries, history, first)
        # `at[].set`, not a concatenation: XLA's CUDA backend cannot compile a concatenation that is
        # fused with the readout.
        logits = logits.at[..., -1].set(stop)
        histories.append(history)
    return logits, (*histories, pointer_history)


def pointer_step(
    params: Params,
    config: PolicyConfig,
    context: PointerContext,
    query: Float[Array, "b d"],
    cache: Cache,
    step: Int[Array, ""],
) -> tuple[Float[Array, "b m"], Cache]:
    """Computes the pointer logits of one step, Eq. (5) without its mask; see `StepFn`.

    Each layer applies causal self-attention over the queries of the episode, then cross-attention
    to the memory. The pointer logits are the cross-attention logits of the last layer, which has
    one head of width d and scale 1/sqrt(d). They are at least float32.
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
    """Computes the logits of `pointer_step` for all queries in one causal pass."""
    return _decode(params, config, context, queries, cache, 0)[0]


# The decoder of the paper.
POINTER = DecoderFns(pointer_init, pointer_step, pointer_sequence)
