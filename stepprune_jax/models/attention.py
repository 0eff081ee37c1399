"""Attention of the backbones, writes to the KV cache, and taps, in plain jax.

Arrays are [b, h, t, c], with heads before tokens. Both attention products are then batched matrix
products with leading batch axes, which run on a CPU without transposing keys and values. The
softmax is computed in float32 regardless of the dtype of the weights. A tap is an intermediate that
a forward pass returns on request.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.policy.layers import map_queries
from stepprune_jax.user_input import naming, require

# Kinds of taps that are read between blocks. Taps of other kinds are read inside a block.
STATES = ("hidden", "normed")


class Tap(NamedTuple):
    """Request for an intermediate that a forward pass returns in addition to its result.

    Attributes:
        kind: "hidden", "keys", "attention", or another kind that the backbone supports.
        layer: for "hidden" and "normed" the number of blocks before the intermediate, 0 to L; for
            other kinds the block, 0 to L - 1. Negative numbers count from the end: "hidden" -1 is
            the output of the last block and "hidden" -2 is the input of the last block.
    """

    kind: str
    layer: int


class Segment(NamedTuple):
    """Keys and values that queries attend to.

    Attributes:
        key: [b, g, t, c] keys.
        value: [b, g, t, w] values.
        mask: [b or 1, q or 1, t] True where a query may attend to a key; None allows all keys.
    """

    key: Float[Array, "b g t c"]
    value: Float[Array, "b g t w"]
    mask: Bool[Array, "#b #q t"] | None


def _batched_matmul(a: Array, b: Array, contract: tuple[int, int], dtype: DTypeLike) -> Array:
    """Contracts axis `contract[0]` of a with axis `contract[1]` of b; axes 0 and 1 are batch."""
    dimension_numbers = (((contract[0],), (contract[1],)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, b, dimension_numbers, preferred_element_type=dtype)


def attention_weights(
    query: Float[Array, "b h q c"], segments: Sequence[Segment]
) -> Float[Array, "b h q t"]:
    """Computes float32 softmax attention weights over the concatenated keys of all segments.

    A query whose keys are all masked gets equal weights instead of NaN.
    """
    return jax.nn.softmax(attention_scores(query, segments), axis=-1)


def attention_scores(
    query: Float[Array, "b h q c"], segments: Sequence[Segment]
) -> Float[Array, "b h q t"]:
    """Computes the float32 logits of `attention_weights`.

    Masked logits are the lowest finite float32. With grouped key heads (g < h), the query heads of
    a group are folded into the query axis, so keys are not repeated.

    Args:
        query: [b, h, q, c] queries.
        segments: keys with their masks; t is the total number of keys.

    Returns:
        [b, h, q, t] logits.
    """
    b, h, q, c = query.shape
    num_key_heads = segments[0].key.shape[1]
    # Consecutive query heads share a key head.
    folded = query.reshape(b, num_key_heads, h // num_key_heads * q, c)
    scores = []
    for segment in segments:
        score = _batched_matmul(folded, segment.key, (3, 3), jnp.float32) * c**-0.5
        score = score.reshape(b, h, q, segment.key.shape[2])
        if segment.mask is not None:
            # With -inf, a row whose keys are all masked would give NaN.
            score = jnp.where(segment.mask[:, None], score, jnp.finfo(jnp.float32).min)
        scores.append(score)
    return scores[0] if len(scores) == 1 else jnp.concatenate(scores, axis=-1)


def received_attention(
    query: Float[Array, "b h t c"], key: Float[Array, "b h t c"], is_token: Bool[Array, "b t"]
) -> Float[Array, "b t"]:
    """Computes the attention that each token receives, averaged over heads and queries.

    Args:
        query: [b, h, t, c] queries.
        key: [b, h, t, c] keys.
        is_token: [b, t] True for tokens, False for padding.

    Returns:
        [b, t] float32; 0 for padding. The sum of a row is 1 if the row has tokens.
    """
    segments = [Segment(key, key, is_token[:, None])]

    def sum_over_queries(
        query: Float[Array, "b h q c"], is_token: Bool[Array, "b q"]
    ) -> Float[Array, "b 1 t"]:
        weights = jnp.where(is_token[:, None, :, None], attention_weights(query, segments), 0)
        return jnp.sum(weights, axis=(1, 2))[:, None]

    total = map_queries(sum_over_queries, query, is_token, axis=1).sum(1)
    count = query.shape[1] * jnp.maximum(is_token.sum(1), 1)
    return jnp.where(is_token, total / count[:, None], 0)


def attend(query: Float[Array, "b h q c"], segments: Sequence[Segment]) -> Float[Array, "b h q w"]:
    """Computes attention from queries to the concatenated keys of all segments.

    Long query axes are processed in chunks, which limits the memory for attention weights.

    Args:
        query: [b, h, q, c] queries.
        segments: keys and values with their masks.

    Returns:
        [b, h, q, w] attention outputs in the dtype of the values.
    """
    # A mask with its own row for each query is split into chunks together with the queries.
    has_query_axis = [mask is not None and mask.shape[1] > 1 for _, _, mask in segments]

    def attend_chunk(query: Float[Array, "b h q c"], *masks: Bool[Array, "_ q t"]) -> Array:
        chunk_masks = iter(masks)
        chunk_segments = [
            segment._replace(mask=next(chunk_masks)) if has_axis else segment
            for segment, has_axis in zip(segments, has_query_axis, strict=True)
        ]
        return _attend(query, chunk_segments)

    masks = (
        cast(Array, segment.mask)
        for segment, has_axis in zip(segments, has_query_axis, strict=True)
        if has_axis
    )
    return map_queries(attend_chunk, query, *masks)


def _attend(query: Float[Array, "b h q c"], segments: Sequence[Segment]) -> Float[Array, "b h q w"]:
    """Computes attention for all queries in one step; see `attend` for the arguments."""
    b, h, q, _ = query.shape
    weights = attention_weights(query, segments).astype(segments[0].value.dtype)
    # The values of segments are not concatenated; the products of the segments are added instead.
    outputs, start = [], 0
    for _, value, _ in segments:
        num_key_heads, length = value.shape[1:3]
        segment_weights = jax.lax.slice_in_dim(weights, start, start + length, axis=-1)
        segment_weights = segment_weights.reshape(b, num_key_heads, h // num_key_heads * q, length)
        outputs.append(_batched_matmul(segment_weights, value, (3, 2), value.dtype))
        start += length
    return functools.reduce(operator.add, outputs).reshape(b, h, q, -1)


def self_attend(
    query: Float[Array, "b h t c"],
    key: Float[Array, "b g t c"],
    value: Float[Array, "b g t c"],
    *,
    causal: bool,
    implementation: str,
    length: Int[Array, "b"] | None = None,
) -> Float[Array, "b h t c"]:
    """Computes self-attention with one of the implementations `stack.ATTENTIONS`.

    Args:
        query: [b, h, t, c] queries.
        key: [b, g, t, c] keys.
        value: [b, g, t, c] values.
        causal: whether a token attends only to itself and to earlier tokens. Must be False for
            "matmul", which does not apply a causal mask. Padding at the right end needs no other
            mask if the attention is causal.
        implementation: "matmul", "xla" or "cudnn".
        length: [b] number of tokens of each row. Later slots are not attended to, and their results
            are undefined. None if all slots are tokens.

    Returns:
        [b, h, t, c] attention outputs.
    """
    if implementation == "matmul":
        mask = None if length is None else (jnp.arange(key.shape[2]) < length[:, None])[:, None]
        return attend(query, [Segment(key, value, mask)])
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    result = jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=causal,
        query_seq_lengths=length,
        key_value_seq_lengths=length,
        implementation=cast(Literal["xla", "cudnn"], implementation),
    )
    return result.swapaxes(1, 2)


def append_slots(
    buffer: Float[Array, "layers b g capacity c"],
    new: Float[Array, "layers b g s c"],
    slots: Int[Array, "b s"],
) -> Float[Array, "layers b g capacity c"]:
    """Writes keys or values of new tokens into a KV cache, each row at its own slots.

    Args:
        buffer: [layers, b, g, capacity, c] cached keys or values of g heads with c channels.
        new: [layers, b, g, s, c] keys or values of the s new tokens of each row.
        slots: [b, s] position of each new token in the cache, unique in a row. Tokens whose slot is
            at least the capacity are dropped.

    Returns:
        The updated buffer.
    """
    # The batch is declared as a batch axis, so each device of a mesh writes only its own rows.
    dimension_numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(2, 3, 4),
        inserted_window_dims=(3,),
        scatter_dims_to_operand_dims=(3,),
        operand_batching_dims=(1,),
        scatter_indices_batching_dims=(0,),
    )

    def write(buffer, new):
        # `scatter` expects the batch axes first, then the window axes of the buffer.
        updates = new.transpose(1, 3, 0, 2, 4)  # [b, s, layers, g, c]
        return jax.lax.scatter(
            buffer, slots[..., None], updates, dimension_numbers, unique_indices=True, mode="drop"
        )

    def write_as_integers(buffer, new):
        dtype = jnp.dtype(f"u{buffer.dtype.itemsize}")
        as_integers = (jax.lax.bitcast_convert_type(x, dtype) for x in (buffer, new))
        return jax.lax.bitcast_convert_type(write(*as_integers), buffer.dtype)

    if buffer.dtype.itemsize == 4:
        return write(buffer, new)
    # On a CPU, XLA would convert an entire bfloat16 buffer to float32 and back, so the buffer is
    # written as integers there.
    return jax.lax.platform_dependent(buffer, new, cpu=write_as_integers, default=write)


def resolve_taps(
    taps: Sequence[Tap], num_layers: int, kinds: Sequence[str]
) -> dict[str, tuple[str, int]]:
    """Maps the name of each tap to its kind and its layer.

    Args:
        taps: the requested taps.
        num_layers: number of blocks of the model.
        kinds: kinds of taps that the model supports.

    Returns:
        (kind, layer) by name. A name contains the requested layer, such as "hidden.-2"; the layer
        of the value is counted from the start.

    Raises:
        ValueError: a kind is not supported, or a layer does not exist.
    """
    resolved = {}
    for kind, layer in taps:
        # States exist before each block and after the last block.
        num_places = num_layers + (kind in STATES)
        with naming(f"tap {kind}.{layer}"):
            require(kind in kinds, f"there is no {kind!r}; supported: {', '.join(kinds)}")
            require(-num_places <= layer < num_places, f"there are only {num_places}")
        resolved[f"{kind}.{layer}"] = (kind, layer % num_places)
    return resolved
