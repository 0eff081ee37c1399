"""Token budgets: limits of a training batch, k of SoftTopK, and the price of a token."""

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.scores import expected_count
from stepprune_jax.policy.trajectory import Limits, Trajectory, count_at_bias


def draw_limits(
    key: Array,
    config: PolicyConfig,
    num_tokens: Int[Array, "b"],
    steps: Int[Array, "b"] | int,
) -> tuple[Limits, Bool[Array, "b"]]:
    """Draws the limits of a training batch, and which of its rows stop by themselves.

    `config.batch_budget` is the rule. `"own"` leaves the count to the policy. `"random"` gives
    every row an exact budget, log-uniform over `config.random_budget` times N, which teaches the
    order at every budget. `"mix"` does so for every other row, so that order and stop are learned
    together. `"probe"` does so for all rows and counts all of them as stopping by themselves.

    Args:
        key: PRNG key; consumed.
        config: policy configuration.
        num_tokens: N of each row, without its padding.
        steps: T_max, of all rows or of each.
    """
    batch = num_tokens.shape[0]
    low, high = (math.log(share) for share in config.random_budget)
    share = jnp.exp(jax.random.uniform(key, (batch,), minval=low, maxval=high))
    drawn = jnp.clip(jnp.round(share * num_tokens).astype(jnp.int32), 1, steps)
    own = {
        "own": jnp.ones(batch, bool),
        "random": jnp.zeros(batch, bool),
        "probe": jnp.ones(batch, bool),
        "mix": jnp.arange(batch) % 2 == 0,
    }[config.batch_budget]
    free = own & (config.batch_budget != "probe")
    least = jnp.where(free, jnp.minimum(config.min_tokens, steps), drawn)
    return Limits(least, jnp.where(free, steps, drawn)), own


def draw_log_prices(key: Array, config: PolicyConfig, own: Bool[Array, "b"]) -> Float[Array, "b"]:
    """Draws the log of each row's token price over lambda, uniform in +-`config.price_range`.

    The same number is added to the row's stop logits. At the stop's optimum the gain of the next
    token equals its price, so the margin learns minus the logarithm of that gain, and a stop bias
    at inference acts as a price.

    Args:
        key: PRNG key; consumed.
        config: policy configuration.
        own: rows that stop by themselves; the others pay nothing and get 0.
    """
    drawn = jax.random.uniform(key, own.shape, minval=-1.0, maxval=1.0) * config.price_range
    return jnp.where(own, drawn, 0.0)


def update_running_count(
    running: ArrayLike, count: Int[Array, "b"], own: Bool[Array, "b"], decay: ArrayLike = 0.9
) -> Float[Array, ""]:
    """Updates the running mean of the hard count of rows that stop by themselves, Eq. (12).

    Args:
        running: mean so far, never NaN; 0 before the first update, which takes the batch's mean.
        count: K of each row.
        own: rows to include.
        decay: weight of the past.
    """
    running, rows = jnp.asarray(running), jnp.sum(own)
    mean = jnp.sum(jnp.where(own, count, 0)) / jnp.maximum(rows, 1)
    merged = jnp.where(running > 0, decay * running + (1 - decay) * mean, mean)
    return jnp.where(rows > 0, merged, running).astype(jnp.float32)


def differentiable_count(config: PolicyConfig, trajectory: Trajectory) -> Float[Array, "b"]:
    """Returns a surrogate of the count for gradients: E[K], or a probe's last decisions.

    The latter are the probabilities of continuing, sigmoid(-margin / stop_temperature), averaged
    over the last `config.probe_window` of the budget, times `config.probe_weight`. Their gradient
    is (dL/dk + price), the cost of one more token at the budget: a policy learns to continue where
    the language-model loss falls by more than the price, at that count or, with a window of 1/2, at
    up to twice that count. (Where the gain of tokens grows at first, as in a vote, the next token
    alone is never worth its price.) Every count is probed, including those the policy would never
    reach.
    """
    if config.batch_budget != "probe":
        return expected_count(trajectory.stop_prob)
    step = jnp.arange(trajectory.margin.shape[1])
    count = trajectory.count[:, None]
    first = (1 - config.probe_window) * count
    asked = (step >= config.min_tokens) & (step >= first) & (step <= count)
    go_on = jax.nn.sigmoid(-trajectory.margin / config.stop_temperature)
    total, asked_times = jnp.sum(jnp.where(asked, go_on, 0), axis=1), jnp.sum(asked, axis=1)
    return config.probe_weight * total / jnp.maximum(asked_times, 1)


@jax.custom_vjp
def bound_gradient(x: Float[Array, "*b"], bound: ArrayLike) -> Float[Array, "*b"]:
    """Returns x, with its gradient clipped elementwise to +-`bound`."""
    del bound
    return x


bound_gradient.defvjp(
    lambda x, bound: (x, bound),
    lambda bound, cotangent: (jnp.clip(cotangent, -bound, bound).astype(cotangent.dtype), None),
)


def soft_budget(
    config: PolicyConfig,
    trajectory: Trajectory,
    own: Bool[Array, "b"],
    running: ArrayLike,
    num_tokens: Int[Array, "b"],
) -> Float[Array, "b"]:
    """Returns k of Eq. (12) for each row; rows with an exact budget always use that budget.

    Args:
        config: policy configuration. `soft_budget="straight_through"` lets the language-model loss
            tell what one more token is worth for this image; `"per_sample"` is the same value
            without gradient; `"batch_mean"` is the paper's running mean, at least 1, through which
            the loss cannot change any single count.
        trajectory: selection of the batch.
        own: rows that stop by themselves.
        running: from `update_running_count`.
        num_tokens: N of each row, without its padding.
    """
    hard = trajectory.count.astype(trajectory.stop_prob.dtype)
    soft = differentiable_count(config, trajectory)
    # The value of a token is heavy-tailed: a few rows that the model gets wrong outweigh the rest.
    rows = jnp.maximum(num_tokens, 1) * num_tokens.shape[0]
    through = bound_gradient(soft - jax.lax.stop_gradient(soft), config.gain_bound / rows)
    own_budget = {
        "straight_through": hard + through,
        "per_sample": hard,
        "batch_mean": jnp.full_like(hard, jnp.maximum(running, 1)),
    }[config.soft_budget]
    return jnp.where(own, own_budget, hard)


def dual_ascent(
    length_weight: ArrayLike,
    mean_count: ArrayLike,
    target: ArrayLike,
    *,
    num_tokens: int,
    rate: ArrayLike = 1.0,
) -> Float[Array, ""]:
    """Takes one step of dual ascent on lambda towards a target mean count.

    lambda <- max(0, lambda + rate (mean K - target) / N): the price rises while the policy spends
    more than the target.

    Args:
        length_weight: lambda.
        mean_count: mean K of the batch.
        target: target mean K.
        num_tokens: N.
        rate: step size.
    """
    return jnp.maximum(0.0, length_weight + rate * jnp.subtract(mean_count, target) / num_tokens)


def calibrate_stop_bias(
    margin: Float[Array, "b t"],
    target: ArrayLike,
    *,
    min_tokens: int = 1,
    max_bias: ArrayLike = 100.0,
) -> Float[Array, ""]:
    """Finds the stop bias at which the mean count meets `target`, bisecting recorded margins.

    The mean count falls in steps as the bias grows: the result meets the target as closely as the
    sample allows. A target outside the policy's range gives the nearer bound.

    Args:
        margin: `Trajectory.margin` of rollouts on a validation split, without an exact budget.
        target: target mean K.
        min_tokens: as in `select`.
        max_bias: bound on the magnitude of the result.
    """

    def halve(_, bracket):
        low, high = bracket
        middle = 0.5 * (low + high)
        above = jnp.mean(count_at_bias(margin, middle, min_tokens).astype(low.dtype)) > target
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    bound = jnp.asarray(max_bias, margin.dtype)
    low, high = jax.lax.fori_loop(0, 60, halve, (-bound, bound))
    return 0.5 * (low + high)
