"""A Llama-like language model in stages of layers, as pure functions over stacked weights.

Touvron et al., "Llama 2" (https://arxiv.org/abs/2307.09288): pre-norm blocks with rotary positions
(https://arxiv.org/abs/2104.09864), grouped key heads and gated MLPs. Biases of queries, keys and
values, their norms, and several position ids per token are options of the configuration.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.attention import (
    STATES,
    Segment,
    Tap,
    append_slots,
    attend,
    attention_scores,
    resolve_taps,
    self_attend,
)
from stepprune_jax.models.config import LlamaConfig
from stepprune_jax.models.layers import (
    BlockOutput,
    Dense,
    GatedMlp,
    RmsNorm,
    side_by_side,
    wide_product,
)
from stepprune_jax.models.rotary import rotary, rotate
from stepprune_jax.models.sequence import Rows
from stepprune_jax.models.stack import (
    Execution,
    Params,
    checkpoint_layer,
    run_stack,
    take_layer,
)
from stepprune_jax.policy.layers import merge_heads, split_heads
from stepprune_jax.user_input import naming, require

TAP_KINDS = ("hidden", "normed", "attention", "scores", "keys", "mlp_input", "rotary")
_BY_QUERY = ("attention", "scores")


class OutputSpec(NamedTuple):
    """Results of a stage of layers that are returned in addition to its hidden states.

    Attributes:
        capacity: slots of a new cache, at least s; None creates none.
        taps: "hidden" [b, s, e] before a layer of the stage or after its last; "normed" [b, s, e]
            the same after the model's final norm; "mlp_input" [b, s, e] input of the block's MLP;
            "attention": float32 softmax weights of the queries at `query_index`, per head, [b, h,
            q, s], over the stage's own slots, also of the block after the stage; "scores" their
            logits; "keys" [b, h_kv, s, c] after rotary positions; "rotary" [2, b, s, c] cosine and
            sine of the angles, the same for every layer.
        query_index: [b, q] indices into s, for "attention" and "scores" taps.
    """

    capacity: int | None = None
    taps: Sequence[Tap] = ()
    query_index: Int[Array, "b q"] | None = None


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
        cache: this stage's keys and values, or None if not requested.
        taps: intermediates by name.
    """

    hidden: Float[Array, "b s e"]
    cache: Cache | None
    taps: dict[str, Array]


class LayerInputs(NamedTuple):
    """Inputs shared by all blocks of a stage: angles, and masks of its tokens and cached slots."""

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
        context: LayerInputs,
        cached: tuple[Array, Array] | None = None,
        attention: str = "matmul",
    ) -> BlockOutput:
        """Returns the projected result as `hidden`, with queries, keys and values."""
        config = self.config
        heads, kv_heads, c = config.num_heads, config.num_kv_heads, config.head_dim
        bias = config.qkv_bias
        widths = {"query": heads * c, "key": kv_heads * c, "value": kv_heads * c}
        parts = side_by_side(self, x, widths, bias)
        parts = [split_heads(part, part.shape[-1] // c) for part in parts]
        if len(parts) == 1 and config.qk_norm:
            parts = jnp.split(parts[0], [heads, heads + kv_heads], axis=1)
        if len(parts) == 1:  # joined: queries and keys are also rotated by one kernel
            turned, value = jnp.split(parts[0], [heads + kv_heads], axis=1)
            turned = rotate(turned, context.cosine, context.sine)
            query, key = jnp.split(turned, [heads], axis=1)
        else:
            query, key, value = parts
            if config.qk_norm:
                query = RmsNorm(config.rms_norm_eps, name="query_norm")(query)
                key = RmsNorm(config.rms_norm_eps, name="key_norm")(key)
            query = rotate(query, context.cosine, context.sine)
            key = rotate(key, context.cosine, context.sine)
        if attention == "matmul" or cached is not None:
            past = [] if cached is None else [Segment(*cached, context.cached_mask)]
            mixed = attend(query, [*past, Segment(key, value, context.mask)])
        else:
            mixed = self_attend(query, key, value, True, attention)
        mixed = Dense(config.hidden_size, use_bias=False, name="out")(merge_heads(mixed))
        return BlockOutput(mixed, query, key, value)


class LlamaBlock(nn.Module):
    """One pre-norm block."""

    config: LlamaConfig

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "b s e"],
        context: LayerInputs,
        cached: tuple[Array, Array] | None = None,
        attention: str = "matmul",
    ) -> BlockOutput:
        """Runs the block on [b, s, e]; `cached` are this layer's earlier keys and values."""
        eps = self.config.rms_norm_eps
        mixed = LlamaAttention(self.config, name="attention")(
            RmsNorm(eps, name="norm1")(hidden), context, cached, attention
        )
        hidden = hidden + mixed.hidden
        mlp_input = RmsNorm(eps, name="norm2")(hidden)
        hidden = hidden + GatedMlp(self.config.intermediate_size, False, name="mlp")(mlp_input)
        return mixed._replace(hidden=hidden, mlp_input=mlp_input)


def init_language(key: Array, config: LlamaConfig) -> Params:
    """Draws float32 weights of the language model; without "head" if it is tied."""
    embed_key, head_key, layers_key = jax.random.split(key, 3)
    e, v, c = config.hidden_size, config.vocab_size, config.head_dim
    ones = jnp.ones((1, 1, c))
    context = LayerInputs(ones, ones, jnp.ones((1, 1, 1), bool), None)
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


def init_cache(
    config: LlamaConfig, num_layers: int, batch_size: int, capacity: int, dtype: DTypeLike
) -> Cache:
    """Creates an empty cache of a stage, with `capacity` slots in each row."""
    shape = (num_layers, batch_size, config.num_kv_heads, capacity, config.head_dim)
    none = jnp.zeros(batch_size, jnp.int32)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), none, none)


def _write_layer(cache: Cache, layer: Int[Array, ""] | int, output: BlockOutput) -> Cache:
    """Writes a layer's keys and values to the first slots.

    In place, layer by layer: stacking the outputs of a scan would need padding afterwards, and so a
    second copy of the cache.
    """
    start = (layer, 0, 0, 0, 0)
    key = jax.lax.dynamic_update_slice(cache.key, output.key[None], start)
    value = jax.lax.dynamic_update_slice(cache.value, output.value[None], start)
    return cache._replace(key=key, value=value)


def _extend(cache: Cache | None, new: Cache, rows: Rows, hidden: Float[Array, "b s e"]) -> Cache:
    """Appends new keys and values to an earlier cache, if there is one, and updates its length.

    Each row is written at its own length; tokens beyond the capacity are dropped.
    """
    count = rows.valid.sum(-1, dtype=jnp.int32)
    ids = rows.position.reshape(len(count), -1, rows.valid.shape[1])
    following = jnp.where(rows.valid[:, None], ids + 1, 0).max((1, 2)).astype(jnp.int32)
    if cache is None:
        return Cache(new.key, new.value, count, following)
    slots = cache.length[:, None] + jnp.arange(new.key.shape[3])
    # Adds 0, or 1 for NaN: the compiler cannot know which, and so writes the cache after the last
    # layer has read it. Otherwise XLA would copy all of it first on a CPU.
    slots += hidden[:, :1, 0] != hidden[:, :1, 0]
    return Cache(
        append_slots(cache.key, new.key, slots),
        append_slots(cache.value, new.value, slots),
        cache.length + count,
        jnp.maximum(following, cache.next_position),
    )


def _make_context(config: LlamaConfig, rows: Rows, cache: Cache | None) -> LayerInputs:
    s = rows.valid.shape[1]
    mask = jnp.tril(jnp.ones((s, s), bool)) & rows.valid[:, None]
    if rows.segment is not None:
        mask &= (rows.segment[:, None] == 0) | (rows.segment[:, None] == rows.segment[..., None])
    cached_mask = None
    if cache is not None:
        cached_mask = (jnp.arange(cache.key.shape[3]) < cache.length[:, None])[:, None]
    return LayerInputs(*rotary(config, rows.position), mask, cached_mask)


def _attention_rows(
    output: BlockOutput, context: LayerInputs, query_index: Int[Array, "b q"]
) -> Float[Array, "b h q s"]:
    """Computes the attention logits of a block's queries at some slots."""
    query = jnp.take_along_axis(output.query, query_index[:, None, :, None], axis=2)
    mask = jnp.take_along_axis(context.mask, query_index[..., None], axis=1)
    return attention_scores(query, [Segment(output.key, output.value, mask)])


def _attention_before(
    params: Params,
    config: LlamaConfig,
    hidden: Float[Array, "b s e"],
    context: LayerInputs,
    layer: int,
) -> BlockOutput:
    """Computes queries and keys of the next block, without running the rest of it."""
    weights = take_layer(params["layers"], layer)
    normed = RmsNorm(config.rms_norm_eps).apply({"params": weights["norm1"]}, hidden)
    attention = LlamaAttention(config)
    return cast(BlockOutput, attention.apply({"params": weights["attention"]}, normed, context))


def _add_deep(
    hidden: Float[Array, "b s e"], deep: Float[Array, "b s L e"] | None, layer: Array | int
) -> Float[Array, "b s e"]:
    """Adds the deep features that belong behind a layer, if there are any."""
    if deep is None:
        return hidden
    deep, count = deep.astype(hidden.dtype), deep.shape[2]
    if isinstance(layer, int):
        return hidden + deep[:, :, layer] if layer < count else hidden
    own = jax.lax.dynamic_index_in_dim(deep, jnp.minimum(layer, count - 1), 2, keepdims=False)
    return hidden + jnp.where(layer < count, own, 0)


def run_layers(
    params: Params,
    config: LlamaConfig,
    rows: Rows,
    span: tuple[int, int],
    cache: Cache | None = None,
    wanted: OutputSpec = OutputSpec(),
    execution: Execution = Execution(),
) -> Stage:
    """Runs some blocks as one stage with its own length and its own cache.

    Args:
        params: the language model's weights; see `stack` for the layout of layers.
        config: the model's shape.
        rows: inputs of block `span[0]`.
        span: first block, and the block to stop before.
        cache: this stage's earlier keys and values, to attend to and to extend.
        wanted: additional results.
        execution: how the blocks are run.

    Returns:
        A `Stage`.

    Raises:
        ValueError: taps that do not exist, or unsuitable segments.
    """
    hidden, (first, last), capacity = rows.hidden, span, wanted.capacity
    b, s, _ = hidden.shape
    plain = execution.attention == "matmul" and cache is None and capacity is None
    require(rows.segment is None or plain, "segments need plain attention and no cache")
    named = resolve_taps(wanted.taps, config.num_layers, TAP_KINDS)
    for name, (kind, at) in named.items():
        beyond = kind in (*STATES, *_BY_QUERY)
        queries = kind not in _BY_QUERY or wanted.query_index is not None
        with naming(f"tap {name}"):
            require(first <= at < last + beyond, f"outside the stage {span}")
            require(queries, "needs query_index")
    context = _make_context(config, rows, cache)
    new = None
    if cache is not None or capacity is not None:
        slots = s if capacity is None else capacity
        new = init_cache(config, last - first, b, slots, hidden.dtype)
    block = LlamaBlock(config)

    def layer(hidden, index):
        if rows.probe is not None:
            at = jnp.arange(b), rows.valid.sum(1) - 1
            hidden = hidden.at[at].add(rows.probe[index].astype(hidden.dtype))
        weights = {"params": take_layer(params["layers"], index)}
        cached = None if cache is None else take_layer((cache.key, cache.value), index - first)
        output = cast(
            BlockOutput, block.apply(weights, hidden, context, cached, execution.attention)
        )
        return output._replace(hidden=_add_deep(output.hidden, rows.deep, index))

    layer = checkpoint_layer(layer, execution.remat)

    def body(carry, index):
        hidden, new = carry
        output = layer(hidden, index)
        if new is not None:
            new = _write_layer(new, index - first, output)
        return (output.hidden, new), output

    cuts = [at for kind, at in named.values() if kind in STATES]
    of_block = (*_BY_QUERY, "keys", "mlp_input")
    watched = [at for kind, at in named.values() if kind in of_block and at < last]
    (hidden, new), outputs, carries = run_stack(
        params["layers"], body, (hidden, new), span, watched, cuts
    )

    tapped = {}
    for name, (kind, at) in named.items():
        if kind == "hidden":
            tapped[name] = carries[at][0]
        elif kind == "normed":
            tapped[name] = final_norm(params, config, carries[at][0])
        elif kind == "keys":
            tapped[name] = outputs[at].key
        elif kind == "mlp_input":
            tapped[name] = outputs[at].mlp_input
        elif kind == "rotary":
            tapped[name] = jnp.stack([context.cosine, context.sine])
        else:
            assert wanted.query_index is not None
            if at == last:
                output = _attention_before(params, config, hidden, context, last)
            else:
                output = outputs[at]
            found = _attention_rows(output, context, wanted.query_index)
            tapped[name] = found if kind == "scores" else jax.nn.softmax(found, axis=-1)
    if new is not None:
        new = _extend(cache, new, rows, hidden)
    return Stage(hidden, new, tapped)


def embed(params: Params, ids: Int[Array, "*b l"]) -> Float[Array, "*b l e"]:
    """Embeds token ids; negative ids (image places) get the embedding of id 0, to be replaced."""
    return jnp.take(params["embed"]["embedding"], jnp.maximum(ids, 0), axis=0, mode="clip")


def final_norm(
    params: Params, config: LlamaConfig, hidden: Float[Array, "*b e"]
) -> Float[Array, "*b e"]:
    """Applies the norm after the last block, to any hidden state."""
    return cast(Array, RmsNorm(config.rms_norm_eps).apply({"params": params["norm"]}, hidden))


def logits(
    params: Params, config: LlamaConfig, hidden: Float[Array, "*b e"]
) -> Float[Array, "*b v"]:
    """Applies the final norm and the output head.

    Args:
        params: the language model's weights.
        config: the model's shape.
        hidden: [..., e] output of the last block.

    Returns:
        [..., v] float32 logits.
    """
    hidden = final_norm(params, config, hidden)
    if "head" not in params:  # it is tied
        return wide_product(hidden, params["embed"]["embedding"], axis=1)
    return wide_product(hidden, params["head"]["kernel"])
