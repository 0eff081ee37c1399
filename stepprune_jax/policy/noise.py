"""Noise gate, Eq. (13), denoiser, Eq. (14), and the statistics that standardise features."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from stepprune_jax.policy import layers
from stepprune_jax.policy.base import AnyArray, FeatureStats, Inputs, Params
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.jax_settings import implicit_promotion


@jax.custom_jvp
def _bounded_sqrt(x: Array) -> Array:
    """sqrt on [0, 1] whose derivative is that of sqrt(max(x, 1e-6)): at most 500.

    It has a custom rule because `sqrt(1 - alpha + eps)` does not survive compilation: XLA
    folds 1 + eps to 1 in float32, and alpha = 1 then gives inf * 0.
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
    """x~ = sqrt(alpha) x + sqrt(1 - alpha) eps, Eq. (13).

    alpha = 1 returns the token itself, alpha = 0 pure noise. The second moment is kept if x has
    unit variance per channel: see `standardise`. Gradients are finite at alpha 0 and 1.

    Args:
        key: PRNG key; consumed. Unused (and may be `None`) if `noise` is given.
        x: tokens, standardised.
        alpha: gate of each token, in [0, 1].
        noise: eps ~ N(0, I); drawn from `key` by default.

    Returns:
        Gated tokens in the dtype of `x`, mixed in at least float32.
    """
    x, alpha = jnp.asarray(x), jnp.asarray(alpha)
    wide = layers.score_dtype(x.dtype)
    if noise is None:
        if key is None:
            raise ValueError("key is None, expected a key, or the noise itself as `noise`")
        noise = jax.random.normal(key, x.shape, wide)
    alpha = alpha.astype(wide)[..., None]
    kept, replaced = _bounded_sqrt(alpha), _bounded_sqrt(1 - alpha)
    return (kept * x.astype(wide) + replaced * jnp.asarray(noise).astype(wide)).astype(x.dtype)


def denoise(
    params: Params, config: PolicyConfig, x: Float[AnyArray, "b n d"]
) -> Float[Array, "b n d"]:
    """X^ = Denoise(X~; mask = diag): each token is updated from itself alone.

    Under the diagonal mask the softmax has one entry, so attention is the linear map W_o W_v LN(x)
    and queries and keys do not exist. The block starts as the identity and is used in training
    only; at inference the LLM reads the selected tokens as they are.
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
    """Gates, denoises and restores the image tokens, Eqs. (13) and (14); zero in the padding.

    Deep features behind them, if there are any, are gated by the same gate and not denoised.
    """
    image, real = jnp.asarray(inputs.image), inputs.real[..., None]
    x = jnp.where(real, standardise(image, inputs.stats), 0)
    clean = restore(denoise(params, config, noise_gate(key, x, alpha)), inputs.stats)
    tokens = jnp.where(real, clean, 0).astype(image.dtype)
    if inputs.deep is None:
        return tokens

    # They are several times as wide as the tokens: a backward pass draws their noise again.
    @jax.checkpoint
    def gated(deep: Float[Array, "b n D"], alpha: Float[Array, "b n"]) -> Float[Array, "b n D"]:
        x = jnp.where(real, standardise(deep, inputs.deep_stats), 0)
        noisy = restore(noise_gate(jax.random.fold_in(key, 1), x, alpha), inputs.deep_stats)
        return jnp.where(real, noisy, 0).astype(image.dtype)

    return jnp.concatenate([tokens, gated(jnp.asarray(inputs.deep), alpha)], axis=2)


@implicit_promotion()
def update_stats(
    stats: FeatureStats, x: Float[Array, "b n d"], mask: Bool[Array, "b n"] | None = None
) -> FeatureStats:
    """Merges a batch into running statistics (Chan et al., 1979), exact over any batching.

    Args:
        stats: statistics so far.
        x: features.
        mask: True at real tokens.
    """
    if x.ndim != 3 or x.shape[2] != len(stats.mean):
        raise ValueError(f"x is of shape {x.shape}, expected (b, n, {len(stats.mean)})")
    weight = jnp.ones(x.shape[:2], bool) if mask is None else mask
    weight = weight.astype(jnp.float32)
    x = jnp.where(weight[..., None] > 0, x, 0).astype(jnp.float32)
    count = jnp.sum(weight)
    safe = jnp.maximum(count, 1)
    mean = jnp.einsum("bnd,bn->d", x, weight) / safe
    var = jnp.einsum("bnd,bn->d", (x - mean) ** 2, weight) / safe
    total = jnp.maximum(stats.count + count, 1)
    share, delta = count / total, mean - stats.mean
    spread = (1 - share) * stats.var + share * var + share * (1 - share) * delta**2
    changed = count > 0
    return FeatureStats(
        jnp.where(changed, stats.mean + share * delta, stats.mean),
        jnp.where(changed, spread, stats.var),
        stats.count + count,
    )


def standardise(x: Float[Array, "b n d"], stats: FeatureStats | None) -> Float[Array, "b n d"]:
    """(x - mean) / std per channel, in float32; unchanged without statistics."""
    if stats is None:
        return x
    return (x.astype(jnp.float32) - stats.mean) * jax.lax.rsqrt(stats.var + 1e-6)


def restore(z: Float[Array, "b n d"], stats: FeatureStats | None) -> Float[Array, "b n d"]:
    """Inverse of `standardise`."""
    if stats is None:
        return z
    return z * jnp.sqrt(stats.var + 1e-6) + stats.mean
