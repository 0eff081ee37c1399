"""Soft scores of a trajectory: how much each token was pointed at, Eqs. (10)-(11)."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stepprune_jax.policy.base import AnyArray, Trajectory
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.jax_settings import implicit_promotion
from stepprune_jax.policy.layers import MASKED

# tau of Eq. (12) at the start of training, where it anneals.
POLARISATION_START = 2.0


def _exclusive(x: Float[Array, "b t"], first: float) -> Float[Array, "b t"]:
    """Shifts by one step, starting with `first`."""
    return jnp.concatenate([jnp.full_like(x[:, :1], first), x[:, :-1]], axis=1)


def alive_probability(stop_prob: Float[AnyArray, "b t"]) -> Float[Array, "b t"]:
    """A_t = prod_{u < t} (1 - p_u(stop)), the probability of reaching step t, Eq. (10)."""
    return jnp.cumprod(_exclusive(1 - jnp.asarray(stop_prob), 1.0), axis=1)


def expected_count(stop_prob: Float[AnyArray, "b t"]) -> Float[Array, "b"]:
    """E[K] = sum_t A_t (1 - p_t(stop)), the expected count if the stop were drawn at random."""
    return jnp.sum(jnp.cumprod(1 - jnp.asarray(stop_prob), axis=1), axis=1)


def _last(x: Float[Array, "b t n"], open_step: Bool[Array, "b t"]) -> Float[Array, "b n"]:
    """Returns the last step at which a token could still be taken."""
    at = open_step.shape[1] - 1 - jnp.argmax(open_step[:, ::-1], axis=1)
    return jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]


def _discounts(aggregation: str, steps: int, decay: ArrayLike) -> Float[Array, "t"]:
    """log beta^t for t = 1, ..., T; zero unless scores are discounted."""
    base = jnp.log(decay) if aggregation == "discounted" else 0.0
    return base * jnp.arange(1, steps + 1)


def soft_scores(
    prob: Float[AnyArray, "b t n"],
    stop_prob: Float[AnyArray, "b t"],
    *,
    decay: ArrayLike,
    aggregation: str = "discounted",
) -> Float[Array, "b n"]:
    """s_i = sum_t A_t p_t(i) beta^t >= 0, Eq. (11).

    The ablations of Table 4 (b) are `"alive"` (beta = 1), `"uniform"` (A_t = 1 as well) and
    `"last"` (p_T alone, T a row's last step before its bound).
    """
    prob, stop_prob = jnp.asarray(prob), jnp.asarray(stop_prob)
    if aggregation == "last":
        return _last(prob, jnp.max(prob, axis=2) > 0)
    weights = jnp.exp(_discounts(aggregation, prob.shape[1], decay)).astype(prob.dtype)
    alive = 1.0 if aggregation == "uniform" else alive_probability(stop_prob)
    return jnp.einsum("btn,bt->bn", prob, jnp.broadcast_to(alive * weights, prob.shape[:2]))


def log_scores(
    log_prob: Float[Array, "b t n"],
    log_continue: Float[Array, "b t"],
    *,
    decay: ArrayLike,
    aggregation: str = "discounted",
) -> Float[Array, "b n"]:
    """log of `soft_scores`, as a logsumexp over steps of log A_t + log p_t(i) + t log beta.

    No epsilon is added anywhere, so late tokens keep their order at any T_max. A token never
    pointed at scores -1e9, with zero gradient.
    """
    if aggregation == "last":
        return _last(log_prob, jnp.max(log_prob, axis=2) > 0.5 * MASKED)
    weights = _discounts(aggregation, log_prob.shape[1], decay).astype(log_prob.dtype)
    if aggregation != "uniform":
        weights = weights + jnp.cumsum(_exclusive(log_continue, 0.0), axis=1)
    terms = log_prob + jnp.broadcast_to(weights, log_continue.shape)[..., None]
    pointed_at = jnp.max(terms, axis=1) > 0.5 * MASKED
    return jnp.where(pointed_at, jax.nn.logsumexp(terms, axis=1), MASKED)


@implicit_promotion()
def trajectory_scores(config: PolicyConfig, trajectory: Trajectory) -> Float[Array, "b n"]:
    """Computes how much each token was pointed at, Eq. (11), in the space that `config` names.

    Log scores come from the trajectory's own logarithms: neither a saturated stop nor an
    underflowing probability is lost.

    Args:
        config: policy configuration; `score_space`, `aggregation` and `decay` are read.
        trajectory: result of `select`.

    Returns:
        Scores, or their logarithms; -1e9 for a token that is never pointed at.
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
    """Anneals from `start` at progress 0 to `end` from progress 1 on, by a cosine."""
    progress = jnp.clip(jnp.asarray(progress, jnp.float32), 0, 1)
    return end + (start - end) * 0.5 * (1 + jnp.cos(jnp.pi * progress))


def polarisation_temperature(config: PolicyConfig, progress: ArrayLike) -> ArrayLike:
    """Returns tau of Eq. (12) at a share `progress` of training."""
    if not config.polarisation_share:
        return config.polarisation_temperature
    share = progress / config.polarisation_share
    return cosine_anneal(POLARISATION_START, config.polarisation_temperature, share)
