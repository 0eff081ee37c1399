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

# Range of random budgets as fractions of N, and where its lower end starts if it is annealed.
RANDOM_BUDGET, FIRST_BUDGET = (0.02, 0.5), 0.3
# Share of the budget, counted from its end, whose decisions are probed, and the factor on their
# gradient.
PROBE_WINDOW, PROBE_WEIGHT = 0.25, 10.0
# Share of training before which a probe does not train the stop, see `late_stop`.
STOP_FROM = 0.7
# Bound on each row's dL_LM/dk in the straight-through count, in nats per N tokens like lambda. The
# loss is assumed to be the mean over rows.
GAIN_BOUND = 10.0


def budget_range(
    shares: tuple[float, float], anneal: float | int, progress: ArrayLike
) -> tuple[ArrayLike, float]:
    """Returns the range of random budgets, as fractions of N, at a share `progress` of training.

    Its lower end falls from `FIRST_BUDGET` over a share `anneal` of training, by equal factors.
    With `anneal` 0 the range is `shares` throughout.
    """
    low, high = shares
    if not anneal:
        return shares
    first = min(max(low, FIRST_BUDGET), high)
    left = 1 - jnp.clip(jnp.asarray(progress, jnp.float32) / anneal, 0, 1)
    return low * (first / low) ** left, high


def draw_budgets(
    key: Array,
    num_tokens: Int[Array, "b"],
    steps: Int[Array, "b"] | int,
    shares: tuple[ArrayLike, ArrayLike],
) -> Int[Array, "b"]:
    """Draws an exact budget per row, log-uniform over `shares` of its tokens, at most `steps`."""
    low, high = map(jnp.log, shares)
    draw = jax.random.uniform(key, num_tokens.shape, jnp.float32, minval=low, maxval=high)
    share = jnp.exp(draw)
    return jnp.clip(jnp.round(share * num_tokens).astype(jnp.int32), 1, steps)


def draw_log_prices(key: Array, config: PolicyConfig, rows: int) -> Float[Array, "b"]:
    """Draws the log of each row's token price over lambda, uniform in +-`config.price_range`.

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
    """Returns a surrogate of the count for gradients: E[K], or a probe's last decisions.

    The latter are the probabilities of continuing, sigmoid(-margin / stop_temperature), averaged
    over the last `PROBE_WINDOW` of the budget, times `PROBE_WEIGHT`. Their gradient
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
    first = (1 - PROBE_WINDOW) * count
    asked = (step >= config.min_tokens) & (step >= first) & (step <= count)
    go_on = jax.nn.sigmoid(-trajectory.margin / config.stop_temperature)
    total, asked_times = jnp.sum(jnp.where(asked, go_on, 0), axis=1), jnp.sum(asked, axis=1)
    return PROBE_WEIGHT * total / jnp.maximum(asked_times, 1)


def late_stop(config: PolicyConfig, trajectory: Trajectory, share: ArrayLike) -> Trajectory:
    """Cuts the gradient of a probe's stop until a share `STOP_FROM` of training is done.

    Before the order is learned, one more token helps at every count, and a stop that is trained
    meanwhile learns never to end an episode. AdamW divides by past gradients: the small ones at
    the end need hundreds of updates to undo what the large ones at the beginning have done. The
    order does not depend on the stop, as a probe's budgets are drawn.
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
    """Returns the counts at which rows stop at a price factor of 1, at most T_max."""
    count = count_at_bias(trajectory.margin, -log_price[:, None], config.min_tokens)
    return jnp.minimum(count, longest)


def expected_price(
    config: PolicyConfig,
    stop_prob: Float[Array, "b t"],
    num_tokens: Int[Array, "b"],
    log_price: Float[Array, "b"],
) -> Float[Array, "b"]:
    """Computes the expected price of an episode whose stop is drawn, in units of the loss.

    The price of K tokens is the integral of a price that grows to that of the last token:
    lambda e^u (K / .1N)^g K / (N (g + 1)), g = `config.price_growth`.

    Args:
        config: policy configuration.
        stop_prob: probability of the stop before each token.
        num_tokens: N, the real tokens of each row.
        log_price: u, the logarithm of each row's price over lambda.
    """
    count = jnp.arange(stop_prob.shape[1] + 1)
    size = jnp.maximum(num_tokens, 1)[:, None]
    last = jnp.exp(log_price[:, None] + log_price_growth(config, count, size))
    price = config.length_weight * last * count / (size * (config.price_growth + 1))
    return jnp.sum(jnp.cumprod(1 - stop_prob, axis=1) * jnp.diff(price, axis=1), axis=1)


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
    running: ArrayLike,
    num_tokens: Int[Array, "b"],
) -> Float[Array, "b"]:
    """Returns k of Eq. (12) for each row of `num_tokens` real tokens.

    With `"straight_through"` the language-model loss tells what one more token is worth for this
    image; `"batch_mean"` is the running mean, through which it cannot change any single count.
    """
    hard = trajectory.count.astype(trajectory.stop_prob.dtype)
    if config.soft_budget == "batch_mean":
        return jnp.full_like(hard, jnp.maximum(running, 1))
    soft = differentiable_count(config, trajectory)
    # The value of a token is heavy-tailed: a few rows that the model gets wrong outweigh the rest.
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
    """Finds the stop bias at which the mean count meets `target`, bisecting recorded margins.

    The mean count falls in steps as the bias grows: the result meets the target as closely as the
    sample allows. A target outside the policy's range gives the nearer bound.

    Args:
        margin: `Trajectory.margin` of rollouts on a validation split, without an exact budget.
        target: target mean K.
        min_tokens: as in `select`.
        max_bias: bound on the magnitude of the result.
    """

    def beyond(bias):
        mean = jnp.mean(count_at_bias(margin, bias, min_tokens).astype(margin.dtype))
        return mean - target

    def halve(_, bracket):
        low, high = bracket
        middle = 0.5 * (low + high)
        above = beyond(middle) > 0
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    bound = jnp.asarray(max_bias, margin.dtype)
    low, high = jax.lax.fori_loop(0, 60, halve, (-bound, bound))
    return jnp.where(jnp.abs(beyond(low)) < jnp.abs(beyond(high)), low, high)
