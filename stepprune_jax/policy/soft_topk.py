"""SoftTopK: a differentiable top-k indicator that sums to k exactly, Eq. (12).

alpha_i = F(s_i / tau - b) with F the Laplace distribution function and b the one threshold for
which sum_i alpha_i = k, in closed form: LapSum (Struski et al., 2025, arXiv:2503.06242). With
density l_i at the solution and q = l / sum(l)

  d alpha_i / d s_j = (l_i [i = j] - l_i q_j) / tau
  d alpha_i / d k   = q_i
  d alpha_i / d tau = l_i (sum_j q_j s_j - s_i) / tau^2

so the backward pass is O(n) and does not differentiate the search for b.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stepprune_jax.policy.jax_settings import implicit_promotion
from stepprune_jax.policy.layers import score_dtype

# Sorts below every score and has no mass beside any of them.
_ABSENT = -1e30


def _cdf(u: Array) -> Array:
    tail = 0.5 * jnp.exp(-jnp.abs(u))
    return jnp.where(u <= 0, tail, 1 - tail)


def _log_density(u: Array) -> Array:
    return -jnp.abs(u) - jnp.log(2.0).astype(u.dtype)


def cumlogsumexp(z: Float[Array, "*b n"], reverse: bool = False) -> Float[Array, "*b n"]:
    """Returns logarithms of the running sums of e^z along the last axis; differentiable."""
    axis = z.ndim - 1

    def scan(z):
        return jax.lax.associative_scan(jnp.logaddexp, z, reverse=reverse, axis=axis)

    def window(z):
        return jax.lax.cumlogsumexp(z, axis=axis, reverse=reverse)

    # The window form, fused with its neighbours, takes XLA's TPU compiler minutes.
    return jax.lax.platform_dependent(z, tpu=scan, default=window)


def _threshold(z: Float[Array, "*b n"], k: Float[Array, "*b 1"]) -> Float[Array, "*b 1"]:
    """Closed form: between neighbouring scores the total mass is A e^b + B e^-b + C in b."""
    n = z.shape[-1]
    z = jnp.sort(z, axis=-1)
    below = cumlogsumexp(z)  # log sum_{j <= i} e^z_j
    above = cumlogsumexp(-z, reverse=True)  # log sum_{j >= i} e^-z_j
    # Strictly above, with an empty sum after the last score.
    above = jnp.concatenate([above[..., 1:], jnp.full_like(z[..., :1], _ABSENT)], axis=-1)
    rank = jnp.arange(1, n + 1)
    mass = 0.5 * jnp.exp(below - z) + (n - rank) - 0.5 * jnp.exp(above + z)  # total if b = z_i
    j = jnp.sum(mass >= k, axis=-1, keepdims=True)  # b lies between z_j and z_{j+1}, from 1
    at = jnp.maximum(j - 1, 0)
    low = jnp.where(j > 0, jnp.take_along_axis(below, at, axis=-1), _ABSENT)
    first = jax.nn.logsumexp(-z, axis=-1, keepdims=True)
    high = jnp.where(j > 0, jnp.take_along_axis(above, at, axis=-1), first)
    # e^b solves A x^2 - 2 m x - B = 0 with A = e^high, B = e^low, m = n - j - k; the root is taken
    # in the form that does not cancel for the sign of m.
    m = (n - j - k).astype(z.dtype)
    root = jnp.sqrt(m**2 + jnp.exp(low + high))
    tiny = jnp.finfo(z.dtype).tiny
    rising = jnp.log(jnp.maximum(m + root, tiny)) - high
    falling = low - jnp.log(jnp.maximum(root - m, tiny))
    return jnp.where(m > 0, rising, falling)


def _offsets(scores, k, temperature, where) -> Float[Array, "*b n"]:
    """u_i = s_i / tau - b; far below for absent tokens."""
    z = scores / temperature
    # b is found relative to a nearby score, for accuracy in float32.
    near = jnp.max(jnp.where(where, z, _ABSENT), axis=-1, keepdims=True)
    count = jnp.sum(where, axis=-1, keepdims=True)
    inside = (k > 0) & (k < count)
    ranked = -jnp.sort(-jnp.where(where, z, _ABSENT), axis=-1)
    at = jnp.clip(jnp.ceil(k).astype(jnp.int32) - 1, 0, z.shape[-1] - 1)
    near = jnp.where(inside, jnp.take_along_axis(ranked, at, axis=-1), near)
    z = jnp.where(where, z - near, _ABSENT)
    solvable = jnp.where(inside, k, 0.5 * count)
    b = _threshold(z, solvable)
    for _ in range(2):  # Newton steps restore the last digits of float32.
        u = z - b
        excess = jnp.sum(jnp.where(where, _cdf(u), 0), axis=-1, keepdims=True) - solvable
        slope = jnp.sum(jnp.where(where, jnp.exp(_log_density(u)), 0), -1, keepdims=True)
        b = b + jnp.clip(excess / jnp.maximum(slope, jnp.finfo(z.dtype).tiny), -1, 1)
    return z - b


@jax.custom_vjp
def _soft_topk(scores, k, temperature, where):
    return _soft_topk_fwd(scores, k, temperature, where)[0]


def _soft_topk_fwd(scores, k, temperature, where):
    u = _offsets(scores, k, temperature, where)
    count = jnp.sum(where, axis=-1, keepdims=True)
    alpha = jnp.where(k >= count, 1.0, jnp.where(k <= 0, 0.0, _cdf(u)))
    return jnp.where(where, alpha, 0.0).astype(u.dtype), (scores, k, temperature, where, u)


@implicit_promotion()
def _soft_topk_bwd(residuals, g):
    scores, k, temperature, where, u = residuals
    inside = (k > 0) & (k < jnp.sum(where, axis=-1, keepdims=True)) & where
    g = jnp.where(inside, g, 0.0)
    log_density = jnp.where(inside, _log_density(u), _ABSENT)
    density = jnp.where(inside, jnp.exp(log_density), 0.0)
    # A softmax, so that q is right even where every density underflows.
    q = jnp.where(inside, jax.nn.softmax(log_density, axis=-1), 0.0)
    mean_g = jnp.sum(q * g, axis=-1, keepdims=True)
    scores_bar = density * (g - mean_g) / temperature
    mean_s = jnp.sum(jnp.where(inside, q * scores, 0.0), axis=-1, keepdims=True)
    shift = jnp.where(inside, density * (mean_s - scores), 0.0)
    temperature_bar = jnp.sum(g * shift, axis=-1, keepdims=True) / temperature**2
    return scores_bar, mean_g, temperature_bar, None


_soft_topk.defvjp(_soft_topk_fwd, _soft_topk_bwd)


@implicit_promotion()
def soft_topk(
    scores: Float[ArrayLike, "*b n"],
    k: ArrayLike,
    temperature: ArrayLike,
    *,
    where: Bool[ArrayLike, "*b n"] | None = None,
) -> Float[Array, "*b n"]:
    """Polarises scores into alpha in [0, 1] with sum(alpha) = k, Eq. (12).

    Differentiable in scores, k and temperature. Adding a constant to the scores changes nothing;
    temperature -> 0 gives the hard top-k indicator, ties sharing their mass equally.

    Args:
        scores: s, or log s; finite.
        k: mass to distribute, real; a number or one per row. 0 gives zeros and the number of tokens
            gives ones, both without gradient.
        temperature: tau > 0; a number or one per row.
        where: True at tokens that take part; the others get exactly 0.

    Returns:
        alpha in the dtype of the scores, at least float32.
    """
    scores = jnp.asarray(scores)
    dtype, batch = score_dtype(scores.dtype), scores.shape[:-1]
    mask = jnp.ones(scores.shape, bool) if where is None else jnp.asarray(where)

    def column(value: ArrayLike) -> Array:
        return jnp.broadcast_to(jnp.asarray(value, dtype), batch)[..., None]

    return _soft_topk(scores.astype(dtype), column(k), column(temperature), mask)
