"""Layers shared by encoder, decoder and denoiser, as functions of a dict of weights."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from stepprune_jax.policy.base import Params
from stepprune_jax.policy.config import PolicyConfig

# Replaces minus infinity in logits and log-probabilities. Finite, so that no gradient is NaN
# where everything is masked, and small enough that sums over hundreds of steps stay finite.
MASKED = -1e9

NORM_EPSILON = 1e-5

# More queries attend some at a time: all at once would take 16 GiB of logits for 16 heads of 16,384
# tokens. A CPU takes half the time if its caches hold the logits, and a GPU wants few kernels.
MANY_QUERIES, QUERIES = 2048, {"cpu": 128, "default": 1024}


def score_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of scores and softmaxes for activations of `dtype`: at least float32."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def compute_dtype(config: PolicyConfig, dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of activations for features of `dtype`."""
    return jnp.dtype(config.dtype) if config.dtype else score_dtype(dtype)


def layer_norm(params: Params, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    """Normalises over the last axis, in at least float32; `bias` is optional."""
    wide = x.astype(score_dtype(x.dtype))
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + NORM_EPSILON)
    wide = wide * params["scale"]
    return (wide + params["bias"] if "bias" in params else wide).astype(x.dtype)


def dense(params: Params, x: Float[Array, "*b d"]) -> Float[Array, "*b f"]:
    """Computes `x @ kernel (+ bias)` in the dtype of `x`."""
    y = x @ params["kernel"].astype(x.dtype)
    return y + params["bias"].astype(x.dtype) if "bias" in params else y


def mlp(params: Params, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    """Applies two dense layers with a GELU between them."""
    return dense(params["down"], jax.nn.gelu(dense(params["up"], x)))


def split_heads(x: Float[Array, "b t d"], num_heads: int) -> Float[Array, "b h t c"]:
    """Splits the last axis into heads, heads first, so that products are batched matmuls."""
    b, t, d = x.shape
    return x.reshape(b, t, num_heads, d // num_heads).swapaxes(1, 2)


def merge_heads(x: Float[Array, "b h t c"]) -> Float[Array, "b t d"]:
    """Inverse of `split_heads`."""
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

    A fully masked query gets the mean of all values, never NaN. Many are processed in parts.
    """
    by_query = (mask[:, 0],) if mask.shape[2] > 1 else ()

    def part(query: Float[Array, "b h q c"], *masks: Bool[Array, "_ q s"]) -> Array:
        own = masks[0][:, None] if masks else mask
        return _attention(query, key, value, own, bias)

    return map_queries(part, query, *by_query)


def map_queries(
    function: Callable[..., Array],
    query: Shaped[Array, "b h q c"],
    *by_query: Shaped[Array, "_ q *x"],
    axis: int = 2,
) -> Array:
    """Applies a function to all queries, or to `QUERIES` at a time if they are many.

    A gradient computes a part again, rather than storing the scores of all.

    Args:
        function: maps queries, and their part of each of `by_query`, to results.
        query: [b, h, q, c] the queries.
        *by_query: [b or 1, q, ...] arrays.
        axis: the axis of the results along which there is one for each query, or one sum over all
            queries that the function is given.

    Returns:
        The results of all queries.
    """
    if query.shape[2] <= MANY_QUERIES:
        return function(query, *by_query)

    def by(size: int) -> Array:
        return _map_parts(function, (query, *by_query), size, axis)

    sizes = {platform: functools.partial(by, size) for platform, size in QUERIES.items()}
    return jax.lax.platform_dependent(**sizes)


def _map_parts(function: Callable[..., Array], arrays: tuple, size: int, axis: int) -> Array:
    """Applies a function to `size` queries at a time; the last part is padded with 0."""
    length, axes = arrays[0].shape[2], (2, *(1 for _ in arrays[1:]))
    missing = -length % size
    padded = [
        jnp.pad(x, [(0, missing if at == queries else 0) for at in range(x.ndim)])
        for x, queries in zip(arrays, axes, strict=True)
    ]

    def part(first: Int[Array, ""]) -> Array:
        rows = zip(padded, axes, strict=True)
        return function(*(jax.lax.dynamic_slice_in_dim(x, first, size, at) for x, at in rows))

    part = jax.checkpoint(part, prevent_cse=False)
    parts = jax.lax.map(part, jnp.arange(0, length + missing, size))
    shape = list(parts.shape[1:])
    shape[axis] *= len(parts)
    whole = jnp.moveaxis(parts, 0, axis).reshape(shape)
    return whole[(slice(None),) * axis + (slice(length),)]


def _attention(query, key, value, mask, bias):
    """Attends from all queries at once."""
    wide = score_dtype(query.dtype)
    logits = jnp.matmul(query, key.swapaxes(-1, -2), preferred_element_type=wide)
    logits = logits / math.sqrt(query.shape[-1])
    logits = logits if bias is None else logits + bias
    weights = jax.nn.softmax(jnp.where(mask, logits, MASKED), axis=-1)
    return jnp.matmul(weights.astype(value.dtype), value)
