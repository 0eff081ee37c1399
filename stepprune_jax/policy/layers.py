"""Layers of encoder, decoder and denoiser, as functions of a dict of weights."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from stepprune_jax.policy.base import Params
from stepprune_jax.policy.config import PolicyConfig

# Replaces minus infinity in logits and log-probabilities. A finite value keeps gradients finite
# where all entries are masked. Sums of it over hundreds of steps stay finite in float32.
MASKED = -1e9

# Epsilon of `torch.nn.LayerNorm`.
NORM_EPSILON = 1e-5

# Attention over more than MANY_QUERIES queries runs in chunks of QUERIES[platform] queries: the
# logits of 16 heads and 16,384 tokens would take 16 GiB. On CPUs, chunks whose logits fit into the
# caches are twice as fast. GPUs are faster with fewer, larger kernels.
MANY_QUERIES, QUERIES = 2048, {"cpu": 128, "default": 1024}


def score_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of scores and softmaxes for activations of `dtype`: at least float32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def compute_dtype(config: PolicyConfig, dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of activations: `config.dtype`, or else at least float32."""
    return jnp.dtype(config.dtype) if config.dtype else score_dtype(dtype)


def layer_norm(params: Params, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    """Applies layer normalization over the last axis, in at least float32; `bias` is optional."""
    y = x.astype(score_dtype(x.dtype))
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + NORM_EPSILON)
    y = y * params["scale"]
    return (y + params["bias"] if "bias" in params else y).astype(x.dtype)


def dense(params: Params, x: Float[Array, "*b d"]) -> Float[Array, "*b f"]:
    """Computes `x @ kernel (+ bias)` in the dtype of `x`."""
    y = x @ params["kernel"].astype(x.dtype)
    return y + params["bias"].astype(x.dtype) if "bias" in params else y


def mlp(params: Params, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    """Applies two dense layers with a GELU between them."""
    return dense(params["down"], jax.nn.gelu(dense(params["up"], x)))


def split_heads(x: Float[Array, "b t d"], num_heads: int) -> Float[Array, "b h t c"]:
    """Splits the last axis into heads and moves the heads in front of the positions."""
    b, t, d = x.shape
    return x.reshape(b, t, num_heads, d // num_heads).swapaxes(1, 2)


def merge_heads(x: Float[Array, "b h t c"]) -> Float[Array, "b t d"]:
    """Merges heads into the last axis; the inverse of `split_heads`."""
    b, h, t, c = x.shape
    return x.swapaxes(1, 2).reshape(b, t, h * c)


def attention(
    query: Float[Array, "b h t c"],
    key: Float[Array, "b h s c"],
    value: Float[Array, "b h s c"],
    mask: Bool[Array, "#b 1 #t s"],
    bias: Float[Array, "#b 1 1 s"] | None = None,
) -> Float[Array, "b h t c"]:
    """Computes scaled dot-product attention with a softmax in at least float32.

    A fully masked query returns the mean of all values, never NaN. More than `MANY_QUERIES` queries
    are processed in chunks.

    Args:
        query: [b, h, t, c] queries.
        key: [b, h, s, c] keys.
        value: [b, h, s, c] values.
        mask: True at keys that a query attends to.
        bias: additive bias of the logits per key, or None.

    Returns:
        [b, h, t, c] weighted means of the values, in their dtype.
    """
    query_masks = (mask[:, 0],) if mask.shape[2] > 1 else ()

    def attend(query: Float[Array, "b h q c"], *masks: Bool[Array, "_ q s"]) -> Array:
        chunk_mask = masks[0][:, None] if masks else mask
        return _attention(query, key, value, chunk_mask, bias)

    return map_queries(attend, query, *query_masks)


def map_queries(
    function: Callable[..., Array],
    query: Shaped[Array, "b h q c"],
    *by_query: Shaped[Array, "_ q *x"],
    axis: int = 2,
) -> Array:
    """Applies a function to all queries at once, or in chunks if there are many queries.

    The platform determines the size of a chunk; see `QUERIES`. The backward pass recomputes each
    chunk instead of storing its attention scores.

    Args:
        function: maps a chunk of queries, and the matching chunk of each of `by_query`, to results.
        query: [b, h, q, c] queries.
        *by_query: [b or 1, q, ...] further arrays with a query axis.
        axis: axis of the results along which chunks are concatenated: an axis with one entry per
            query, or with one sum per chunk.

    Returns:
        The results of all chunks, concatenated along `axis`.
    """
    if query.shape[2] <= MANY_QUERIES:
        return function(query, *by_query)

    def map_with(chunk_size: int) -> Array:
        return _map_chunks(function, (query, *by_query), chunk_size, axis)

    branches = {
        platform: functools.partial(map_with, chunk_size)
        for platform, chunk_size in QUERIES.items()
    }
    return jax.lax.platform_dependent(**branches)


def _map_chunks(
    function: Callable[..., Array], arrays: tuple[Array, ...], chunk_size: int, axis: int
) -> Array:
    """Applies a function to `chunk_size` queries at a time; see `map_queries`.

    Args:
        function: maps one chunk of each array to results.
        arrays: [b, h, q, c] queries, then arrays whose second axis has one entry per query.
        chunk_size: number of queries per chunk; the last chunk is padded with zeros.
        axis: axis of the results along which chunks are concatenated.

    Returns:
        The results of all chunks, without the results of the padding.
    """
    length, query_axes = arrays[0].shape[2], (2, *(1 for _ in arrays[1:]))
    padding = -length % chunk_size
    padded_arrays = [
        jnp.pad(x, [(0, padding if dim == query_axis else 0) for dim in range(x.ndim)])
        for x, query_axis in zip(arrays, query_axes, strict=True)
    ]

    def apply_chunk(first: Int[Array, ""]) -> Array:
        chunks = (
            jax.lax.dynamic_slice_in_dim(x, first, chunk_size, query_axis)
            for x, query_axis in zip(padded_arrays, query_axes, strict=True)
        )
        return function(*chunks)

    apply_chunk = jax.checkpoint(apply_chunk, prevent_cse=False)
    results = jax.lax.map(apply_chunk, jnp.arange(0, length + padding, chunk_size))
    shape = list(results.shape[1:])
    shape[axis] *= len(results)
    merged = jnp.moveaxis(results, 0, axis).reshape(shape)
    return merged[(slice(None),) * axis + (slice(length),)]


def _attention(query, key, value, mask, bias):
    """Computes scaled dot-product attention for all queries at once; see `attention`."""
    dtype = score_dtype(query.dtype)
    logits = jnp.matmul(query, key.swapaxes(-1, -2), preferred_element_type=dtype)
    logits = logits / math.sqrt(query.shape[-1])
    logits = logits if bias is None else logits + bias
    weights = jax.nn.softmax(jnp.where(mask, logits, MASKED), axis=-1)
    return jnp.matmul(weights.astype(value.dtype), value)
