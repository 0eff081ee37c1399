"""Attention of the backbones, its taps and its caches, in plain jax.

Heads come before time, [b, h, t, c], so that both attention products are batched matrix products
with leading batch axes, which run on a CPU without transposing keys and values first. Softmax is
computed in float32 whatever the dtype of the weights.
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

# Kinds of taps between blocks; the others belong to a block.
STATES = ("hidden", "normed")


class Tap(NamedTuple):
    """An intermediate that a forward pass returns in addition to its result.

    Attributes:
        kind: "hidden", "keys", "attention", or another that the backbone offers.
        layer: for "hidden" and "normed" the number of blocks before it, 0 to L; for the others the
            block, 0 to L - 1. Negative numbers count from the end: "hidden" -1 is the output of the
            last block, -2 that of the one before.
    """

    kind: str
    layer: int


class Segment(NamedTuple):
    """Keys and values that may be attended to where the mask is True; None for all."""

    key: Float[Array, "b g t c"]
    value: Float[Array, "b g t w"]
    mask: Bool[Array, "#b #q t"] | None


def _batched_matmul(a: Array, b: Array, contract: tuple[int, int], dtype: DTypeLike) -> Array:
    """Contracts one axis of each, with the two leading axes as batch."""
    dims = (((contract[0],), (contract[1],)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=dtype)


def attention_weights(
    query: Float[Array, "b h q c"], segments: Sequence[Segment]
) -> Float[Array, "b h q t"]:
    """Computes float32 softmax attention weights over the concatenated keys of all segments.

    A query that may attend to nothing gets equal weights rather than NaN.
    """
    return jax.nn.softmax(attention_scores(query, segments), axis=-1)


def attention_scores(
    query: Float[Array, "b h q c"], segments: Sequence[Segment]
) -> Float[Array, "b h q t"]:
    """Computes the float32 logits of `attention_weights`: the lowest number where masked.

    Grouped queries are folded into the query axis, so that keys are never repeated.
    """
    b, h, q, c = query.shape
    groups = segments[0].key.shape[1]
    folded = query.reshape(b, groups, h // groups * q, c)
    scores = []
    for segment in segments:
        score = _batched_matmul(folded, segment.key, (3, 3), jnp.float32) * c**-0.5
        score = score.reshape(b, h, q, segment.key.shape[2])
        if segment.mask is not None:
            # The lowest finite number: with -inf an empty row would give NaN.
            score = jnp.where(segment.mask[:, None], score, jnp.finfo(jnp.float32).min)
        scores.append(score)
    return scores[0] if len(scores) == 1 else jnp.concatenate(scores, axis=-1)


def received_attention(
    query: Float[Array, "b h t c"], key: Float[Array, "b h t c"], real: Bool[Array, "b t"]
) -> Float[Array, "b t"]:
    """Computes the attention that tokens receive, averaged over heads and the `real` tokens.

    It is float32, sums to 1, and is 0 for others.
    """
    keys = [Segment(key, key, real[:, None])]

    def given(query: Float[Array, "b h q c"], real: Bool[Array, "b q"]) -> Float[Array, "b 1 t"]:
        weights = jnp.where(real[:, None, :, None], attention_weights(query, keys), 0)
        return jnp.sum(weights, axis=(1, 2))[:, None]

    total = map_queries(given, query, real, axis=1).sum(1)
    count = query.shape[1] * jnp.maximum(real.sum(1), 1)
    return jnp.where(real, total / count[:, None], 0)


def attend(query: Float[Array, "b h q c"], segments: Sequence[Segment]) -> Float[Array, "b h q w"]:
    """Attends from queries to one or several segments of keys; many are processed in parts."""
    by_query = [mask is not None and mask.shape[1] > 1 for _, _, mask in segments]

    def part(query: Float[Array, "b h q c"], *masks: Bool[Array, "_ q t"]) -> Array:
        own = iter(masks)
        cut = zip(segments, by_query, strict=True)
        return _attend(query, [s._replace(mask=next(own)) if each else s for s, each in cut])

    masks = (cast(Array, s.mask) for s, each in zip(segments, by_query, strict=True) if each)
    return map_queries(part, query, *masks)


def _attend(query: Float[Array, "b h q c"], segments: Sequence[Segment]) -> Float[Array, "b h q w"]:
    """Attends from all queries at once."""
    b, h, q, _ = query.shape
    weights = attention_weights(query, segments).astype(segments[0].value.dtype)
    parts, start = [], 0
    for _, value, _ in segments:
        groups, length = value.shape[1:3]
        part = jax.lax.slice_in_dim(weights, start, start + length, axis=-1)
        part = part.reshape(b, groups, h // groups * q, length)
        parts.append(_batched_matmul(part, value, (3, 2), value.dtype))
        start += length
    return functools.reduce(operator.add, parts).reshape(b, h, q, -1)


def self_attend(
    query: Float[Array, "b h t c"],
    key: Float[Array, "b g t c"],
    value: Float[Array, "b g t c"],
    causal: bool,
    implementation: str,
    length: Int[Array, "b"] | None = None,
) -> Float[Array, "b h t c"]:
    """Computes self-attention by one of `stack.ATTENTIONS`; by "matmul" if it is not causal.

    The causal mask is the only one: with padding at the right end, it alone hides it from valid
    tokens. Slots of a row from its `length` on are not attended to, and their results undefined.
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
    """Writes tokens into a cache, each row at its own slots; those beyond the capacity are lost."""
    # The batch is declared as a batch axis, so that on a mesh each device writes its own rows.
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(2, 3, 4),
        inserted_window_dims=(3,),
        scatter_dims_to_operand_dims=(3,),
        operand_batching_dims=(1,),
        scatter_indices_batching_dims=(0,),
    )

    def write(buffer, new):
        new = new.transpose(1, 3, 0, 2, 4)  # [b, s, layers, h_kv, c]
        return jax.lax.scatter(
            buffer, slots[..., None], new, numbers, unique_indices=True, mode="drop"
        )

    def write_bits(buffer, new):
        bits = jnp.dtype(f"u{buffer.dtype.itemsize}")
        as_bits = (jax.lax.bitcast_convert_type(x, bits) for x in (buffer, new))
        return jax.lax.bitcast_convert_type(write(*as_bits), buffer.dtype)

    if buffer.dtype.itemsize == 4:
        return write(buffer, new)
    # As integers on a CPU, where XLA would convert all of a bfloat16 buffer to float32 and back.
    return jax.lax.platform_dependent(buffer, new, cpu=write_bits, default=write)


def resolve_taps(
    taps: Sequence[Tap], num_layers: int, kinds: Sequence[str]
) -> dict[str, tuple[str, int]]:
    """Maps names of taps, such as "hidden.-2", to their kinds and layers counted from the start."""
    resolved = {}
    for kind, layer in taps:
        count = num_layers + (kind in STATES)
        with naming(f"tap {kind}.{layer}"):
            require(kind in kinds, f"there is no {kind!r}; supported: {', '.join(kinds)}")
            require(-count <= layer < count, f"there are only {count}")
        resolved[f"{kind}.{layer}"] = (kind, layer % count)
    return resolved
