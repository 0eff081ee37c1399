"""Soft scores of a trajectory, Eqs. (10)-(11): discounted pointer probabilities of each token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stepprune_jax.policy.base import AnyArray, Trajectory
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.jax_settings import implicit_promotion
from stepprune_jax.policy.layers import MASKED

# tau of Eq. (12) at the start of its annealing: with 2, gates of all tokens are similar.
POLARISATION_START = 2.0


def _shift_steps(x: Float[Array, "b t"], first: float) -> Float[Array, "b t"]:
    """Shifts x by one step: the result starts with `first` and drops the last step."""
    return jnp.concatenate([jnp.full_like(x[:, :1], first), x[:, :-1]], axis=1)


def alive_probability(stop_prob: Float[AnyArray, "b t"]) -> Float[Array, "b t"]:
    """Returns A_t = prod_{u < t} (1 - p_u(stop)), the probability of reaching step t, Eq. (10)."""
    return jnp.cumprod(_shift_steps(1 - jnp.asarray(stop_prob), 1.0), axis=1)


def expected_count(stop_prob: Float[AnyArray, "b t"]) -> Float[Array, "b"]:
    """Returns E[K] = sum_t A_t (1 - p_t(stop)), the expected count if the stop is sampled."""
    return jnp.sum(jnp.cumprod(1 - jnp.asarray(stop_prob), axis=1), axis=1)


def _take_last_step(
    x: Float[Array, "b t n"], has_choice: Bool[Array, "b t"]
) -> Float[Array, "b n"]:
    """Returns the values of x at the last step of each row with `has_choice`."""
    last_step = has_choice.shape[1] - 1 - jnp.argmax(has_choice[:, ::-1], axis=1)
    return jnp.take_along_axis(x, last_step[:, None, None], axis=1)[:, 0]


def _log_discounts(aggregation: str, steps: int, decay: ArrayLike) -> Float[Array, "t"]:
    """Returns log beta^t for t = 1, ..., T; zeros unless `aggregation` is "discounted"."""
    base = jnp.log(decay) if aggregation == "discounted" else 0.0
    return base * jnp.arange(1, steps + 1)


def soft_scores(
    prob: Float[AnyArray, "b t n"],
    stop_prob: Float[AnyArray, "b t"],
    *,
    decay: ArrayLike,
    aggregation: str = "discounted",
) -> Float[Array, "b n"]:
    """Sums the discounted probabilities of each token, Eq. (11): s_i = sum_t A_t p_t(i) beta^t.

    A_t is the probability that the episode has not ended before step t.

    Args:
        prob: [b, t, n] p_t(i), the probability that step t chooses token i.
        stop_prob: [b, t] p_t(stop), the probability that the episode ends before step t.
        decay: beta, the discount per step.
        aggregation: `"discounted"`, or an ablation of Table 4 (b): `"alive"` sets beta = 1,
            `"uniform"` also sets A_t = 1, and `"last"` returns p_T, with T the row's last step
            before its bound.

    Returns:
        [b, n] scores, at least 0.
    """
    prob, stop_prob = jnp.asarray(prob), jnp.asarray(stop_prob)
    if aggregation == "last":
        return _take_last_step(prob, jnp.max(prob, axis=2) > 0)
    weights = jnp.exp(_log_discounts(aggregation, prob.shape[1], decay)).astype(prob.dtype)
    alive = 1.0 if aggregation == "uniform" else alive_probability(stop_prob)
    return jnp.einsum("btn,bt->bn", prob, jnp.broadcast_to(alive * weights, prob.shape[:2]))


def log_scores(
    log_prob: Float[Array, "b t n"],
    log_continue: Float[Array, "b t"],
    *,
    decay: ArrayLike,
    aggregation: str = "discounted",
) -> Float[Array, "b n"]:
    """Computes the log of `soft_scores`: logsumexp_t(log A_t + log p_t(i) + t log beta).

    The logarithms have no epsilon, so late tokens keep their order at any T_max. A token that no
    step can point at scores -1e9, with zero gradient.

    Args:
        log_prob: [b, t, n] log p_t(i).
        log_continue: [b, t] log(1 - p_t(stop)).
        decay: beta.
        aggregation: as in `soft_scores`.

    Returns:
        [b, n] log-scores.
    """
    if aggregation == "last":
        return _take_last_step(log_prob, jnp.max(log_prob, axis=2) > 0.5 * MASKED)
    log_weights = _log_discounts(aggregation, log_prob.shape[1], decay).astype(log_prob.dtype)
    if aggregation != "uniform":
        log_weights = log_weights + jnp.cumsum(_shift_steps(log_continue, 0.0), axis=1)
    terms = log_prob + jnp.broadcast_to(log_weights, log_continue.shape)[..., None]
    is_reachable = jnp.max(terms, axis=1) > 0.5 * MASKED
    return jnp.where(is_reachable, jax.nn.logsumexp(terms, axis=1), MASKED)


@implicit_promotion()
def trajectory_scores(config: PolicyConfig, trajectory: Trajectory) -> Float[Array, "b n"]:
    """Computes the score of each token, Eq. (11), or its logarithm.

    Log-scores are computed from the trajectory's log-probabilities, so they stay accurate if a stop
    saturates or a probability underflows.

    Args:
        config: policy configuration; `score_space`, `aggregation` and `decay` are used.
        trajectory: result of `select`.

    Returns:
        [b, n] scores if `config.score_space` is "linear", log-scores if it is "log". The log-score
        of a token that no step can point at is -1e9.
    """
    if config.score_space == "log":
        return log_scores(
            trajectory.log_prob,
            trajectory.log_continue,
            decay=config.decay,
            aggregation=config.aggregation,
        )
    return soft_scores(
        trajectory.prob,
        trajectory.stop_prob,
        decay=config.decay,
        aggregation=config.aggregation,
    )


def cosine_anneal(start: float, end: float, progress: ArrayLike) -> Float[Array, ""]:
    """Interpolates by a cosine from `start` at progress 0 to `end` at progress 1 and above."""
    progress = jnp.clip(jnp.asarray(progress, jnp.float32), 0, 1)
    return end + (start - end) * 0.5 * (1 + jnp.cos(jnp.pi * progress))


def polarisation_temperature(config: PolicyConfig, progress: ArrayLike) -> ArrayLike:
    """Returns tau of SoftTopK, Eq. (12), given the completed fraction of training."""
    if not config.polarisation_share:
        return config.polarisation_temperature
    anneal_progress = progress / config.polarisation_share
    return cosine_anneal(POLARISATION_START, config.polarisation_temperature, anneal_progress)
