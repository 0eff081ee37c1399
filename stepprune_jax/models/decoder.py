"""The Llama language model in stages of layers, as pure functions over stacked weights.

Touvron and others, "Llama 2" (https://arxiv.org/abs/2307.09288): pre-norm blocks with rotary
positions (https://arxiv.org/abs/2104.09864), grouped key heads and gated MLPs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.config import LlamaConfig
from stepprune_jax.models.layers import (
    BlockOutput,
    RmsNorm,
    Segment,
    Tap,
    append_slots,
    attend,
    attention_weights,
    check_attention,
    checkpoint_layer,
    fused_attend,
    merge_heads,
    resolve_taps,
    scan_layers,
    split_heads,
    take_layer,
)
from stepprune_jax.models.rotary import rotary, rotate

TAP_KINDS = ("hidden", "attention", "keys")


class Cache(NamedTuple):
    """Keys and values of one stage of layers; slots from `length` on are never read.

    Attributes:
        key: [layers, b, h_kv, capacity, c], after rotary positions.
        value: [layers, b, h_kv, capacity, c].
        length: [b] int32 filled slots of each row; the next token is written there.
        next_position: [b] int32 position id of the next token.
    """

    key: Float[Array, "layers b g capacity c"]
    value: Float[Array, "layers b g capacity c"]
    length: Int[Array, "b"]
    next_position: Int[Array, "b"]


class Stage(NamedTuple):
    """Result of running a stage of layers.

    Attributes:
        hidden: [b, s, e] the residual stream after the last block run, not normalised.
        cache: this stage's keys and values, or None if none was asked for.
        taps: intermediates by name.
    """

    hidden: Float[Array, "b s e"]
    cache: Cache | None
    taps: dict[str, Array]


class Context(NamedTuple):
    """What every block of a stage reads besides its weights and the residual stream.

    Attributes:
        cosine: [b, s, c] of the rotary angles.
        sine: [b, s, c] likewise.
        mask: [b, s, s] which of the stage's own tokens each attends to.
        cached_mask: [b, 1, capacity] which cached slots are filled, or None without a cache.
    """

    cosine: Float[Array, "b s c"]
    sine: Float[Array, "b s c"]
    mask: Bool[Array, "b s s"]
    cached_mask: Bool[Array, "b 1 capacity"] | None


class LlamaAttention(nn.Module):
    """Causal attention with rotary positions and grouped key heads, optionally over a cache."""

    config: LlamaConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b s e"],
        context: Context,
        cached: tuple[Array, Array] | None = None,
        attention: str = "matmul",
    ) -> BlockOutput:
        """Returns the projected result as `hidden`, with queries, keys and values."""
        config = self.config
        counts = {"query": config.num_heads, "key": config.num_kv_heads}
        counts["value"] = config.num_kv_heads
        query, key, value = (
            split_heads(nn.Dense(heads * config.head_dim, use_bias=False, name=name)(x), heads)
            for name, heads in counts.items()
        )
        query, key = (rotate(y, context.cosine, context.sine) for y in (query, key))
        if attention == "matmul" or cached is not None:
            own = Segment(key, value, context.mask)
            past = [] if cached is None else [Segment(*cached, context.cached_mask)]
            mixed = attend(query, [*past, own])
        else:
            mixed = fused_attend(query, key, value, causal=True, implementation=attention)
        mixed = nn.Dense(config.hidden_size, use_bias=False, name="out")(merge_heads(mixed))
        return BlockOutput(mixed, query, key, value)


class LlamaMlp(nn.Module):
    """Gated MLP."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: Float[Array, "b s e"]) -> Float[Array, "b s e"]:
        """Applies the MLP."""
        gate, up = (
            nn.Dense(self.config.intermediate_size, use_bias=False, name=name)(x)
            for name in ("gate", "up")
        )
        return nn.Dense(self.config.hidden_size, use_bias=False, name="down")(
            jax.nn.silu(gate) * up
        )


class LlamaBlock(nn.Module):
    """One pre-norm block."""

    config: LlamaConfig

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "b s e"],
        context: Context,
        cached: tuple[Array, Array] | None = None,
        attention: str = "matmul",
    ) -> BlockOutput:
        """Runs the block on [b, s, e]; `cached` are this layer's earlier keys and values."""
        eps = self.config.rms_norm_eps
        mixed = LlamaAttention(self.config, name="attention")(
            RmsNorm(eps, name="norm1")(hidden), context, cached, attention
        )
        hidden = hidden + mixed.hidden
        hidden = hidden + LlamaMlp(self.config, name="mlp")(RmsNorm(eps, name="norm2")(hidden))
        return mixed._replace(hidden=hidden)


def init_language(key: Array, config: LlamaConfig) -> dict[str, Any]:
    """Random float32 weights of the language model.

    Args:
        key: PRNG key; consumed.
        config: the model's shape.

    Returns:
        The tree under "language" of the whole model's parameters; no "head" when tied.
    """
    embed_key, head_key, layers_key = jax.random.split(key, 3)
    e, v, c = config.hidden_size, config.vocab_size, config.head_dim
    ones = jnp.ones((1, 1, c))
    context = Context(ones, ones, jnp.ones((1, 1, 1), bool), None)
    block, sample = LlamaBlock(config), jnp.zeros((1, 1, e))
    params = {
        "embed": {"embedding": jax.random.normal(embed_key, (v, e)) * 0.02},
        "norm": {"scale": jnp.ones(e)},
        "layers": jax.vmap(lambda k: block.init(k, sample, context)["params"])(
            jax.random.split(layers_key, config.num_layers)
        ),
    }
    if not config.tie_embeddings:
        params["head"] = {"kernel": jax.random.normal(head_key, (e, v)) * e**-0.5}
    return params


def _extended(
    cache: Cache | None, key: Array, value: Array, position: Array, valid: Array
) -> Cache:
    """A new cache of [layers, b, h_kv, s, c], or one that they are appended to.

    Each row is written at its own length; what lies beyond the capacity is lost.
    """
    count = valid.sum(-1, dtype=jnp.int32)
    following = jnp.where(valid, position + 1, 0).max(-1).astype(jnp.int32)
    if cache is None:
        return Cache(key, value, count, following)
    slots = cache.length[:, None] + jnp.arange(key.shape[3])
    key, value = append_slots(cache.key, key, slots), append_slots(cache.value, value, slots)
    following = jnp.maximum(following, cache.next_position)
    return Cache(key, value, cache.length + count, following)


def _collect_taps(
    named: dict[str, tuple[str, int]],
    states: dict[int, Array],
    outputs: dict[int, BlockOutput],
    segments: dict[int, list[Segment]],
    query_index: Array | None,
) -> dict[str, Array]:
    """Forms the named intermediates from what the scan was cut for."""
    found = {}
    for name, (kind, at) in named.items():
        if kind == "hidden":
            found[name] = states[at]
        elif kind == "keys":
            found[name] = outputs[at].key
        else:
            rows = query_index[:, None, :, None]
            query = jnp.take_along_axis(outputs[at].query, rows, axis=2)
            chosen = [
                s
                if s.mask.shape[1] == 1
                else s._replace(mask=jnp.take_along_axis(s.mask, query_index[..., None], axis=1))
                for s in segments[at]
            ]
            found[name] = attention_weights(query, chosen)
    return found


def run_layers(
    params: dict[str, Any],
    config: LlamaConfig,
    hidden: Float[Array, "b s e"],
    position: Int[Array, "b s"],
    valid: Bool[Array, "b s"],
    first: int,
    last: int,
    cache: Cache | None = None,
    capacity: int | None = None,
    taps: Sequence[Tap] = (),
    query_index: Int[Array, "b q"] | None = None,
    remat: bool = False,
    attention: str = "matmul",
    segment: Int[Array, "b s"] | None = None,
) -> Stage:
    """Runs blocks first to last - 1 as one stage with its own length and its own cache.

    Args:
        params: the language model's weights; the stack is indexed, never sliced.
        config: the model's shape.
        hidden: [b, s, e] residual stream entering block `first`.
        position: [b, s] int32 position ids.
        valid: [b, s] True = token. Must be a prefix of each row when a cache is made or extended
            and for the fused kernels, which see the causal order only.
        first: first block.
        last: block to stop before.
        cache: this stage's earlier keys and values, to attend to and to extend.
        capacity: slots of a cache to be made, at least s; None makes none.
        taps: "hidden" [b, s, e] (first <= layer <= last); "attention": float32 softmax weights of
            the queries at `query_index`, heads kept, [b, h, q, t], t the cache's slots (if any)
            and then the s own; "keys" [b, h_kv, s, c] after rotary positions.
        query_index: [b, q] indices into s, for "attention" taps.
        remat: recompute blocks in the backward pass instead of storing their intermediates.
        attention: "matmul", or "xla" or "cudnn" where there is no cache to read.
        segment: [b, s] packs several continuations of one prefix into a row: tokens see those of
            segment 0 and of their own. Needs "matmul" and no cache.

    Returns:
        A `Stage`.

    Raises:
        ValueError: layers, taps, capacity or attention that do not exist or do not fit.
    """
    check_attention(attention)
    if not 0 <= first < last <= config.num_layers:
        raise ValueError(f"layers [{first}:{last}] of {config.num_layers} do not exist")
    if capacity is not None and (cache is not None or capacity < hidden.shape[1]):
        raise ValueError(
            f"capacity {capacity} for {hidden.shape[1]} tokens: give it only where a cache is "
            "made, and at least as large as the sequence"
        )
    if cache is not None and cache.key.shape[0] != last - first:
        raise ValueError(
            f"the cache holds {cache.key.shape[0]} layers, the stage [{first}:{last}] "
            f"{last - first}"
        )
    if segment is not None and (attention != "matmul" or cache is not None or capacity is not None):
        raise ValueError('segments need attention="matmul" and neither cache nor capacity')
    named = resolve_taps(taps, config.num_layers, TAP_KINDS)
    for name, (kind, at) in named.items():
        if not first <= at < last + (kind == "hidden"):
            raise ValueError(f"tap {name} is outside the stage [{first}:{last}]")
        if kind == "attention" and query_index is None:
            raise ValueError(f"tap {name} needs query_index")
    return _run_stage(
        params, config, hidden, position, valid, (first, last), cache, capacity, named,
        query_index, remat, attention, segment,
    )  # fmt: skip


def _run_stage(
    params, config, hidden, position, valid, span, cache, capacity, named, query_index, remat,
    attention, segment,
):  # fmt: skip
    """`run_layers` after its checks; `span` are the first layer and the one to stop before."""
    (first, last), (b, s, _) = span, hidden.shape
    block, stack = LlamaBlock(config), params["layers"]
    seen = jnp.tril(jnp.ones((s, s), bool)) & valid[:, None]
    if segment is not None:
        seen &= (segment[:, None] == 0) | (segment[:, None] == segment[..., None])
    cached_mask = None
    if cache is not None:
        cached_mask = (jnp.arange(cache.key.shape[3]) < cache.length[:, None])[:, None]
    context = Context(*rotary(config, position), seen, cached_mask)

    def cached_at(index):
        if cache is None:
            return None
        return take_layer((cache.key, cache.value), index - first)

    def layer(hidden, index):
        weights = take_layer(stack, index)
        return block.apply({"params": weights}, hidden, context, cached_at(index), attention)

    layer = checkpoint_layer(layer, remat)

    def body(carry, index):
        hidden, written = carry
        output = layer(hidden, index)
        if written is not None:
            # Written in place layer by layer: stacking scan outputs would need padding afterwards,
            # and so a second copy of the cache.
            start = (index - first, 0, 0, 0, 0)
            written = tuple(
                jax.lax.dynamic_update_slice(buffer, new[None], start)
                for buffer, new in zip(written, (output.key, output.value), strict=True)
            )
        return (output.hidden, written), output

    written = None
    if cache is not None or capacity is not None:
        slots = s if capacity is None else capacity
        shape = (last - first, b, config.num_kv_heads, slots, config.head_dim)
        written = (jnp.zeros(shape, hidden.dtype), jnp.zeros(shape, hidden.dtype))
    cuts = [at for kind, at in named.values() if kind == "hidden"]
    watched = [at for kind, at in named.values() if kind != "hidden"]
    carry, outputs, carries = scan_layers(body, (hidden, written), first, last, watched, cuts)

    segments = {}
    for at, output in outputs.items():
        past = [] if cache is None else [Segment(*cached_at(at), cached_mask)]
        segments[at] = [*past, Segment(output.key, output.value, context.mask)]
    states = {at: carry[0] for at, carry in carries.items()}
    found = _collect_taps(named, states, outputs, segments, query_index)
    if written is not None:
        cache = _extended(cache, *carry[1], position, valid)
    return Stage(carry[0], cache, found)


def embed(params: dict[str, Any], ids: Int[Array, "*b l"]) -> Float[Array, "*b l e"]:
    """Embeddings of token ids; negative ids (image places) get that of id 0, to be replaced."""
    return jnp.take(params["embed"]["embedding"], jnp.maximum(ids, 0), axis=0, mode="clip")


def final_norm(
    params: dict[str, Any], config: LlamaConfig, hidden: Float[Array, "*b e"]
) -> Float[Array, "*b e"]:
    """The norm after the last block, usable on any hidden state."""
    return RmsNorm(config.rms_norm_eps).apply({"params": params["norm"]}, hidden)


def logits(
    params: dict[str, Any], config: LlamaConfig, hidden: Float[Array, "*b e"]
) -> Float[Array, "*b v"]:
    """Final norm and output head.

    Args:
        params: the language model's weights.
        config: the model's shape.
        hidden: [..., e] output of the last block.

    Returns:
        [..., v] float32 logits.
    """
    hidden = final_norm(params, config, hidden)
    if config.tie_embeddings:
        kernel, axis = params["embed"]["embedding"], 1
    else:
        kernel, axis = params["head"]["kernel"], 0
    rows = hidden.reshape(-1, hidden.shape[-1])
    if rows.shape[0] == 1 and kernel.dtype != jnp.float32:
        # With one row it would be a matrix-vector product, for which XLA widens all of the kernel
        # to float32 on a CPU: ten times the work. With two rows it does not.
        rows = jnp.broadcast_to(rows, (2, rows.shape[1]))
    dims = (((1,), (axis,)), ((), ()))
    result = jax.lax.dot_general(rows, kernel, dims, preferred_element_type=jnp.float32)
    return result[: hidden[..., 0].size].reshape(*hidden.shape[:-1], -1)
