"""Norms, projections, activations, attention, caches and taps, shared by the backbones.

Heads come before time, [b, h, t, c], so that both attention products are batched matrix products
with leading batch axes, which run on a CPU without transposing keys and values first. Norms and
softmax are computed in float32 whatever the dtype of the weights.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.config import require

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


class BlockOutput(NamedTuple):
    """Results of a block; keys and queries after rotary positions, `mlp_input` normalised."""

    hidden: Float[Array, "b t width"]
    query: Float[Array, "b h t c"]
    key: Float[Array, "b g t c"]
    value: Float[Array, "b g t c"]
    mlp_input: Float[Array, "b t width"] | None = None


# More queries attend QUERIES at a time: all at once would take 28 GiB of scores for 28 heads and
# 16,384 tokens.
MANY_QUERIES, QUERIES = 2048, 1024


class Segment(NamedTuple):
    """Keys and values that may be attended to where the mask is True; None for all."""

    key: Float[Array, "b g t c"]
    value: Float[Array, "b g t c"]
    mask: Bool[Array, "#b #q t"] | None


def wide_product(
    x: Float[Array, "*b k"], kernel: Float[Array, "k n"] | Float[Array, "n k"], axis: int = 0
) -> Float[Array, "*b n"]:
    """Multiplies rows with a matrix, or its transpose (axis 1), in float32 and not rounded."""
    rows, lead = x.reshape(-1, x.shape[-1]) if x.size == x.shape[-1] else x, x.shape[:-1]
    if x.size == x.shape[-1] and kernel.dtype != jnp.float32:
        # On a CPU, XLA converts all of a narrow matrix to float32 before multiplying it with a
        # single row, which takes ten times as long; with two rows it does not.
        rows = jnp.broadcast_to(rows, (2, x.size))
    dims = (((rows.ndim - 1,), (axis,)), ((), ()))
    result = jax.lax.dot_general(rows, kernel, dims, preferred_element_type=jnp.float32)
    return result if rows is x else result[:1].reshape(*lead, -1)


@jax.custom_jvp
def _narrow_product(x, kernel):
    """Computes `x @ kernel`, summed in float32 and rounded to the dtype of x."""

    def rounded(x, kernel):
        # For a narrow result, XLA on a CPU would convert all of the matrix to float32.
        return wide_product(x, kernel).astype(x.dtype)

    return jax.lax.platform_dependent(x, kernel, cpu=rounded, default=jnp.matmul)


def _narrow_product_jvp(primals, tangents):
    (x, kernel), (along_x, along_kernel) = primals, tangents
    result = _narrow_product(x, kernel)
    slope = jnp.zeros_like(result)
    # A frozen matrix has no tangent and must get no gradient, a product of the same cost.
    if not isinstance(along_x, SymbolicZero):
        slope = slope + along_x @ kernel
    if not isinstance(along_kernel, SymbolicZero):
        slope = slope + x @ along_kernel
    return result, slope


_narrow_product.defjvp(_narrow_product_jvp, symbolic_zeros=True)


def product(x: Float[Array, "*b k"], kernel: Float[Array, "k n"]) -> Float[Array, "*b n"]:
    """Multiplies rows with a matrix, summed in float32 and rounded to the dtype of the rows."""
    return x @ kernel if x.dtype == jnp.float32 else _narrow_product(x, kernel)


# `nn.Dense` with that product.
Dense = functools.partial(nn.Dense, dot_general=lambda x, kernel, *_, **__: product(x, kernel))


class LayerNorm(nn.Module):
    """Layer norm with scale and bias, statistics in float32."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*b width"]) -> Float[Array, "*b width"]:
        """Normalises the last axis; the result has the dtype of the input."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        centred = x.astype(jnp.float32)
        centred = centred - centred.mean(-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + self.eps)
        return (normed * scale + bias).astype(x.dtype)


class RmsNorm(nn.Module):
    """Division by the root mean square, with scale, statistics in float32."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*b width"]) -> Float[Array, "*b width"]:
        """Normalises the last axis; the result has the dtype of the input."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
        # Rounded before the scale, as Llama was trained.
        return scale * normed.astype(x.dtype)


def activate(name: str, x: Float[Array, "*b width"]) -> Float[Array, "*b width"]:
    """Applies "gelu" (exact, by the error function) or "quick_gelu" (x * sigmoid(1.702 x))."""
    if name == "gelu":
        return jax.nn.gelu(x, approximate=False)
    return x * jax.nn.sigmoid(1.702 * x)


def split_heads(x: Float[Array, "b t width"], num_heads: int) -> Float[Array, "b h t c"]:
    """Splits the last axis into heads and puts them before time."""
    b, t, width = x.shape
    return x.reshape(b, t, num_heads, width // num_heads).swapaxes(1, 2)


def merge_heads(x: Float[Array, "b h t c"]) -> Float[Array, "b t width"]:
    """The inverse of `split_heads`."""
    b, h, t, c = x.shape
    return x.swapaxes(1, 2).reshape(b, t, h * c)


def _batched_matmul(a: Array, b: Array, contract: tuple[int, int], dtype: DTypeLike) -> Array:
    """Contracts one axis of each, with the two leading axes as batch."""
    dims = (((contract[0],), (contract[1],)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=dtype)


def attention_weights(
    query: Float[Array, "b h q c"], segments: Sequence[Segment]
) -> Float[Array, "b h q t"]:
    """Computes float32 softmax attention weights over the concatenated keys of all segments.

    Grouped queries are folded into the query axis, so that keys are never repeated. A query that
    may attend to nothing gets equal weights rather than NaN.
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
    scores = scores[0] if len(scores) == 1 else jnp.concatenate(scores, axis=-1)
    return jax.nn.softmax(scores, axis=-1)


def attend(query: Float[Array, "b h q c"], segments: Sequence[Segment]) -> Float[Array, "b h q c"]:
    """Attends from queries to one or several segments of keys; many are processed in parts."""
    by_query = [mask is not None and mask.shape[1] > 1 for _, _, mask in segments]

    def part(query: Float[Array, "b h q c"], *masks: Bool[Array, "_ q t"]) -> Array:
        own = iter(masks)
        cut = zip(segments, by_query, strict=True)
        return _attend(query, [s._replace(mask=next(own)) if each else s for s, each in cut])

    masks = (cast(Array, s.mask) for s, each in zip(segments, by_query, strict=True) if each)
    parts = jnp.moveaxis(map_queries(part, query, *masks), 0, 2)
    return parts.reshape(*query.shape[:2], -1, query.shape[3])[:, :, : query.shape[2]]


def map_queries(
    function: Callable[..., Array], query: Float[Array, "b h q c"], *by_query: Array
) -> Array:
    """Applies a function to all queries, or to `QUERIES` at a time if they are many.

    The function takes queries and their part of each of `by_query` [b or 1, q, ...], and its
    results are stacked; the last of several parts is padded with 0. A gradient computes a part
    again, rather than storing the scores of all.
    """
    length = query.shape[2]
    if length <= MANY_QUERIES:
        return function(query, *by_query)[None]
    arrays, axes = (query, *by_query), (2, *(1 for _ in by_query))
    missing = -length % QUERIES
    padded = [
        jnp.pad(x, [(0, missing if at == axis else 0) for at in range(x.ndim)])
        for x, axis in zip(arrays, axes, strict=True)
    ]

    def part(first: Int[Array, ""]) -> Array:
        rows = zip(padded, axes, strict=True)
        cut = (jax.lax.dynamic_slice_in_dim(x, first, QUERIES, axis) for x, axis in rows)
        return function(*cut)

    part = jax.checkpoint(part, prevent_cse=False)
    return jax.lax.map(part, jnp.arange(0, length + missing, QUERIES))


def _attend(query: Float[Array, "b h q c"], segments: Sequence[Segment]) -> Float[Array, "b h q c"]:
    """Attends from all queries at once."""
    b, h, q, c = query.shape
    weights = attention_weights(query, segments).astype(segments[0].value.dtype)
    parts, start = [], 0
    for _, value, _ in segments:
        groups, length = value.shape[1:3]
        part = jax.lax.slice_in_dim(weights, start, start + length, axis=-1)
        part = part.reshape(b, groups, h // groups * q, length)
        parts.append(_batched_matmul(part, value, (3, 2), value.dtype))
        start += length
    return functools.reduce(operator.add, parts).reshape(b, h, q, c)


def fused_attend(
    query: Float[Array, "b h t c"],
    key: Float[Array, "b g t c"],
    value: Float[Array, "b g t c"],
    causal: bool,
    implementation: str,
    length: Int[Array, "b"] | None = None,
) -> Float[Array, "b h t c"]:
    """Computes self-attention by `jax.nn.dot_product_attention`, "xla" or "cudnn".

    The causal mask is the only one: with padding at the right end, it alone hides it from valid
    tokens. Slots of a row from its `length` on are not attended to, and their results undefined.
    """
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
        require(
            f"tap {kind}.{layer}",
            (kind in kinds, f"there is no {kind!r}; supported: {', '.join(kinds)}"),
            (-count <= layer < count, f"there are only {count}"),
        )
        resolved[f"{kind}.{layer}"] = (kind, layer % count)
    return resolved
