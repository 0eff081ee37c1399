"""Token budgets: limits of a training batch, k of SoftTopK, and the price of a token."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from stepprune_jax.policy.base import Trajectory
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.jax_settings import implicit_promotion
from stepprune_jax.policy.scores import expected_count
from stepprune_jax.policy.trajectory import count_at_bias, log_price_growth

# Range of random budgets as fractions of N, and the lower end at which annealing starts.
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
    shares: tuple[float, float], anneal: float | int, progress: ArrayLike
) -> tuple[ArrayLike, float]:
    """Returns the range of random budgets at a point of training, as fractions of N.

    Args:
        shares: lower and upper end of the range at the end of training.
        anneal: fraction of training over which the lower end falls geometrically from
            `FIRST_BUDGET`; 0 keeps `shares` throughout.
        progress: completed fraction of training.
    """
    low, high = shares
    if not anneal:
        return shares
    first = min(max(low, FIRST_BUDGET), high)
    remaining = 1 - jnp.clip(jnp.asarray(progress, jnp.float32) / anneal, 0, 1)
    return low * (first / low) ** remaining, high


def draw_budgets(
    key: Array,
    num_tokens: Int[Array, "b"],
    steps: Int[Array, "b"] | int,
    shares: tuple[ArrayLike, ArrayLike],
) -> Int[Array, "b"]:
    """Samples an exact budget per row, log-uniform over a range of fractions of its tokens.

    Args:
        key: PRNG key; consumed.
        num_tokens: [b] number of real tokens of each row.
        steps: largest budget.
        shares: lower and upper end of the range, as fractions of `num_tokens`.

    Returns:
        [b] budgets from 1 to `steps`.
    """
    low, high = map(jnp.log, shares)
    log_share = jax.random.uniform(key, num_tokens.shape, jnp.float32, minval=low, maxval=high)
    budget = jnp.round(jnp.exp(log_share) * num_tokens).astype(jnp.int32)
    return jnp.clip(budget, 1, steps)


def draw_log_prices(key: Array, config: PolicyConfig, rows: int) -> Float[Array, "b"]:
    """Samples the log of each row's token price over lambda, uniform in +-`config.price_range`.

    The same number is added to the row's stop logits. At the stop's optimum the gain of the next
    token equals its price, so the margin learns minus the logarithm of that gain, and a stop bias
    at inference acts as a price.
    """
    return (
        jax.random.uniform(key, (rows,), jnp.float32, minval=-1.0, maxval=1.0) * config.price_range
    )


def update_running_count(running: ArrayLike, count: Int[Array, "b"]) -> Float[Array, ""]:
    """Updates the running mean of the hard count, Eq. (12); 0 before the first batch."""
    running, mean = jnp.asarray(running), jnp.mean(count)
    merged = jnp.where(running > 0, 0.9 * running + 0.1 * mean, mean)
    return merged.astype(jnp.float32)


def differentiable_count(config: PolicyConfig, trajectory: Trajectory) -> Float[Array, "b"]:
    """Returns a surrogate of the count that carries its gradient.

    Without a probe the surrogate is E[K]. With a probe it is the mean probability of continuing,
    sigmoid(-margin / stop_temperature), over the last `PROBE_WINDOW` of the budget, times
    `PROBE_WEIGHT`. Its gradient is (dL/dk + price), the cost of one more token at the budget. So
    the policy learns to continue where one more token lowers the language-modelling loss by more
    than its price. The decision at step t learns from budgets up to t / (1 - PROBE_WINDOW). Looking
    ahead matters where the gain of tokens grows at first, as in a vote: there a single next token
    is never worth its price. Random budgets probe every count, including counts that the policy
    would never reach.
    """
    if config.batch_budget != "probe":
        return expected_count(trajectory.stop_prob)
    step = jnp.arange(trajectory.margin.shape[1])
    count = trajectory.count[:, None]
    first = (1 - PROBE_WINDOW) * count
    is_probed = (step >= config.min_tokens) & (step >= first) & (step <= count)
    continue_prob = jax.nn.sigmoid(-trajectory.margin / config.stop_temperature)
    total = jnp.sum(jnp.where(is_probed, continue_prob, 0), axis=1)
    return PROBE_WEIGHT * total / jnp.maximum(jnp.sum(is_probed, axis=1), 1)


def late_stop(config: PolicyConfig, trajectory: Trajectory, share: ArrayLike) -> Trajectory:
    """Cuts the gradient of a probe's stop until a fraction `STOP_FROM` of training is completed.

    Before the order is learned, one more token helps at every count. A stop that is trained in that
    phase learns never to end an episode. AdamW divides by past gradients: the small gradients at
    the end need hundreds of updates to undo the effect of the large gradients at the beginning.
    The order does not depend on the stop, as a probe's budgets are random.
    """
    if config.batch_budget != "probe":
        return trajectory
    fixed = jax.lax.stop_gradient(trajectory.margin)
    is_trained = jnp.asarray(share) >= STOP_FROM
    return trajectory._replace(margin=jnp.where(is_trained, trajectory.margin, fixed))


def count_at_price(
    config: PolicyConfig,
    trajectory: Trajectory,
    log_price: Float[Array, "b"],
    longest: Int[Array, "b"],
) -> Int[Array, "b"]:
    """Returns the count at which each row stops at a price factor of 1.

    Args:
        config: policy configuration.
        trajectory: episodes whose margins include `log_price`.
        log_price: [b] logarithm of each row's price over lambda; it is subtracted from the margins.
        longest: [b] T_max of each row, an upper bound on its count.
    """
    count = count_at_bias(trajectory.margin, -log_price[:, None], config.min_tokens)
    return jnp.minimum(count, longest)


def expected_price(
    config: PolicyConfig,
    stop_prob: Float[Array, "b t"],
    num_tokens: Int[Array, "b"],
    log_price: Float[Array, "b"],
) -> Float[Array, "b"]:
    """Computes the expected price of an episode whose stop is sampled, in units of the loss.

    The price of the k-th token is lambda e^u (k / .1N)^g / N with g = `config.price_growth`. Its
    integral, the price of K tokens, is lambda e^u (K / .1N)^g K / (N (g + 1)).

    Args:
        config: policy configuration.
        stop_prob: [b, t] probability of the stop before each token.
        num_tokens: [b] N, the number of real tokens of each row.
        log_price: [b] u, the logarithm of each row's price over lambda.
    """
    count = jnp.arange(stop_prob.shape[1] + 1)
    size = jnp.maximum(num_tokens, 1)[:, None]
    last_price = jnp.exp(log_price[:, None] + log_price_growth(config, count, size))
    price = config.length_weight * last_price * count / (size * (config.price_growth + 1))
    return jnp.sum(jnp.cumprod(1 - stop_prob, axis=1) * jnp.diff(price, axis=1), axis=1)


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
    running: ArrayLike,
    num_tokens: Int[Array, "b"],
) -> Float[Array, "b"]:
    """Returns k of Eq. (12) for each row.

    With `soft_budget="straight_through"` k is the hard count with the gradient of
    `differentiable_count`, so the language-modelling loss can change the count of a single image.
    With `"batch_mean"` k is the running mean, which has no gradient.

    Args:
        config: policy configuration.
        trajectory: the episodes.
        running: running mean of the hard count.
        num_tokens: [b] number of real tokens of each row.
    """
    hard = trajectory.count.astype(trajectory.stop_prob.dtype)
    if config.soft_budget == "batch_mean":
        return jnp.full_like(hard, jnp.maximum(running, 1))
    soft = differentiable_count(config, trajectory)
    # The gain per token is heavy-tailed: without a bound, a few rows that the language model
    # answers wrongly would dominate the gradient.
    rows = jnp.maximum(num_tokens, 1) * num_tokens.shape[0]
    return hard + bound_gradient(soft - jax.lax.stop_gradient(soft), GAIN_BOUND / rows)


@implicit_promotion()
def calibrate_stop_bias(
    margin: Float[Array, "b t"],
    target: ArrayLike,
    *,
    min_tokens: int = 1,
    max_bias: ArrayLike = 100.0,
) -> Float[Array, ""]:
    """Finds the stop bias at which the mean count meets `target`, by bisection.

    The mean count falls in steps as the bias grows, so the result meets the target as closely as
    the recorded margins allow. If the policy cannot reach the target, the nearer bound is returned.

    Args:
        margin: [b, t] `Trajectory.margin` of rollouts on a validation split, without an exact
            budget.
        target: target mean K.
        min_tokens: number of tokens that are chosen before the stop is available, as in `select`.
        max_bias: bound on the magnitude of the result.

    Returns:
        [] the stop bias.
    """

    def excess_count(bias):
        mean = jnp.mean(count_at_bias(margin, bias, min_tokens).astype(margin.dtype))
        return mean - target

    def halve(_, bracket):
        low, high = bracket
        middle = 0.5 * (low + high)
        is_above = excess_count(middle) > 0
        return jnp.where(is_above, middle, low), jnp.where(is_above, high, middle)

    bound = jnp.asarray(max_bias, margin.dtype)
    # 60 halvings exhaust the precision of float64.
    low, high = jax.lax.fori_loop(0, 60, halve, (-bound, bound))
    return jnp.where(jnp.abs(excess_count(low)) < jnp.abs(excess_count(high)), low, high)
