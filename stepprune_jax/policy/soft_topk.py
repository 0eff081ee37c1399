"""SoftTopK: a differentiable top-k indicator that sums to k exactly, Eq. (12).

alpha_i = F(s_i / tau - b), where F is the Laplace distribution function and b the threshold that
makes sum_i alpha_i = k. LapSum (Struski et al., 2025, arXiv:2503.06242) gives b in closed form.
With the density l_i at the solution and q = l / sum(l), the derivatives are

  d alpha_i / d s_j = (l_i [i = j] - l_i q_j) / tau
  d alpha_i / d k   = q_i
  d alpha_i / d tau = l_i (sum_j q_j s_j - s_i) / tau^2

so the backward pass is O(n) and does not differentiate the computation of b.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stepprune_jax.policy.jax_settings import implicit_promotion
from stepprune_jax.policy.layers import score_dtype

# Score of masked tokens: it sorts below every finite score and contributes no mass.
_ABSENT = -1e30


def _laplace_cdf(u: Array) -> Array:
    """Returns the Laplace distribution function F(u)."""
    tail = 0.5 * jnp.exp(-jnp.abs(u))
    return jnp.where(u <= 0, tail, 1 - tail)


def _laplace_log_density(u: Array) -> Array:
    """Returns log F'(u) = -|u| - log 2."""
    return -jnp.abs(u) - jnp.log(2.0).astype(u.dtype)


def cumlogsumexp(z: Float[Array, "*b n"], reverse: bool = False) -> Float[Array, "*b n"]:
    """Computes log(cumsum(exp(z))) along the last axis; differentiable.

    Args:
        z: [..., n] values.
        reverse: whether to sum from the end of the axis.

    Returns:
        [..., n] logarithms of the cumulative sums.
    """
    axis = z.ndim - 1

    def scan(z):
        return jax.lax.associative_scan(jnp.logaddexp, z, reverse=reverse, axis=axis)

    def reduce_window(z):
        return jax.lax.cumlogsumexp(z, axis=axis, reverse=reverse)

    # XLA's TPU compiler takes minutes for a `cumlogsumexp` that is fused with other operations.
    return jax.lax.platform_dependent(z, tpu=scan, default=reduce_window)


def _threshold(z: Float[Array, "*b n"], k: Float[Array, "*b 1"]) -> Float[Array, "*b 1"]:
    """Returns the threshold b at which the gates F(z_i - b) sum to k, in closed form.

    Between two neighboring sorted scores z_j <= b <= z_{j+1}, the sum of the gates (the mass) is
    n - j + (e^low e^-b - e^high e^b) / 2 with low = log sum_{i <= j} e^z_i and
    high = log sum_{i > j} e^-z_i.

    Args:
        z: scores divided by tau.
        k: target sum of the gates.

    Returns:
        The threshold b of each row.
    """
    n = z.shape[-1]
    z = jnp.sort(z, axis=-1)
    log_sum_below = cumlogsumexp(z)  # at i: log sum_{j <= i} e^z_j
    log_sum_above = cumlogsumexp(-z, reverse=True)  # at i: log sum_{j >= i} e^-z_j
    # Shifted to sums over j > i. The sum after the last score is empty.
    empty_sum = jnp.full_like(z[..., :1], _ABSENT)
    log_sum_above = jnp.concatenate([log_sum_above[..., 1:], empty_sum], axis=-1)
    rank = jnp.arange(1, n + 1)
    # The total mass if b = z_i, for each i.
    mass = 0.5 * jnp.exp(log_sum_below - z) + (n - rank) - 0.5 * jnp.exp(log_sum_above + z)
    j = jnp.sum(mass >= k, axis=-1, keepdims=True)  # b lies between z_j and z_{j+1}, from 1
    index = jnp.maximum(j - 1, 0)
    low = jnp.where(j > 0, jnp.take_along_axis(log_sum_below, index, axis=-1), _ABSENT)
    sum_of_all = jax.nn.logsumexp(-z, axis=-1, keepdims=True)
    high = jnp.where(j > 0, jnp.take_along_axis(log_sum_above, index, axis=-1), sum_of_all)
    # x = e^b solves e^high x^2 - 2 m x - e^low = 0 with m = n - j - k. Two forms of the positive
    # root avoid cancellation, one for each sign of m.
    m = (n - j - k).astype(z.dtype)
    root = jnp.sqrt(m**2 + jnp.exp(low + high))
    tiny = jnp.finfo(z.dtype).tiny
    root_of_positive_m = jnp.log(jnp.maximum(m + root, tiny)) - high
    root_of_negative_m = low - jnp.log(jnp.maximum(root - m, tiny))
    return jnp.where(m > 0, root_of_positive_m, root_of_negative_m)


def _offsets(
    scores: Float[Array, "*b n"],
    k: Float[Array, "*b 1"],
    temperature: Float[Array, "*b 1"],
    where: Bool[Array, "*b n"],
) -> Float[Array, "*b n"]:
    """Returns the arguments u_i = s_i / tau - b of the gates F(u_i).

    Args:
        scores: s, one score per token.
        k: sum of the gates of each row.
        temperature: tau of each row.
        where: True at tokens that take part.

    Returns:
        u, with a large negative number at all other tokens.
    """
    z = scores / temperature
    count = jnp.sum(where, axis=-1, keepdims=True)
    is_soft = (k > 0) & (k < count)
    # Scores are shifted by the k-th largest score, which is close to b, for accuracy in float32.
    descending = -jnp.sort(-jnp.where(where, z, _ABSENT), axis=-1)
    index = jnp.clip(jnp.ceil(k).astype(jnp.int32) - 1, 0, z.shape[-1] - 1)
    kth_score = jnp.take_along_axis(descending, index, axis=-1)
    shift = jnp.where(is_soft, kth_score, descending[..., :1])
    z = jnp.where(where, z - shift, _ABSENT)
    # Where k is 0 or the number of tokens, `_soft_topk_fwd` replaces the result.
    solvable_k = jnp.where(is_soft, k, 0.5 * count)
    b = _threshold(z, solvable_k)
    for _ in range(2):  # Newton steps restore the last digits of float32.
        u = z - b
        mass = jnp.sum(jnp.where(where, _laplace_cdf(u), 0), axis=-1, keepdims=True)
        slope = jnp.sum(jnp.where(where, jnp.exp(_laplace_log_density(u)), 0), -1, keepdims=True)
        newton_step = (mass - solvable_k) / jnp.maximum(slope, jnp.finfo(z.dtype).tiny)
        b = b + jnp.clip(newton_step, -1, 1)
    return z - b


@jax.custom_vjp
def _soft_topk(scores, k, temperature, where):
    """Computes `soft_topk` for a broadcast k and temperature of shape [..., 1]."""
    return _soft_topk_fwd(scores, k, temperature, where)[0]


def _soft_topk_fwd(scores, k, temperature, where):
    """Returns the gates, and the residuals of the backward pass."""
    u = _offsets(scores, k, temperature, where)
    count = jnp.sum(where, axis=-1, keepdims=True)
    alpha = jnp.where(k >= count, 1.0, jnp.where(k <= 0, 0.0, _laplace_cdf(u)))
    return jnp.where(where, alpha, 0.0).astype(u.dtype), (scores, k, temperature, where, u)


@implicit_promotion()
def _soft_topk_bwd(residuals, cotangent):
    """Returns the cotangents of scores, k and temperature by the formulas of the module."""
    scores, k, temperature, where, u = residuals
    has_gradient = (k > 0) & (k < jnp.sum(where, axis=-1, keepdims=True)) & where
    cotangent = jnp.where(has_gradient, cotangent, 0.0)
    log_density = jnp.where(has_gradient, _laplace_log_density(u), _ABSENT)
    density = jnp.where(has_gradient, jnp.exp(log_density), 0.0)
    # A softmax keeps q accurate even if all densities underflow.
    q = jnp.where(has_gradient, jax.nn.softmax(log_density, axis=-1), 0.0)
    mean_cotangent = jnp.sum(q * cotangent, axis=-1, keepdims=True)
    scores_bar = density * (cotangent - mean_cotangent) / temperature
    mean_score = jnp.sum(jnp.where(has_gradient, q * scores, 0.0), axis=-1, keepdims=True)
    deviation = jnp.where(has_gradient, density * (mean_score - scores), 0.0)
    temperature_bar = jnp.sum(cotangent * deviation, axis=-1, keepdims=True) / temperature**2
    return scores_bar, mean_cotangent, temperature_bar, None


_soft_topk.defvjp(_soft_topk_fwd, _soft_topk_bwd)


@implicit_promotion()
def soft_topk(
    scores: Float[ArrayLike, "*b n"],
    k: ArrayLike,
    temperature: ArrayLike,
    *,
    where: Bool[ArrayLike, "*b n"] | None = None,
) -> Float[Array, "*b n"]:
    """Computes gates alpha in [0, 1] with sum(alpha) = k, Eq. (12).

    Differentiable in scores, k and temperature, and invariant to a constant added to the scores. As
    the temperature approaches 0, alpha approaches the hard top-k indicator; ties share their mass
    equally.

    Args:
        scores: [..., n] s, or log s; finite.
        k: real-valued sum of the gates; a number or one per row. 0 gives zeros and the number of
            tokens gives ones, both without gradient.
        temperature: tau > 0; a number or one per row.
        where: [..., n] True at tokens that take part; gates of other tokens are exactly 0. None
            includes all tokens.

    Returns:
        [..., n] alpha in the dtype of the scores, but at least float32.
    """
    scores = jnp.asarray(scores)
    dtype, batch = score_dtype(scores.dtype), scores.shape[:-1]
    mask = jnp.ones(scores.shape, bool) if where is None else jnp.asarray(where)

    def column(value: ArrayLike) -> Array:
        return jnp.broadcast_to(jnp.asarray(value, dtype), batch)[..., None]

    return _soft_topk(scores.astype(dtype), column(k), column(temperature), mask)
