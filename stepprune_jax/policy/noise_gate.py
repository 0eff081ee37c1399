"""Variance-preserving noise gate, Eq. (13), its ablations, and feature statistics."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from stepprune_jax.policy.checks import AnyArray, checked, require
from stepprune_jax.policy.layers import score_dtype


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


@checked
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
    wide = score_dtype(x.dtype)
    if noise is None:
        if key is None:
            raise ValueError("key is None, expected a PRNG key where no noise is given")
        noise = jax.random.normal(key, x.shape, wide)
    alpha = alpha.astype(wide)[..., None]
    kept, replaced = _bounded_sqrt(alpha), _bounded_sqrt(1 - alpha)
    return (kept * x.astype(wide) + replaced * jnp.asarray(noise).astype(wide)).astype(x.dtype)


def scale_gate(x: Float[Array, "b n d"], alpha: Float[Array, "b n"]) -> Float[Array, "b n d"]:
    """Ablation: x~ = alpha x."""
    return x * alpha[..., None].astype(x.dtype)


def apply_gate(
    gate: str, key: Array, x: Float[Array, "b n d"], alpha: Float[Array, "b n"]
) -> Float[Array, "b n d"]:
    """Applies the gate that `PolicyConfig.gate` names; `key` is consumed."""
    return noise_gate(key, x, alpha) if gate == "vp" else scale_gate(x, alpha)


class FeatureStats(NamedTuple):
    """Per-channel mean and variance of the frozen tower's features.

    Features of real towers are far from unit variance (CLIP has channels tens of times wider than
    others), so "variance-preserving" holds only after standardisation. The statistics are gathered
    once before training, then fixed, and saved with the policy.

    Attributes:
        mean: mean of each channel.
        var: variance of each channel.
        count: tokens seen.
    """

    mean: Float[Array, "d"]
    var: Float[Array, "d"]
    count: Float[Array, ""]

    @classmethod
    def start(cls, width: int) -> "FeatureStats":
        """Returns empty statistics: mean 0 and variance 1 until the first update."""
        return cls(jnp.zeros(width), jnp.ones(width), jnp.zeros(()))


def update_stats(
    stats: FeatureStats, x: Float[Array, "b n d"], mask: Bool[Array, "b n"] | None = None
) -> FeatureStats:
    """Merges a batch into running statistics (Chan et al., 1979), exact over any batching.

    Args:
        stats: statistics so far.
        x: features.
        mask: True at real tokens.

    Raises:
        ValueError: features of another width.
    """
    _require_width(x, stats)
    weight = jnp.ones(x.shape[:2]) if mask is None else mask.astype(jnp.float32)
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
    """(x - mean) / std per channel, in float32; a constant channel stays finite.

    Without statistics the features are returned unchanged. Raises a ValueError if their width is
    not that of the statistics.
    """
    if stats is None:
        return x
    _require_width(x, stats)
    return (x.astype(jnp.float32) - stats.mean) * jax.lax.rsqrt(stats.var + 1e-6)


def restore(z: Float[Array, "b n d"], stats: FeatureStats | None) -> Float[Array, "b n d"]:
    """Inverse of `standardise`."""
    if stats is None:
        return z
    return z * jnp.sqrt(stats.var + 1e-6) + stats.mean


def _require_width(x: Float[Array, "b n d"], stats: FeatureStats) -> None:
    """Raises if features are not as wide as the statistics, which would be broadcast or fail."""
    width = stats.mean.shape[-1]
    require(x.shape[-1] == width, "width of image", x.shape[-1], f"{width}, that of the statistics")
