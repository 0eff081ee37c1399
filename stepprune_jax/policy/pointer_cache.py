"""Tables over slots: pointer logits without the products that depend on the slots alone.

With the chosen slot itself fed back, each query is an image slot or the start, so the m = n + 1
queries that an episode can have are known in advance. Attention over a history has no positions:
the first layer's output for a query depends on the *set* of slots chosen so far. So the attention
of each slot to each other one is computed once per episode, and a step reads one row of that table,
masked by the set.

With one decoder layer the pointer comes next, whose logits are LN(z) W_q k_j / sqrt(d) with
z = x_i + W_o mixed + b_o. Its projection and the norm's scale are folded into the keys,
P_j = scale (W_q k_j) / sqrt(d), and the norm's bias into an offset c_j. The norm's mean drops out
if x, W_o and b_o are centred over the width: l = (z P) / sigma(z) + c. So x_i P is a table over
pairs, too, and W_o P one matrix, and a step is a masked softmax, three products with a vector, and
an argmax. With more layers only the first history is a table, and the pointer has the folded keys.

Where an episode has far fewer steps than slots, which are many, the two tables over pairs of slots
would cost more than they save: a step then computes the row that it reads.

The logits equal those of `pointer_step` up to rounding. In both, equal slots have equal logits as
far as the device's matrix products give equal columns for equal inputs.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
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
_exactly = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Tables(NamedTuple):
    """Tables computed once per episode; `None` where only one decoder layer has them.

    q and s run over the slots, with the start in place of the stop. `query` embeds each slot as a
    query, `residual` adds the output bias of the first history and `out` is its projection; `score`
    and `value` are its attention logits and contributions; `key` and `offset` fold the pointer's
    norm and projection; `row_logit` and `mixed_logit` are key times residual and key times out.
    Instead of `score` and `row_logit` there may be `ask` and `answer`, the first history's queries
    and keys. Tables read row by row are at least float32; those that each step reads as a whole,
    and these two, have the compute dtype.
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
    ask: Float[Array, "b q h c"] | None = None
    answer: Float[Array, "b h c s"] | None = None


class Walk(NamedTuple):
    """State of an episode: slots of the next queries, in order of choice, and those that were one.

    The cache holds the histories of the layers after the first.
    """

    at: Int[Array, "b g"]
    seen: Bool[Array, "b q"]
    cache: Cache


def _centred(x: Array) -> Array:
    return x - jnp.mean(x, axis=-1, keepdims=True)


def table_bytes(config: PolicyConfig, slots: int, dtype: DTypeLike = jnp.float32) -> int:
    """Returns the bytes of a row's tables over pairs of slots, for activations of `dtype`."""
    return layers.score_dtype(jnp.dtype(dtype)).itemsize * slots**2 * (config.num_heads + 1)


def tabulates_pairs(slots: int, steps: int) -> bool:
    """Returns whether an episode of `steps` steps computes its tables over pairs of slots."""
    return slots <= layers.MANY_QUERIES or 4 * steps > slots


def tabulate(
    params: Params,
    config: PolicyConfig,
    context: PointerContext,
    memory: Float[Array, "b m d"],
    start: Float[Array, "b d"],
    steps: int,
) -> Tables:
    """Computes the tables of an episode of `steps` steps from its slots and its first query.

    m^2 (h + 1) + m (5 d + 1) + d^2 numbers per row with one decoder layer; without the square where
    steps are few.
    """
    weights, dtype, wide = params["decoder"], memory.dtype, layers.score_dtype(memory.dtype)
    pointer, direct = weights["pointer"], config.decoder_layers == 1
    history = (pointer if direct else weights["layer_0"])["history"]
    x = memory.at[:, -1].set(start)
    y = layers.layer_norm(history["norm"], x)
    q, k, v = (
        layers.split_heads(layers.dense(history["attention"][name], y), config.num_heads)
        for name in ("query", "key", "value")
    )
    pairs = tabulates_pairs(memory.shape[1], steps)
    score = None
    if pairs:
        score = jnp.einsum("bhqc,bhsc->bqhs", q, k, preferred_element_type=wide)
        score = score / math.sqrt(q.shape[-1])
    projection = history["attention"]["out"]
    out = projection["kernel"].astype(dtype).astype(wide)
    residual = x.astype(wide) + projection["bias"].astype(dtype).astype(wide)
    if direct:
        residual, out = _centred(residual), _centred(out)
    keys = context.pointer_key / math.sqrt(memory.shape[-1])
    folded = pointer["query"]["kernel"].astype(dtype)
    unscaled = jnp.einsum("bme,de->bmd", keys, folded, preferred_element_type=wide)
    key = unscaled * pointer["norm"]["scale"]
    offset = _exactly("bmd,d->bm", unscaled, pointer["norm"]["bias"].astype(wide))
    row_logit = mixed_logit = None
    if direct:
        row_logit = _exactly("bqd,bmd->bqm", residual, key) if pairs else None
        mixed_logit = _exactly("bmd,ed->bme", key, out).astype(dtype)
    return Tables(
        query=x,
        score=score,
        value=v.swapaxes(-1, -2),
        residual=residual,
        out=out.T.astype(dtype),
        key=key.astype(dtype),
        offset=offset,
        row_logit=row_logit,
        mixed_logit=mixed_logit,
        ask=None if pairs else q.swapaxes(1, 2),
        answer=None if pairs else k.swapaxes(-1, -2),
    )


def start_walk(config: PolicyConfig, tables: Tables, steps: int, group: int) -> Walk:
    """Returns the state at the start of an episode of `steps` steps, taken `group` at a time."""
    b, m, _ = tables.query.shape
    # The first step has one query. Those before it are dummies, in rows that are never seen.
    past = empty_history(config, tables.query, steps + group - 1)
    return Walk(
        at=jnp.full((b, group), m - 1, jnp.int32),
        seen=jnp.zeros((b, m), bool).at[:, -1].set(True),
        cache=(past,) * (config.decoder_layers - 1),
    )


def take_rows(table: Float[Array, "b q *x"], at: Int[Array, "b g"]) -> Float[Array, "b g *x"]:
    """Gathers the rows of some slots."""
    at = at.reshape(at.shape + (1,) * (table.ndim - 2))
    return jnp.take_along_axis(table, at, axis=1, mode="promise_in_bounds")


def _mix(tables: Tables, at: Int[Array, "b g"], seen: Bool[Array, "b g q"]):
    """Computes the first layer's history before its output projection, [b, g, e]."""
    if tables.score is None:
        assert tables.ask is not None and tables.answer is not None  # either is there
        ask, wide = take_rows(tables.ask, at), layers.score_dtype(tables.ask.dtype)
        score = jnp.einsum("bghc,bhcs->bghs", ask, tables.answer, preferred_element_type=wide)
        score = score / math.sqrt(ask.shape[-1])
    else:
        score = take_rows(tables.score, at)
    score = jnp.where(seen[:, :, None], score, layers.MASKED)
    weights = jax.nn.softmax(score, axis=-1).astype(tables.value.dtype)
    mixed = jnp.einsum("bghs,bhcs->bghc", weights, tables.value)
    return mixed.reshape(*at.shape, mixed.shape[-2] * mixed.shape[-1])


def walk_logits(
    params: Params, config: PolicyConfig, context: PointerContext, tables: Tables, walk: Walk, step
) -> tuple[Float[Array, "b m"], Cache]:
    """Returns pointer logits of a walk's last query, and the cache with its queries written.

    `step` counts the steps before, each of as many tokens as `walk.at` has.
    """
    wide = layers.score_dtype(tables.query.dtype)
    if config.decoder_layers == 1:
        at, cache = walk.at[:, -1:], ()
        mixed = _mix(tables, at, walk.seen[:, None])[:, 0]
        own = take_rows(tables.residual, at)[:, 0]
        z = own + jnp.einsum("be,de->bd", mixed, tables.out, preferred_element_type=wide)
        if tables.row_logit is None:
            pointed = _exactly("bd,bmd->bm", own, tables.key, preferred_element_type=wide)
        else:
            pointed = take_rows(tables.row_logit, at)[:, 0]
        pointed += _exactly("be,bme->bm", mixed, tables.mixed_logit, preferred_element_type=wide)
        scale = jax.lax.rsqrt(jnp.mean(z**2, axis=-1, keepdims=True) + layers.NORM_EPSILON)
        return pointed * scale + tables.offset, cache
    weights, at, dtype = params["decoder"], walk.at, tables.query.dtype
    # A query does not see those of its group that were chosen after it.
    group = jnp.arange(at.shape[1])
    chosen = at[..., None] == jnp.arange(walk.seen.shape[1])
    later = jnp.any((group > group[:, None])[..., None] & chosen[:, None], axis=2)
    mixed = _mix(tables, at, walk.seen[:, None] & ~later)
    x = jnp.einsum("bge,de->bgd", mixed, tables.out, preferred_element_type=wide)
    x = (take_rows(tables.residual, at) + x).astype(dtype)
    x = finish_layer(weights["layer_0"], config, context, 0, x)
    place = (step * at.shape[1], at.shape[1] - 1)  # first row of the cache, and rows to skip
    cache = []
    for i in range(1, config.decoder_layers - 1):
        layer = weights[f"layer_{i}"]
        x, past = decoder_layer(layer, config, context, i, x, walk.cache[i - 1], *place)
        cache.append(past)
    x, past = history_attention(weights["pointer"]["history"], config, x, walk.cache[-1], *place)
    unit = layers.layer_norm({"scale": 1.0}, x[:, -1])
    pointed = _exactly("bd,bmd->bm", unit, tables.key, preferred_element_type=wide)
    return pointed + tables.offset, (*cache, past)
