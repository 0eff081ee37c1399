"""The Llama-like language model of all families, as pure functions of stacked weights.

Touvron et al., "Llama 2" (https://arxiv.org/abs/2307.09288): pre-norm blocks with rotary positions
(https://arxiv.org/abs/2104.09864), grouped key heads and gated MLPs. The configuration may add
biases of queries, keys and values, norms of queries and keys, and several position ids per token.

The model is run in stages. A stage is a span of consecutive layers with its own row length and its
own KV cache, because pruning between layers shortens the rows.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
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
    joined_dense,
    matmul_float32,
)
from stepprune_jax.models.rotary import rotary_cos_sin, rotate
from stepprune_jax.models.sequence import Rows
from stepprune_jax.models.stack import (
    Execution,
    Params,
    checkpoint_layer,
    run_stack,
    take_layer,
)
from stepprune_jax.policy.layers import merge_heads, split_heads
from stepprune_jax.user_input import UserError, naming, require

TAP_KINDS = ("hidden", "normed", "attention", "scores", "keys", "mlp_input", "rotary")
# Kinds of taps that read the attention of selected queries in a block.
_ATTENTION_KINDS = ("attention", "scores")
# Kinds of taps that read the output of a block.
_BLOCK_KINDS = (*_ATTENTION_KINDS, "keys", "mlp_input")


class OutputSpec(NamedTuple):
    """Optional outputs of `run_layers`, in addition to the hidden states.

    Attributes:
        capacity: number of slots of a new KV cache, at least the row length s; None for no new
            cache.
        taps: intermediate arrays to return, each a kind and a layer; see `Tap` for the numbers of
            layers. Axes: s slots, e channels, h heads, h_kv key heads, q queries, c channels of a
            head.
            "hidden": [b, s, e] residual stream before a layer of the stage or after its last layer.
            "normed": [b, s, e] the same as "hidden", after the model's final norm.
            "mlp_input": [b, s, e] normalized input of the block's MLP.
            "attention": [b, h, q, s] float32 softmax weights of the queries at `query_index`, over
            the slots of the stage. The block after the stage is also supported.
            "scores": [b, h, q, s] float32 logits of "attention".
            "keys": [b, h_kv, s, c] keys after rotary positions.
            "rotary": [2, b, s, c] cosine and sine of the rotary angles, the same for every layer.
        query_index: [b, q] slots (places in the row) of the q queries of "attention" and "scores"
            taps; None if there are no such taps.
    """

    capacity: int | None = None
    taps: Sequence[Tap] = ()
    query_index: Int[Array, "b q"] | None = None


class Cache(NamedTuple):
    """KV cache of one stage of layers.

    Attributes:
        key: [layers, b, h_kv, capacity, c] keys after rotary positions.
        value: [layers, b, h_kv, capacity, c] values.
        length: [b] int32 number of filled slots of each row. Later slots are never read. The next
            token is written to slot `length`.
        next_position: [b] int32 position id of the next token.
    """

    key: Float[Array, "layers b g capacity c"]
    value: Float[Array, "layers b g capacity c"]
    length: Int[Array, "b"]
    next_position: Int[Array, "b"]


class Stage(NamedTuple):
    """Result of `run_layers`.

    Attributes:
        hidden: [b, s, e] the residual stream after the last block of the stage, before any norm.
        cache: KV cache of the stage; None if no cache was given or requested.
        taps: requested intermediate arrays by name, such as "hidden.-2" for the second to last
            hidden state.
    """

    hidden: Float[Array, "b s e"]
    cache: Cache | None
    taps: dict[str, Array]


class LayerInputs(NamedTuple):
    """Inputs that all blocks of a stage share.

    Attributes:
        cosine: [b, s, c] float32 cosine of the rotary angles.
        sine: [b, s, c] float32 sine of the rotary angles.
        mask: [b, s, s] True where a token may attend to another token of the stage.
        cached_mask: [b, 1, capacity] True for filled slots of the cache; None without a cache.
    """

    cosine: Float[Array, "b s c"]
    sine: Float[Array, "b s c"]
    mask: Bool[Array, "b s s"]
    cached_mask: Bool[Array, "b 1 capacity"] | None


class LlamaAttention(nn.Module):
    """Causal attention with rotary positions and grouped key heads.

    Tokens attend to the KV cache, if one is given, and to earlier tokens of the stage.
    """

    config: LlamaConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b s e"],
        context: LayerInputs,
        cached: tuple[Array, Array] | None = None,
        attention: str = "matmul",
    ) -> BlockOutput:
        """Computes the attention of one block.

        Args:
            x: [b, s, e] normalized residual stream.
            context: rotary angles and masks.
            cached: keys and values of the layer's KV cache, each [b, h_kv, capacity, c].
            attention: see `Execution.attention`.

        Returns:
            A `BlockOutput` whose `hidden` is the projected attention output.
        """
        config = self.config
        heads, kv_heads, c = config.num_heads, config.num_kv_heads, config.head_dim
        widths = {"query": heads * c, "key": kv_heads * c, "value": kv_heads * c}
        outputs = joined_dense(self, x, widths, config.qkv_bias)
        outputs = [split_heads(output, output.shape[-1] // c) for output in outputs]
        if len(outputs) == 1 and config.qk_norm:
            outputs = jnp.split(outputs[0], [heads, heads + kv_heads], axis=1)
        if len(outputs) == 1:  # the layers are joined, so one GPU kernel rotates queries and keys
            query_key, value = jnp.split(outputs[0], [heads + kv_heads], axis=1)
            query_key = rotate(query_key, context.cosine, context.sine)
            query, key = jnp.split(query_key, [heads], axis=1)
        else:
            query, key, value = outputs
            if config.qk_norm:
                query = RmsNorm(config.rms_norm_eps, name="query_norm")(query)
                key = RmsNorm(config.rms_norm_eps, name="key_norm")(key)
            query = rotate(query, context.cosine, context.sine)
            key = rotate(key, context.cosine, context.sine)
        if attention == "matmul" or cached is not None:
            cached_segments = [] if cached is None else [Segment(*cached, context.cached_mask)]
            attended = attend(query, [*cached_segments, Segment(key, value, context.mask)])
        else:
            attended = self_attend(query, key, value, causal=True, implementation=attention)
        hidden = Dense(config.hidden_size, use_bias=False, name="out")(merge_heads(attended))
        return BlockOutput(hidden, query, key, value)


class LlamaBlock(nn.Module):
    """Pre-norm transformer block: attention, then a gated MLP, each with a residual connection."""

    config: LlamaConfig

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "b s e"],
        context: LayerInputs,
        cached: tuple[Array, Array] | None = None,
        attention: str = "matmul",
    ) -> BlockOutput:
        """Runs the block.

        Args:
            hidden: [b, s, e] residual stream.
            context: rotary angles and masks.
            cached: keys and values of the layer's KV cache, each [b, h_kv, capacity, c].
            attention: see `Execution.attention`.

        Returns:
            The residual stream after the block, with queries, keys, values and the MLP's input.
        """
        eps = self.config.rms_norm_eps
        output = LlamaAttention(self.config, name="attention")(
            RmsNorm(eps, name="norm1")(hidden), context, cached, attention
        )
        hidden = hidden + output.hidden
        mlp_input = RmsNorm(eps, name="norm2")(hidden)
        hidden = hidden + GatedMlp(self.config.intermediate_size, False, name="mlp")(mlp_input)
        return output._replace(hidden=hidden, mlp_input=mlp_input)


def init_language(key: Array, config: LlamaConfig) -> Params:
    """Initializes random float32 weights of the language model.

    Args:
        key: PRNG key; consumed.
        config: shape of the language model.

    Returns:
        Weights under "embed", "norm" and "layers", where the weights of all layers are stacked
        along a leading axis. "head" is absent if the output head shares the embeddings.
    """
    embed_key, head_key, layers_key = jax.random.split(key, 3)
    e, v, c = config.hidden_size, config.vocab_size, config.head_dim
    # The shapes of the weights do not depend on these inputs of one token.
    angles, token = jnp.ones((1, 1, c)), jnp.zeros((1, 1, e))
    context = LayerInputs(angles, angles, jnp.ones((1, 1, 1), bool), None)
    block = LlamaBlock(config)
    params = {
        "embed": {"embedding": jax.random.normal(embed_key, (v, e)) * 0.02},
        "norm": {"scale": jnp.ones(e)},
        "layers": jax.vmap(lambda key: block.init(key, token, context)["params"])(
            jax.random.split(layers_key, config.num_layers)
        ),
    }
    if not config.tie_embeddings:
        params["head"] = {"kernel": jax.random.normal(head_key, (e, v)) * e**-0.5}
    return params


def init_cache(
    config: LlamaConfig, num_layers: int, batch_size: int, capacity: int, dtype: DTypeLike
) -> Cache:
    """Creates an empty KV cache for `num_layers` layers, with `capacity` slots in each row."""
    shape = (num_layers, batch_size, config.num_kv_heads, capacity, config.head_dim)
    zeros = jnp.zeros(batch_size, jnp.int32)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), zeros, zeros)


def _write_layer(cache: Cache, layer: Int[Array, ""] | int, output: BlockOutput) -> Cache:
    """Writes a layer's keys and values to the first slots of the cache.

    The scan over layers carries the cache, so XLA updates it in place. If the scan stacked the keys
    and values as outputs instead, padding them to the capacity would need a second copy.

    Args:
        cache: cache of the stage.
        layer: number of the layer within the stage.
        output: output of the layer, with keys and values [b, h_kv, s, c].

    Returns:
        The updated cache.
    """
    start = (layer, 0, 0, 0, 0)
    key = jax.lax.dynamic_update_slice(cache.key, output.key[None], start)
    value = jax.lax.dynamic_update_slice(cache.value, output.value[None], start)
    return cache._replace(key=key, value=value)


def _extend_cache(
    cache: Cache | None, stage_cache: Cache, rows: Rows, hidden: Float[Array, "b s e"]
) -> Cache:
    """Appends the keys and values of a stage to an earlier cache.

    Each row is written at its own length; tokens beyond the capacity are dropped.

    Args:
        cache: earlier cache of these layers; None returns the cache of the stage.
        stage_cache: keys and values of the stage's tokens.
        rows: inputs of the stage.
        hidden: residual stream after the last layer of the stage.

    Returns:
        The cache with updated lengths and next positions.
    """
    num_tokens = rows.valid.sum(-1, dtype=jnp.int32)
    position = rows.position.reshape(len(num_tokens), -1, rows.valid.shape[1])
    next_position = jnp.where(rows.valid[:, None], position + 1, 0).max((1, 2)).astype(jnp.int32)
    if cache is None:
        return Cache(stage_cache.key, stage_cache.value, num_tokens, next_position)
    slots = cache.length[:, None] + jnp.arange(stage_cache.key.shape[3])
    # This adds 0, or 1 for NaN. The compiler cannot prove that it is 0, so it writes the cache only
    # after the last layer has read it. Otherwise XLA would copy the entire cache on a CPU.
    slots += hidden[:, :1, 0] != hidden[:, :1, 0]
    return Cache(
        append_slots(cache.key, stage_cache.key, slots),
        append_slots(cache.value, stage_cache.value, slots),
        cache.length + num_tokens,
        jnp.maximum(next_position, cache.next_position),
    )


def _make_context(config: LlamaConfig, rows: Rows, cache: Cache | None) -> LayerInputs:
    """Computes the rotary angles and the masks of a stage."""
    s = rows.valid.shape[1]
    mask = jnp.tril(jnp.ones((s, s), bool)) & rows.valid[:, None]
    if rows.segment is not None:
        mask &= (rows.segment[:, None] == 0) | (rows.segment[:, None] == rows.segment[..., None])
    cached_mask = None
    if cache is not None:
        cached_mask = (jnp.arange(cache.key.shape[3]) < cache.length[:, None])[:, None]
    return LayerInputs(*rotary_cos_sin(config, rows.position), mask, cached_mask)


def _attention_logits(
    output: BlockOutput, context: LayerInputs, query_index: Int[Array, "b q"]
) -> Float[Array, "b h q s"]:
    """Computes the attention logits of a block for the queries at the slots `query_index`."""
    query = jnp.take_along_axis(output.query, query_index[:, None, :, None], axis=2)
    mask = jnp.take_along_axis(context.mask, query_index[..., None], axis=1)
    return attention_scores(query, [Segment(output.key, output.value, mask)])


def _run_attention_of_layer(
    params: Params,
    config: LlamaConfig,
    hidden: Float[Array, "b s e"],
    context: LayerInputs,
    layer: int,
) -> BlockOutput:
    """Runs only the attention of a layer, for its queries and keys."""
    weights = take_layer(params["layers"], layer)
    normed = RmsNorm(config.rms_norm_eps).apply({"params": weights["norm1"]}, hidden)
    attention = LlamaAttention(config)
    return cast(BlockOutput, attention.apply({"params": weights["attention"]}, normed, context))


def _add_deepstack(
    hidden: Float[Array, "b s e"], features: Float[Array, "b s L e"] | None, layer: Array | int
) -> Float[Array, "b s e"]:
    """Adds the DeepStack features of a layer to the residual stream after the layer.

    Args:
        hidden: residual stream after the layer.
        features: features for each of the first L layers; None for a model without DeepStack.
        layer: number of the layer; a Python integer if layers are unrolled.

    Returns:
        [b, s, e] the residual stream, unchanged after the layers from L on.
    """
    if features is None:
        return hidden
    features, num_layers = features.astype(hidden.dtype), features.shape[2]
    if isinstance(layer, int):
        return hidden + features[:, :, layer] if layer < num_layers else hidden
    index = jnp.minimum(layer, num_layers - 1)  # in bounds for layers without features
    layer_features = jax.lax.dynamic_index_in_dim(features, index, 2, keepdims=False)
    return hidden + jnp.where(layer < num_layers, layer_features, 0)


def run_layers(
    params: Params,
    config: LlamaConfig,
    rows: Rows,
    span: tuple[int, int],
    cache: Cache | None = None,
    outputs: OutputSpec = OutputSpec(),
    execution: Execution = Execution(),
) -> Stage:
    """Runs a stage, a span of consecutive layers with one row length and one KV cache.

    Args:
        params: weights of the language model; `models.stack` describes the layouts of layers.
        config: shape of the language model.
        rows: inputs of layer `span[0]`.
        span: number of the first layer, and number of the layer to stop before.
        cache: KV cache of these layers with earlier tokens. The rows attend to the cache, and the
            returned cache includes the rows.
        outputs: optional outputs: a new KV cache, and intermediate arrays (taps).
        execution: how the layers are run.

    Returns:
        The hidden states after the last layer, the KV cache, and the taps.

    Raises:
        ValueError: a tap does not exist in this stage, or `rows.segment` is combined with a cache
            or with fused attention.
    """
    (first, last), (b, s, _) = span, rows.hidden.shape
    has_cache = cache is not None or outputs.capacity is not None
    supports_segments = execution.attention == "matmul" and not has_cache
    if rows.segment is not None and not supports_segments:
        raise UserError("segments need plain attention and no cache")
    taps = _resolve_stage_taps(config, span, outputs)
    context = _make_context(config, rows, cache)
    stage_cache = None
    if has_cache:
        num_slots = s if outputs.capacity is None else outputs.capacity
        stage_cache = init_cache(config, last - first, b, num_slots, rows.hidden.dtype)
    run_layer = _make_layer_function(
        params, config, rows, first, context=context, cache=cache, execution=execution
    )

    def body(carry, layer):
        hidden, stage_cache = carry
        output = run_layer(hidden, layer)
        if stage_cache is not None:
            stage_cache = _write_layer(stage_cache, layer - first, output)
        return (output.hidden, stage_cache), output

    block_taps = [layer for kind, layer in taps.values() if kind in _BLOCK_KINDS]
    (hidden, stage_cache), block_outputs, carries = run_stack(
        params["layers"],
        body,
        (rows.hidden, stage_cache),
        span,
        output_blocks=[layer for layer in block_taps if layer < last],
        carry_layers=[layer for kind, layer in taps.values() if kind in STATES],
    )
    if last in block_taps:  # an attention tap of the layer after the stage
        block_outputs[last] = _run_attention_of_layer(params, config, hidden, context, last)
    states = {layer: carry[0] for layer, carry in carries.items()}
    read_tap = functools.partial(
        _read_tap,
        params,
        config,
        states=states,
        block_outputs=block_outputs,
        context=context,
        query_index=outputs.query_index,
    )
    if stage_cache is not None:
        stage_cache = _extend_cache(cache, stage_cache, rows, hidden)
    return Stage(hidden, stage_cache, {name: read_tap(*tap) for name, tap in taps.items()})


def _make_layer_function(
    params: Params,
    config: LlamaConfig,
    rows: Rows,
    first: int,
    *,
    context: LayerInputs,
    cache: Cache | None,
    execution: Execution,
) -> Callable[[Array, Array | int], BlockOutput]:
    """Returns a function that maps the residual stream and a layer number to the layer's output.

    Args:
        params: weights of the language model.
        config: shape of the language model.
        rows: inputs of the stage; their probe and DeepStack features are added around each layer.
        first: number of the first layer of the stage, which is layer 0 of the cache.
        context: rotary angles and masks of the stage.
        cache: KV cache of the stage with earlier tokens.
        execution: how the layers are run.

    Returns:
        The function. It recomputes its activations in the backward pass if `execution.remat`.
    """
    block = LlamaBlock(config)

    def run_layer(hidden, layer):
        if rows.probe is not None:
            last_token = jnp.arange(len(hidden)), rows.valid.sum(1) - 1
            hidden = hidden.at[last_token].add(rows.probe[layer].astype(hidden.dtype))
        weights = {"params": take_layer(params["layers"], layer)}
        cached = None if cache is None else take_layer((cache.key, cache.value), layer - first)
        output = cast(
            BlockOutput, block.apply(weights, hidden, context, cached, execution.attention)
        )
        return output._replace(hidden=_add_deepstack(output.hidden, rows.deep, layer))

    return checkpoint_layer(run_layer, execution.remat)


def _resolve_stage_taps(
    config: LlamaConfig, span: tuple[int, int], outputs: OutputSpec
) -> dict[str, tuple[str, int]]:
    """Checks the requested taps of a stage.

    Args:
        config: shape of the language model.
        span: number of the first layer, and number of the layer to stop before.
        outputs: the requested taps.

    Returns:
        The kind and the layer of each tap by its name, such as "hidden.-2".

    Raises:
        UserError: a tap is outside the stage, or an attention tap has no `query_index`.
    """
    first, last = span
    taps = resolve_taps(outputs.taps, config.num_layers, TAP_KINDS)
    for name, (kind, layer) in taps.items():
        # The end of a stage has a hidden state, and the attention of the next layer reads it.
        allows_last = kind in (*STATES, *_ATTENTION_KINDS)
        has_queries = kind not in _ATTENTION_KINDS or outputs.query_index is not None
        with naming(f"tap {name}"):
            require(first <= layer < last + allows_last, f"outside the stage {span}")
            require(has_queries, "needs query_index")
    return taps


def _read_tap(
    params: Params,
    config: LlamaConfig,
    kind: str,
    layer: int,
    *,
    states: Mapping[int, Array],
    block_outputs: Mapping[int, BlockOutput],
    context: LayerInputs,
    query_index: Int[Array, "b q"] | None,
) -> Array:
    """Computes the array of one tap.

    Args:
        params: weights of the language model.
        config: shape of the language model.
        kind: one of `TAP_KINDS`.
        layer: number of the layer.
        states: residual stream before each requested layer.
        block_outputs: outputs of each requested layer.
        context: rotary angles and masks of the stage.
        query_index: [b, q] slots of the queries of attention taps.

    Returns:
        The array, with the shape that `OutputSpec.taps` describes.
    """
    if kind == "rotary":
        return jnp.stack([context.cosine, context.sine])
    if kind == "hidden":
        return states[layer]
    if kind == "normed":
        return final_norm(params, config, states[layer])
    output = block_outputs[layer]
    if kind == "keys":
        return output.key
    if kind == "mlp_input":
        return cast(Array, output.mlp_input)
    scores = _attention_logits(output, context, cast(Array, query_index))
    return scores if kind == "scores" else jax.nn.softmax(scores, axis=-1)


def embed(params: Params, ids: Int[Array, "*b l"]) -> Float[Array, "*b l e"]:
    """Looks up the embeddings of token ids.

    Negative ids mark images; they get the embedding of id 0, which the caller replaces.
    """
    return jnp.take(params["embed"]["embedding"], jnp.maximum(ids, 0), axis=0, mode="clip")


def final_norm(
    params: Params, config: LlamaConfig, hidden: Float[Array, "*b e"]
) -> Float[Array, "*b e"]:
    """Applies the norm between the last block and the output head to a hidden state."""
    return cast(Array, RmsNorm(config.rms_norm_eps).apply({"params": params["norm"]}, hidden))


def logits(
    params: Params, config: LlamaConfig, hidden: Float[Array, "*b e"]
) -> Float[Array, "*b v"]:
    """Applies the final norm and the output head.

    Args:
        params: weights of the language model.
        config: shape of the language model.
        hidden: [..., e] output of the last block.

    Returns:
        [..., v] float32 logits.
    """
    hidden = final_norm(params, config, hidden)
    if "head" not in params:  # the head is tied to the embeddings
        return matmul_float32(hidden, params["embed"]["embedding"], axis=1)
    return matmul_float32(hidden, params["head"]["kernel"])
