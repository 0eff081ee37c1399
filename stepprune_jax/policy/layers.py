"""Layers shared by encoder, decoder and denoiser, as functions of a dict of weights."""

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

# More queries attend QUERIES at a time: all at once would take 16 GiB of logits for 16 heads and
# 16,384 tokens.
MANY_QUERIES, QUERIES = 2048, 1024


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

    parts = jnp.moveaxis(map_queries(part, query, *by_query), 0, 2)
    return parts.reshape(*query.shape[:2], -1, value.shape[-1])[:, :, : query.shape[2]]


def map_queries(
    function: Callable[..., Array], query: Shaped[Array, "b h q c"], *by_query: Array
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


def _attention(query, key, value, mask, bias):
    """Attends from all queries at once."""
    wide = score_dtype(query.dtype)
    logits = jnp.matmul(query, key.swapaxes(-1, -2), preferred_element_type=wide)
    logits = logits / math.sqrt(query.shape[-1])
    logits = logits if bias is None else logits + bias
    weights = jax.nn.softmax(jnp.where(mask, logits, MASKED), axis=-1)
    return jnp.matmul(weights.astype(value.dtype), value)
