"""Noise gate, Eq. (13), denoiser, Eq. (14), and standardization of features."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from stepprune_jax.policy import layers
from stepprune_jax.policy.base import AnyArray, FeatureStats, Inputs, Params
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.jax_settings import implicit_promotion


@jax.custom_jvp
def _bounded_sqrt(x: Array) -> Array:
    """Computes sqrt(x) on [0, 1] with a derivative of at most 500, reached at x <= 1e-6.

    An epsilon within the root does not bound the derivative: XLA folds the 1 + eps of
    `sqrt(1 - alpha + eps)` to 1 in float32, and alpha = 1 then gives inf * 0.
    """
    return jnp.sqrt(jnp.clip(x, 0, 1))


@_bounded_sqrt.defjvp
def _bounded_sqrt_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return _bounded_sqrt(x), 0.5 * jax.lax.rsqrt(jnp.maximum(x, 1e-6)) * dx


@implicit_promotion()
def noise_gate(
    key: Array | None,
    x: Float[AnyArray, "b n d"],
    alpha: Float[AnyArray, "b n"],
    *,
    noise: Float[AnyArray, "b n d"] | None = None,
) -> Float[Array, "b n d"]:
    """Mixes tokens with noise, Eq. (13): x~ = sqrt(alpha) x + sqrt(1 - alpha) eps.

    alpha = 1 returns the token itself, alpha = 0 pure noise. If x has unit variance per channel,
    the result has unit second moment: see `standardise`. Gradients are finite at alpha 0 and 1.

    Args:
        key: PRNG key; consumed. Unused if `noise` is given, and may then be None.
        x: [b, n, d] standardized tokens.
        alpha: [b, n] gate of each token, in [0, 1].
        noise: [b, n, d] eps ~ N(0, I); sampled with `key` if None.

    Returns:
        [b, n, d] gated tokens in the dtype of `x`, mixed in at least float32.
    """
    x, alpha = jnp.asarray(x), jnp.asarray(alpha)
    dtype = layers.score_dtype(x.dtype)
    if noise is None:
        if key is None:
            raise ValueError("key is None, expected a key, or the noise itself as `noise`")
        noise = jax.random.normal(key, x.shape, dtype)
    alpha = alpha.astype(dtype)[..., None]
    signal_scale, noise_scale = _bounded_sqrt(alpha), _bounded_sqrt(1 - alpha)
    mixed = signal_scale * x.astype(dtype) + noise_scale * jnp.asarray(noise).astype(dtype)
    return mixed.astype(x.dtype)


def denoise(
    params: Params, config: PolicyConfig, x: Float[AnyArray, "b n d"]
) -> Float[Array, "b n d"]:
    """Denoises each token separately, Eq. (14): X^ = Denoise(X~; mask = diag).

    Under the diagonal mask the softmax has a single entry. Attention is then the linear map
    W_o W_v LN(x), which needs no queries and keys. The block is initialized as the identity. Only
    training uses it; at inference the language model reads the selected tokens unchanged.
    """
    weights, dtype = params["denoiser"], jnp.asarray(x).dtype
    x = jnp.asarray(x, layers.compute_dtype(config, dtype))
    value = layers.dense(weights["value"], layers.layer_norm(weights["norm1"], x))
    x = x + layers.dense(weights["out"], value)
    x = x + layers.mlp(weights["mlp"], layers.layer_norm(weights["norm2"], x))
    return x.astype(dtype)


def gate_tokens(
    params: Params,
    config: PolicyConfig,
    key: Array,
    inputs: Inputs,
    alpha: Float[Array, "b n"],
) -> Float[Array, "b n w"]:
    """Mixes image tokens with noise by their gates, then denoises them, Eqs. (13) and (14).

    Args:
        params: policy weights.
        config: policy configuration.
        key: PRNG key; consumed.
        inputs: image tokens, their statistics, and deep features if the model has any.
        alpha: [b, n] gate of each token, in [0, 1].

    Returns:
        [b, n, w] tokens in the original feature space, zero in the padding. Deep features are
        gated like their token but not denoised; they are concatenated to the tokens.
    """
    image, real = jnp.asarray(inputs.image), inputs.real[..., None]
    x = jnp.where(real, standardise(image, inputs.stats), 0)
    denoised = restore(denoise(params, config, noise_gate(key, x, alpha)), inputs.stats)
    tokens = jnp.where(real, denoised, 0).astype(image.dtype)
    if inputs.deep is None:
        return tokens

    # Deep features are several times wider than the tokens. The backward pass samples their noise
    # again instead of storing it.
    @jax.checkpoint
    def gate_deep(deep: Float[Array, "b n D"], alpha: Float[Array, "b n"]) -> Float[Array, "b n D"]:
        x = jnp.where(real, standardise(deep, inputs.deep_stats), 0)
        noisy = restore(noise_gate(jax.random.fold_in(key, 1), x, alpha), inputs.deep_stats)
        return jnp.where(real, noisy, 0).astype(image.dtype)

    return jnp.concatenate([tokens, gate_deep(jnp.asarray(inputs.deep), alpha)], axis=2)


@implicit_promotion()
def update_stats(
    stats: FeatureStats, x: Float[Array, "b n d"], mask: Bool[Array, "b n"] | None = None
) -> FeatureStats:
    """Updates running statistics of features with a batch (Chan et al., 1979).

    The result does not depend on how the features are divided into batches.

    Args:
        stats: statistics of the previous batches.
        x: [b, n, d] features.
        mask: [b, n] True at real tokens; None marks all tokens as real.

    Returns:
        The statistics of all batches.

    Raises:
        ValueError: the features have another width than the statistics.
    """
    if x.ndim != 3 or x.shape[2] != len(stats.mean):
        raise ValueError(f"x is of shape {x.shape}, expected (b, n, {len(stats.mean)})")
    weight = jnp.ones(x.shape[:2], bool) if mask is None else mask
    weight = weight.astype(jnp.float32)
    x = jnp.where(weight[..., None] > 0, x, 0).astype(jnp.float32)
    batch_count = jnp.sum(weight)
    divisor = jnp.maximum(batch_count, 1)
    batch_mean = jnp.einsum("bnd,bn->d", x, weight) / divisor
    batch_var = jnp.einsum("bnd,bn->d", (x - batch_mean) ** 2, weight) / divisor
    total_count = jnp.maximum(stats.count + batch_count, 1)
    fraction, delta = batch_count / total_count, batch_mean - stats.mean
    variance_within = (1 - fraction) * stats.var + fraction * batch_var
    variance_between = fraction * (1 - fraction) * delta**2
    has_tokens = batch_count > 0
    return FeatureStats(
        mean=jnp.where(has_tokens, stats.mean + fraction * delta, stats.mean),
        var=jnp.where(has_tokens, variance_within + variance_between, stats.var),
        count=stats.count + batch_count,
    )


def standardise(x: Float[Array, "b n d"], stats: FeatureStats | None) -> Float[Array, "b n d"]:
    """Returns (x - mean) / std per channel in float32; x itself if there are no statistics."""
    if stats is None:
        return x
    return (x.astype(jnp.float32) - stats.mean) * jax.lax.rsqrt(stats.var + 1e-6)


def restore(z: Float[Array, "b n d"], stats: FeatureStats | None) -> Float[Array, "b n d"]:
    """Returns z * std + mean per channel; the inverse of `standardise`."""
    if stats is None:
        return z
    return z * jnp.sqrt(stats.var + 1e-6) + stats.mean
