"""Pointer decoder with precomputed tables over pairs of slots, for inference.

The decoder feeds the chosen slot back as the next query. So the queries of an episode are image
slots and the start token: m = n + 1 candidates that are known in advance. Attention over a history
has no positional encoding, so the first layer's output for a query depends only on the *set* of
slots chosen before. The attention logits between all pairs of slots are therefore computed once per
episode, and a step reads one row of that table, masked by the set.

With one decoder layer, the pointer logits LN(z) W_q k_j / sqrt(d) follow directly, where
z = x_i + W_o mixed + b_o. The projection and the norm's scale are folded into the keys,
P_j = scale (W_q k_j) / sqrt(d), and the norm's bias into an offset c_j. If x, W_o and b_o are
centered over the width, the norm's mean vanishes and l = (z P) / sigma(z) + c. Then x_i P is a
table over pairs of slots and W_o P a matrix. A step is a masked softmax, three products with a
vector, and an argmax. With more layers, only the first history is a table, and the pointer uses
the folded keys.

If an episode has far fewer steps than slots, tables over pairs of slots would cost more than they
save. A step then computes the row that it reads.

The logits equal the logits of `pointer_step` up to rounding. In both, equal slots have equal logits
if the device's matrix products give equal columns for equal inputs.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.policy import layers
from stepprune_jax.policy.base import Params
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.decoder import (
    Cache,
    PointerContext,
    decoder_layer,
    empty_history,
    finish_layer,
    history_attention,
)

# Full float32 even where the hardware would round products: near-ties decide the selection.
_exact_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Tables(NamedTuple):
    """Tables that are computed once per episode, by `build_tables`.

    Axes q and s run over the m slots, with the start token in place of the stop; e is the width of
    the concatenated heads. Tables whose rows are read one by one are at least float32. Tables that
    each step reads completely, `history_query` and `history_key` have the compute dtype.

    Attributes:
        query: slots as queries.
        score: attention logits of the first history; None if they are computed in each step.
        value: attention values of the first history.
        residual: `query` plus the output bias of the first history.
        out: output projection of the first history.
        key: pointer keys, with the pointer's projection and the scale of its norm folded in.
        offset: pointer logits of the norm's bias.
        row_logit: product of `residual` and `key`, for one decoder layer; None otherwise, and if it
            is computed in each step.
        mixed_logit: product of `key` and `out`, for one decoder layer; None otherwise.
        history_query: queries of the first history, if there is no `score`; None otherwise.
        history_key: keys of the first history, if there is no `score`; None otherwise.
    """

    query: Float[Array, "b q d"]
    score: Float[Array, "b q h s"] | None
    value: Float[Array, "b h c s"]
    residual: Float[Array, "b q d"]
    out: Float[Array, "d e"]
    key: Float[Array, "b m d"]
    offset: Float[Array, "b m"]
    row_logit: Float[Array, "b q m"] | None
    mixed_logit: Float[Array, "b m e"] | None
    history_query: Float[Array, "b q h c"] | None = None
    history_key: Float[Array, "b h c s"] | None = None


class TableState(NamedTuple):
    """State of an episode that reads tables.

    Attributes:
        slots: slots of the current group of queries, in order of choice.
        visited: True at slots that are or were queries.
        cache: histories of the layers after the first.
    """

    slots: Int[Array, "b g"]
    visited: Bool[Array, "b q"]
    cache: Cache


def _centre(x: Array) -> Array:
    """Subtracts the mean over the last axis."""
    return x - jnp.mean(x, axis=-1, keepdims=True)


def table_bytes(config: PolicyConfig, num_slots: int, dtype: DTypeLike = jnp.float32) -> int:
    """Returns the size in bytes of one row's tables over pairs of slots.

    Args:
        config: policy configuration.
        num_slots: m, the number of slots.
        dtype: dtype of the activations.
    """
    return layers.score_dtype(jnp.dtype(dtype)).itemsize * num_slots**2 * (config.num_heads + 1)


def tabulates_pairs(num_slots: int, steps: int) -> bool:
    """Returns whether to compute tables over all pairs of slots before the first step.

    Args:
        num_slots: m, the number of memory slots.
        steps: number of steps of the episode, and so the number of table rows that are read.
    """
    # Computing the row in each step is cheaper if the episode visits under a quarter of the slots.
    return num_slots <= layers.MANY_QUERIES or 4 * steps > num_slots


def build_tables(
    params: Params,
    config: PolicyConfig,
    context: PointerContext,
    memory: Float[Array, "b m d"],
    start: Float[Array, "b d"],
    *,
    steps: int,
) -> Tables:
    """Computes everything about an episode that does not depend on the chosen tokens.

    With one decoder layer, the tables have m^2 (h + 1) + m (5 d + 1) + d^2 elements per row of the
    batch, for m slots, h heads and width d. The quadratic term is absent if `tabulates_pairs`
    returns False.

    Args:
        params: policy weights.
        config: policy configuration.
        context: arrays that `pointer_init` computed from the memory.
        memory: [b, m, d] encoded image tokens, followed by the stop slot.
        start: [b, d] first query.
        steps: number of steps of the episode.

    Returns:
        The tables that `table_logits` reads in each step.
    """
    weights, dtype = params["decoder"], memory.dtype
    wide_dtype = layers.score_dtype(dtype)
    pointer, has_one_layer = weights["pointer"], config.decoder_layers == 1
    history = (pointer if has_one_layer else weights["layer_0"])["history"]
    # All possible queries: the image slots, and the start token in place of the stop slot, which is
    # never a query.
    candidates = memory.at[:, -1].set(start)
    normed = layers.layer_norm(history["norm"], candidates)
    history_query, history_key, history_value = (
        layers.split_heads(layers.dense(history["attention"][name], normed), config.num_heads)
        for name in ("query", "key", "value")
    )
    has_pairs = tabulates_pairs(memory.shape[1], steps)
    score = None
    if has_pairs:
        score = jnp.einsum(
            "bhqc,bhsc->bqhs", history_query, history_key, preferred_element_type=wide_dtype
        )
        score = score / math.sqrt(history_query.shape[-1])
    projection = history["attention"]["out"]
    out = projection["kernel"].astype(dtype).astype(wide_dtype)
    out_bias = projection["bias"].astype(dtype).astype(wide_dtype)
    residual = candidates.astype(wide_dtype) + out_bias
    if has_one_layer:
        # The mean that the pointer's norm subtracts is then 0 for every query.
        residual, out = _centre(residual), _centre(out)
    # Fold the pointer's query projection, and the scale and bias of its norm, into the keys.
    scaled_key = context.pointer_key / math.sqrt(memory.shape[-1])
    query_kernel = pointer["query"]["kernel"].astype(dtype)
    folded_key = jnp.einsum(
        "bme,de->bmd", scaled_key, query_kernel, preferred_element_type=wide_dtype
    )
    key = folded_key * pointer["norm"]["scale"]
    offset = _exact_einsum("bmd,d->bm", folded_key, pointer["norm"]["bias"].astype(wide_dtype))
    row_logit = mixed_logit = None
    if has_one_layer:
        row_logit = _exact_einsum("bqd,bmd->bqm", residual, key) if has_pairs else None
        mixed_logit = _exact_einsum("bmd,ed->bme", key, out).astype(dtype)
    return Tables(
        query=candidates,
        score=score,
        value=history_value.swapaxes(-1, -2),
        residual=residual,
        out=out.T.astype(dtype),
        key=key.astype(dtype),
        offset=offset,
        row_logit=row_logit,
        mixed_logit=mixed_logit,
        history_query=None if has_pairs else history_query.swapaxes(1, 2),
        history_key=None if has_pairs else history_key.swapaxes(-1, -2),
    )


def init_state(config: PolicyConfig, tables: Tables, steps: int, group: int) -> TableState:
    """Returns the state before the first step of an episode.

    Args:
        config: policy configuration.
        tables: result of `build_tables`.
        steps: number of steps of the episode.
        group: number of tokens that are chosen by the logits of one step.
    """
    b, m, _ = tables.query.shape
    # The first step has one query. The other queries of its group are dummies, whose cache entries
    # are masked.
    empty_cache = empty_history(config, tables.query, steps + group - 1)
    return TableState(
        slots=jnp.full((b, group), m - 1, jnp.int32),  # the start token
        visited=jnp.zeros((b, m), bool).at[:, -1].set(True),
        cache=(empty_cache,) * (config.decoder_layers - 1),
    )


def take_rows(table: Float[Array, "b q *x"], slots: Int[Array, "b g"]) -> Float[Array, "b g *x"]:
    """Gathers the table rows of the given slots; each row of the batch has its own table."""
    index = slots.reshape(slots.shape + (1,) * (table.ndim - 2))
    return jnp.take_along_axis(table, index, axis=1, mode="promise_in_bounds")


def _mix_history(
    tables: Tables, slots: Int[Array, "b g"], visible: Bool[Array, "b g q"]
) -> Float[Array, "b g e"]:
    """Computes the first layer's attention over the queries so far, without output projection.

    Args:
        tables: result of `build_tables`.
        slots: [b, g] slots of the new queries.
        visible: [b, g, q] True at slots that a new query attends to.

    Returns:
        [b, g, e] mixed values of all heads, concatenated.
    """
    if tables.score is None:
        assert tables.history_query is not None and tables.history_key is not None
        query, dtype = take_rows(tables.history_query, slots), tables.history_query.dtype
        score = jnp.einsum(
            "bghc,bhcs->bghs",
            query,
            tables.history_key,
            preferred_element_type=layers.score_dtype(dtype),
        )
        score = score / math.sqrt(query.shape[-1])
    else:
        score = take_rows(tables.score, slots)
    score = jnp.where(visible[:, :, None], score, layers.MASKED)
    weights = jax.nn.softmax(score, axis=-1).astype(tables.value.dtype)
    mixed = jnp.einsum("bghs,bhcs->bghc", weights, tables.value)
    return mixed.reshape(*slots.shape, mixed.shape[-2] * mixed.shape[-1])


def table_logits(
    params: Params,
    config: PolicyConfig,
    context: PointerContext,
    tables: Tables,
    state: TableState,
    *,
    group_index: ArrayLike,
) -> tuple[Float[Array, "b m"], Cache]:
    """Computes the pointer logits after the g tokens of the current group.

    The tokens of a group are chosen by the logits of one step. All of them are then fed back as
    queries, and the last of these queries gives the logits that the next group is chosen by.

    Args:
        params: policy weights.
        config: policy configuration.
        context: arrays that `pointer_init` computed from the memory.
        tables: result of `build_tables`.
        state: state of the episode.
        group_index: number of groups that were chosen before the current group.

    Returns:
        A tuple (logits, cache). logits: [b, m] unmasked logits of the memory slots. cache: the KV
        caches of the layers after the first, with the keys and values of the current group.
    """
    if config.decoder_layers == 1:
        return _one_layer_logits(tables, state), ()
    wide_dtype = layers.score_dtype(tables.query.dtype)
    weights, slots, dtype = params["decoder"], state.slots, tables.query.dtype
    # A query does not attend to slots of its group that were chosen after it.
    position = jnp.arange(slots.shape[1])
    one_hot = slots[..., None] == jnp.arange(state.visited.shape[1])
    is_later = jnp.any((position > position[:, None])[..., None] & one_hot[:, None], axis=2)
    mixed = _mix_history(tables, slots, state.visited[:, None] & ~is_later)
    x = jnp.einsum("bge,de->bgd", mixed, tables.out, preferred_element_type=wide_dtype)
    x = (take_rows(tables.residual, slots) + x).astype(dtype)
    x = finish_layer(weights["layer_0"], config, context, 0, x)
    first = group_index * slots.shape[1]
    skip = slots.shape[1] - 1  # the dummy queries of the first group
    cache = []
    for i in range(1, config.decoder_layers - 1):
        layer, history = weights[f"layer_{i}"], state.cache[i - 1]
        x, history = decoder_layer(
            layer, config, context, i, x, history=history, first=first, skip=skip
        )
        cache.append(history)
    pointer_weights = weights["pointer"]["history"]
    x, history = history_attention(pointer_weights, config, x, state.cache[-1], first, skip)
    unit = layers.layer_norm({"scale": 1.0}, x[:, -1])
    logits = _exact_einsum("bd,bmd->bm", unit, tables.key, preferred_element_type=wide_dtype)
    return logits + tables.offset, (*cache, history)


def _one_layer_logits(tables: Tables, state: TableState) -> Float[Array, "b m"]:
    """Computes the pointer logits of a decoder with one layer: l = (z P) / sigma(z) + c.

    z is the query plus its attention over the history, centered over the width, and sigma(z) its
    standard deviation. P and c are the folded keys and offsets of `Tables`. z P is the sum of a
    table row, for the query, and a product with the mixed values of the history.

    Args:
        tables: result of `build_tables`.
        state: state of the episode; only the last slot of the group is a query.

    Returns:
        [b, m] unmasked logits of the memory slots, in at least float32.
    """
    dtype = layers.score_dtype(tables.query.dtype)
    slots = state.slots[:, -1:]
    mixed = _mix_history(tables, slots, state.visited[:, None])[:, 0]
    residual = take_rows(tables.residual, slots)[:, 0]
    z = residual + jnp.einsum("be,de->bd", mixed, tables.out, preferred_element_type=dtype)
    if tables.row_logit is None:
        logits = _exact_einsum("bd,bmd->bm", residual, tables.key, preferred_element_type=dtype)
    else:
        logits = take_rows(tables.row_logit, slots)[:, 0]
    logits += _exact_einsum("be,bme->bm", mixed, tables.mixed_logit, preferred_element_type=dtype)
    inverse_std = jax.lax.rsqrt(jnp.mean(z**2, axis=-1, keepdims=True) + layers.NORM_EPSILON)
    return logits * inverse_std + tables.offset
