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
    """Computes all arrays of the pointer decoder that depend on the memory only; see `InitFn`.

    Args:
        params: policy weights.
        config: policy configuration.
        memory: [b, m, d] encoded image tokens, followed by the stop slot.
        memory_mask: [b, m] True at slots of real tokens and at the stop slot.
        steps: number of steps of the episode.

    Returns:
        A tuple (start, context, cache). start: [b, d] the learned first query. context: keys and
        values of the memory. cache: empty KV caches for `steps` queries.
    """
    b, _, d = memory.shape
    weights = params["decoder"]
    pointer = weights["pointer"]
    layers_and_memories = [
        (weights[f"layer_{i}"], memory) for i in range(config.decoder_layers - 1)
    ]
    has_hazard = config.stop == "hazard"
    if has_hazard:
        # The hazard layer, which predicts the stop, must not change the memory.
        layers_and_memories.append((weights["hazard"], jax.lax.stop_gradient(memory)))
    cross_keys, cross_values = [], []
    for layer, layer_memory in layers_and_memories:
        cross = layer["cross"]
        normed = layers.layer_norm(cross["memory_norm"], layer_memory)
        key = layers.dense(cross["attention"]["key"], normed)
        value = layers.dense(cross["attention"]["value"], normed)
        cross_keys.append(layers.split_heads(key, config.num_heads))
        cross_values.append(layers.split_heads(value, config.num_heads))
    normed_memory = layers.layer_norm(pointer["memory_norm"], memory)
    context = PointerContext(
        pointer_key=layers.dense(pointer["key"], normed_memory),
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
    """Applies causal self-attention of new queries over all queries of an episode so far.

    Args:
        params: weights of the self-attention and its pre-norm.
        config: policy configuration.
        x: [b, t, d] activations of the new queries, at steps `first, first + 1, ...`.
        history: KV cache of the previous queries.
        first: step of the first new query, which is also its position in the cache.
        skip: number of leading cache entries that hold no query and are masked.

    Returns:
        A tuple (x, history). x: [b, t, d] activations with the residual added. history: the KV
        cache with the keys and values of the new queries.
    """
    normed = layers.layer_norm(params["norm"], x)
    weights = params["attention"]
    query, new_key, new_value = (
        layers.split_heads(layers.dense(weights[name], normed), config.num_heads)
        for name in ("query", "key", "value")
    )
    key = jax.lax.dynamic_update_slice_in_dim(history.key, new_key, first, axis=2)
    value = jax.lax.dynamic_update_slice_in_dim(history.value, new_value, first, axis=2)
    key_step, query_step = jnp.arange(key.shape[2]), first + jnp.arange(x.shape[1])
    mask = (key_step >= skip) & (key_step <= query_step[:, None])
    mixed = layers.merge_heads(layers.attention(query, key, value, mask[None, None]))
    return x + layers.dense(weights["out"], mixed), History(key, value)


def finish_layer(
    layer: Params, config: PolicyConfig, context: PointerContext, i: int, x: Float[Array, "b t d"]
) -> Float[Array, "b t d"]:
    """Applies cross-attention to the memory, then the MLP: the second half of a decoder layer.

    Args:
        layer: weights of the decoder layer.
        config: policy configuration.
        context: arrays that `pointer_init` computed from the memory.
        i: index of the layer's keys and values in `context`.
        x: [b, t, d] output of the layer's history attention.

    Returns:
        [b, t, d] output of the layer.
    """
    weights = layer["cross"]["attention"]
    query = layers.dense(weights["query"], layers.layer_norm(layer["cross"]["norm"], x))
    query = layers.split_heads(query, config.num_heads)
    mask = context.memory_mask[:, None, None]
    mixed = layers.attention(query, context.cross_key[i], context.cross_value[i], mask)
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
    """Applies a decoder layer: `history_attention`, then `finish_layer`.

    Takes the arguments of the two functions. Returns [b, t, d] activations and the updated KV
    cache of the layer.
    """
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
    """Computes stop logits with the hazard layer, a decoder layer that predicts the stop only.

    A stop logit is the product of the layer's output and the stop slot. No gradient reaches the
    queries or the memory. An embedding of the step number is added to the queries, because
    attention over a history does not reveal the length of the history.

    Args:
        params: policy weights.
        config: policy configuration.
        context: arrays that `pointer_init` computed from the memory.
        queries: [b, t, d] queries of steps `first, first + 1, ...`.
        history: KV cache of the hazard layer.
        first: step of the first query.

    Returns:
        A tuple (logits, history). logits: [b, t] stop logits, in at least float32. history: the KV
        cache with the keys and values of `queries`.
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
    """Computes pointer and stop logits of consecutive queries, and updates the cache.

    Args:
        params: policy weights.
        config: policy configuration.
        context: arrays that `pointer_init` computed from the memory.
        queries: [b, t, d] queries of steps `first, first + 1, ...`.
        cache: KV caches of the inner layers, of the hazard layer if there is one, and of the
            pointer.
        first: step of the first query.

    Returns:
        A tuple (logits, cache). logits: [b, t, m] unmasked logits of the memory slots, with the
        stop logit last, in at least float32. cache: the updated KV caches.
    """
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
        stop_logits, history = hazard_logits(params, config, context, queries, history, first)
        # `at[].set`, not a concatenation: XLA's CUDA backend cannot compile a concatenation that is
        # fused with the readout.
        logits = logits.at[..., -1].set(stop_logits)
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
    one head of width d and scale 1/sqrt(d).

    Args:
        params: policy weights.
        config: policy configuration.
        context: arrays that `pointer_init` computed from the memory.
        query: [b, d] query of the step: the start token, or the slot that was chosen last.
        cache: KV caches of the previous steps.
        step: [] number of the step, from 0.

    Returns:
        A tuple (logits, cache). logits: [b, m] unmasked logits of the memory slots, with the stop
        logit last, in at least float32. cache: the KV caches with the keys and values of `query`.
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
    """Computes the logits of `pointer_step` for all queries in one causal pass; see `SequenceFn`.

    Args:
        params: policy weights.
        config: policy configuration.
        context: arrays that `pointer_init` computed from the memory.
        queries: [b, t, d] queries of all steps of the episode.
        cache: the empty KV caches of `pointer_init`.

    Returns:
        [b, t, m] unmasked logits, with the stop logit last, in at least float32.
    """
    return _decode(params, config, context, queries, cache, 0)[0]


# The decoder of the paper.
POINTER = DecoderFns(pointer_init, pointer_step, pointer_sequence)
