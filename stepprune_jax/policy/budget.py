"""Token budgets: limits of a training batch, k of SoftTopK, and the price of a token.

The price of a token is its part of the length penalty of Eq. (15). With
`PolicyConfig.batch_budget="probe"`, each training row (an image and its question) has a random
budget, the probe. The decisions of the learned stop near the end of that budget are then trained.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from stepprune_jax.policy.base import Trajectory
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.jax_settings import implicit_promotion
from stepprune_jax.policy.scores import expected_count
from stepprune_jax.policy.trajectory import count_at_bias, log_price_growth

# Range of random budgets as fractions of an image's N tokens, and the lower end at which annealing
# starts.
RANDOM_BUDGET, FIRST_BUDGET = (0.02, 0.5), 0.3
# A probe trains the stop by the decisions in the last quarter of the budget. Few decisions carry
# the gradient of the count, so it is multiplied by 10.
PROBE_WINDOW, PROBE_WEIGHT = 0.25, 10.0
# Fraction of training before which a probe does not train the stop, see `late_stop`.
STOP_FROM = 0.7
# Bound on each row's dL_LM/dk in the straight-through count, in nats per N tokens like lambda. The
# loss is assumed to be the mean over rows.
GAIN_BOUND = 10.0


def budget_range(
    final_range: tuple[float, float], anneal: float | int, progress: ArrayLike
) -> tuple[ArrayLike, float]:
    """Returns the range of random budgets at a point of training.

    Args:
        final_range: lower and upper end of the range at the end of training, as fractions of an
            image's tokens.
        anneal: fraction of training over which the lower end falls geometrically from
            `FIRST_BUDGET`; 0 returns `final_range` at any progress.
        progress: completed fraction of training.

    Returns:
        Lower and upper end of the range, as fractions of an image's tokens.
    """
    low, high = final_range
    if not anneal:
        return final_range
    initial_low = min(max(low, FIRST_BUDGET), high)
    remaining = 1 - jnp.clip(jnp.asarray(progress, jnp.float32) / anneal, 0, 1)
    return low * (initial_low / low) ** remaining, high


def draw_budgets(
    key: Array,
    num_tokens: Int[Array, "b"],
    max_budget: Int[Array, "b"] | int,
    fraction_range: tuple[ArrayLike, ArrayLike],
) -> Int[Array, "b"]:
    """Samples a number of tokens to keep for each row, log-uniform over a range.

    Args:
        key: PRNG key; consumed.
        num_tokens: [b] number of real tokens of each row.
        max_budget: largest budget, one for all rows or one per row.
        fraction_range: lower and upper end of the range, as fractions of `num_tokens`.

    Returns:
        [b] int32 budgets from 1 to `max_budget`.
    """
    low, high = map(jnp.log, fraction_range)
    log_fraction = jax.random.uniform(key, num_tokens.shape, jnp.float32, minval=low, maxval=high)
    budget = jnp.round(jnp.exp(log_fraction) * num_tokens).astype(jnp.int32)
    return jnp.clip(budget, 1, max_budget)


def draw_log_prices(key: Array, config: PolicyConfig, num_rows: int) -> Float[Array, "b"]:
    """Samples log(price / lambda) of each row, uniform in +-`config.price_range`.

    Callers add the result to the stop logits of the row. An optimal stop ends an episode where the
    gain of the next token equals its price. The stop logit therefore learns minus the logarithm of
    the gain, and a stop bias at inference acts as a price.

    Args:
        key: PRNG key; consumed.
        config: policy configuration; `price_range` is used.
        num_rows: number of rows.
    """
    unit = jax.random.uniform(key, (num_rows,), jnp.float32, minval=-1.0, maxval=1.0)
    return unit * config.price_range


def update_running_count(running_count: ArrayLike, count: Int[Array, "b"]) -> Float[Array, ""]:
    """Updates the running mean of the number of kept tokens, Eq. (12).

    Args:
        running_count: mean after the previous batch; 0 before the first batch.
        count: [b] number of kept tokens of each row.
    """
    running_count, batch_mean = jnp.asarray(running_count), jnp.mean(count)
    updated = jnp.where(running_count > 0, 0.9 * running_count + 0.1 * batch_mean, batch_mean)
    return updated.astype(jnp.float32)


def differentiable_count(config: PolicyConfig, trajectory: Trajectory) -> Float[Array, "b"]:
    """Returns a differentiable surrogate of each row's number of kept tokens.

    Only the gradient of the surrogate matters; the loss uses the value of the hard count.

    If rows end by the learned stop, the surrogate is the expected count E[K]. If rows have random
    budgets (`batch_budget="probe"`), the surrogate is the mean probability of continuing over the
    last steps of the budget, times `PROBE_WEIGHT`. The loss multiplies its gradient by dL/dk +
    price, the cost of one more token at the budget. The policy thus learns to continue where one
    more token lowers the language-modeling loss by more than its price.

    The decision at step t learns from budgets up to t / (1 - PROBE_WINDOW). Looking ahead matters
    if the first tokens only help together, as in a vote: a single next token is then never worth
    its price. Random budgets also train counts that the policy itself would never reach.

    Args:
        config: policy configuration.
        trajectory: the episodes. The stop margin is the stop logit minus the best token's logit;
            sigmoid(-margin / stop_temperature) is the probability of continuing.

    Returns:
        [b] surrogate counts.
    """
    if config.batch_budget != "probe":
        return expected_count(trajectory.stop_prob)
    step = jnp.arange(trajectory.margin.shape[1])
    count = trajectory.count[:, None]
    first_probed_step = (1 - PROBE_WINDOW) * count
    is_probed = (step >= config.min_tokens) & (step >= first_probed_step) & (step <= count)
    continue_prob = jax.nn.sigmoid(-trajectory.margin / config.stop_temperature)
    total = jnp.sum(jnp.where(is_probed, continue_prob, 0), axis=1)
    return PROBE_WEIGHT * total / jnp.maximum(jnp.sum(is_probed, axis=1), 1)


def late_stop(config: PolicyConfig, trajectory: Trajectory, progress: ArrayLike) -> Trajectory:
    """Stops the gradient of the stop margins early in training with random budgets.

    Before the policy has learned an order, one more token helps at every count. A stop that is
    trained in this phase learns never to end an episode. AdamW divides by past gradients, so the
    small gradients at the end would need hundreds of updates to undo the large early gradients.
    The order of tokens is trained throughout, because random budgets do not depend on the stop.

    Args:
        config: policy configuration; without `batch_budget="probe"` nothing changes.
        trajectory: the episodes.
        progress: completed fraction of training; the stop is trained from `STOP_FROM` on.

    Returns:
        The trajectory, whose margins have no gradient before `STOP_FROM`.
    """
    if config.batch_budget != "probe":
        return trajectory
    margin_without_gradient = jax.lax.stop_gradient(trajectory.margin)
    is_trained = jnp.asarray(progress) >= STOP_FROM
    margin = jnp.where(is_trained, trajectory.margin, margin_without_gradient)
    return trajectory._replace(margin=margin)


def count_at_price(
    config: PolicyConfig,
    trajectory: Trajectory,
    log_price: Float[Array, "b"],
    max_steps: Int[Array, "b"],
) -> Int[Array, "b"]:
    """Returns the number of tokens at which each row would stop at the price lambda.

    Training adds a random log-price to the stop logits of each row. This function removes it again,
    to report the counts of the policy without it.

    Args:
        config: policy configuration.
        trajectory: episodes whose stop margins include `log_price`.
        log_price: [b] log(price / lambda) of each row.
        max_steps: [b] T_max, the upper bound on each row's count.

    Returns:
        [b] counts.
    """
    count = count_at_bias(trajectory.margin, -log_price[:, None], config.min_tokens)
    return jnp.minimum(count, max_steps)


def expected_price(
    config: PolicyConfig,
    stop_prob: Float[Array, "b t"],
    num_tokens: Int[Array, "b"],
    log_price: Float[Array, "b"],
) -> Float[Array, "b"]:
    """Computes the expected price of the kept tokens of an episode whose stop is sampled.

    The price of the k-th token is lambda e^u (k / 0.1 N)^g / N with g = `config.price_growth`. The
    price of K tokens is the integral over k, lambda e^u (K / 0.1 N)^g K / (N (g + 1)).

    Args:
        config: policy configuration; `length_weight` is lambda.
        stop_prob: [b, t] probability that the episode ends before each token.
        num_tokens: [b] N, the number of real tokens of each row.
        log_price: [b] u = log(price / lambda) of each row.

    Returns:
        [b] expected prices, in units of the loss; differentiable in `stop_prob`.
    """
    count = jnp.arange(stop_prob.shape[1] + 1)
    column_num_tokens = jnp.maximum(num_tokens, 1)[:, None]
    token_price = jnp.exp(log_price[:, None] + log_price_growth(config, count, column_num_tokens))
    total_price = config.length_weight * token_price * count
    total_price = total_price / (column_num_tokens * (config.price_growth + 1))
    # Token t adds the difference of two total prices if the episode has not ended before it.
    keep_prob = jnp.cumprod(1 - stop_prob, axis=1)
    return jnp.sum(keep_prob * jnp.diff(total_price, axis=1), axis=1)


@jax.custom_vjp
def bound_gradient(x: Float[Array, "*b"], bound: ArrayLike) -> Float[Array, "*b"]:
    """Returns x, and clips its gradient elementwise to +-`bound`."""
    del bound
    return x


bound_gradient.defvjp(
    lambda x, bound: (x, bound),
    lambda bound, cotangent: (jnp.clip(cotangent, -bound, bound).astype(cotangent.dtype), None),
)


def soft_budget(
    config: PolicyConfig,
    trajectory: Trajectory,
    running_count: ArrayLike,
    num_tokens: Int[Array, "b"],
) -> Float[Array, "b"]:
    """Returns k of SoftTopK, Eq. (12), for each row.

    Args:
        config: policy configuration. With `soft_budget="straight_through"`, k is the number of kept
            tokens with the gradient of `differentiable_count`, so the language-modeling loss can
            change the count of a single image. With `"batch_mean"`, k is `running_count`.
        trajectory: the episodes.
        running_count: running mean of the number of kept tokens.
        num_tokens: [b] number of real tokens of each row.

    Returns:
        [b] budgets; without a gradient for `"batch_mean"`.
    """
    hard_count = trajectory.count.astype(trajectory.stop_prob.dtype)
    if config.soft_budget == "batch_mean":
        return jnp.full_like(hard_count, jnp.maximum(running_count, 1))
    soft_count = differentiable_count(config, trajectory)
    # The gain per token is heavy-tailed. Without a bound, a few rows that the language model
    # answers wrongly would dominate the gradient. The loss is a mean over rows, so the bound of a
    # row is divided by their number.
    gradient_bound = GAIN_BOUND / (jnp.maximum(num_tokens, 1) * num_tokens.shape[0])
    zero_with_gradient = soft_count - jax.lax.stop_gradient(soft_count)
    return hard_count + bound_gradient(zero_with_gradient, gradient_bound)


@implicit_promotion()
def calibrate_stop_bias(
    margin: Float[Array, "b t"],
    target: ArrayLike,
    *,
    min_tokens: int = 1,
    max_bias: ArrayLike = 100.0,
) -> Float[Array, ""]:
    """Finds the stop bias at which a policy keeps `target` tokens on average, by bisection.

    The mean count falls in steps as the bias grows, so the result meets the target as closely as
    the recorded margins allow. If no bias reaches the target, the nearer bound is returned.

    Args:
        margin: [b, t] stop margins (stop logit minus the best token's logit) of rollouts on a
            validation split, `Trajectory.margin`; without an exact budget.
        target: mean number of tokens to keep.
        min_tokens: number of tokens that are chosen before the stop is available, as in `select`.
        max_bias: bound on the magnitude of the result.

    Returns:
        [] number to add to the stop logits.
    """

    def excess_count(bias):
        mean_count = jnp.mean(count_at_bias(margin, bias, min_tokens).astype(margin.dtype))
        return mean_count - target

    def halve(_, bracket):
        low, high = bracket
        middle = 0.5 * (low + high)
        is_above = excess_count(middle) > 0
        return jnp.where(is_above, middle, low), jnp.where(is_above, high, middle)

    initial_high = jnp.asarray(max_bias, margin.dtype)
    # 60 halvings exhaust the precision of float64.
    low, high = jax.lax.fori_loop(0, 60, halve, (-initial_high, initial_high))
    return jnp.where(jnp.abs(excess_count(low)) < jnp.abs(excess_count(high)), low, high)
