"""Probabilities, stop decisions and the kept tokens, from pointer logits; Eqs. (6)-(8)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.policy.base import Trajectory
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.jax_settings import implicit_promotion
from stepprune_jax.policy.layers import MASKED


class RowLimits(NamedTuple):
    """Bounds on the count of each row; equal bounds are an exact budget.

    Attributes:
        min_tokens: number of tokens that are chosen before the stop is available.
        max_tokens: number of tokens after which a row is stopped.
    """

    min_tokens: Int[Array, "*#b"]
    max_tokens: Int[Array, "*#b"]


class StepDistribution(NamedTuple):
    """Fields of a `Trajectory` at one step, and the hard decision of the stop.

    Attributes:
        log_prob: log p_t(i); -1e9 for tokens that cannot be chosen.
        prob: p_t(i); 0 for tokens that cannot be chosen.
        stop_prob: p_t(stop).
        log_continue: log(1 - p_t(stop)).
        margin: margin of the stop, as in `Trajectory`.
        stop: whether an episode that has not ended before ends at this step.
    """

    log_prob: Float[Array, "*b n"]
    prob: Float[Array, "*b n"]
    stop_prob: Float[Array, "*b"]
    log_continue: Float[Array, "*b"]
    margin: Float[Array, "*b"]
    stop: Bool[Array, "*b"]


def log_price_growth(
    config: PolicyConfig, count: Int[Array, "*#b"], num_tokens: Int[Array, "*#b"]
) -> Float[Array, "*b"]:
    """Returns how the price of a kept token grows with the count: g log(count / 0.1 N).

    The price is the part of the length penalty that a token adds; g is `config.price_growth`.

    Args:
        config: policy configuration; `price_growth` is used.
        count: number of the token, from 1; 0 is treated as 1.
        num_tokens: N, the number of real tokens of each row.

    Returns:
        Log of the price, relative to the price at a tenth of the tokens.
    """
    relative_count = jnp.maximum(count, 1) / (0.1 * jnp.maximum(num_tokens, 1))
    return config.price_growth * jnp.log(relative_count)


def biased_stop(
    config: PolicyConfig,
    logit: Float[Array, "*b"],
    step: Int[Array, "*#b"],
    num_tokens: Int[Array, "*#b"],
    stop_bias: Float[Array, "*#b"],
) -> Float[Array, "*b"]:
    """Adds the biases of configuration, row and step to a stop logit.

    Args:
        config: policy configuration; `stop_bias` and `price_growth` are used.
        logit: stop logit of the decoder.
        step: number of the step, from 0.
        num_tokens: number of real tokens of each row.
        stop_bias: further bias of each row.

    Returns:
        The biased logit. With `price_growth`, it grows with the step as the price of a token does.
    """
    stop = logit + config.stop_bias + stop_bias
    if config.price_growth:
        stop = stop + log_price_growth(config, step + 1, num_tokens).astype(stop.dtype)
    return stop


def stop_margin(
    config: PolicyConfig,
    logits: Float[Array, "*b m"],
    available: Bool[Array, "*b n"],
    step: Int[Array, "*#b"],
    stop_bias: Float[Array, "*#b"],
) -> tuple[Float[Array, "*b n"], Float[Array, "*b"], Float[Array, "*b"]]:
    """Computes the stop margin, whose sign decides whether the episode ends before a step.

    The margin is the stop logit minus the largest logit of the available tokens. For a hazard
    (`config.stop="hazard"`), it is the stop logit.

    Args:
        config: policy configuration.
        logits: [..., m] unmasked logits of a step, the stop's last.
        available: [..., n] True at real tokens that are not chosen yet.
        step: number of the step, from 0.
        stop_bias: bias of each row.

    Returns:
        A tuple (image_logits, stop_logit, margin). image_logits: [..., n] logits of the available
        tokens, -1e9 elsewhere. stop_logit: [...] the stop logit with all biases. margin: [...] the
        stop margin.
    """
    image_logits = jnp.where(available, logits[..., :-1], MASKED)
    num_tokens = step + jnp.sum(available, axis=-1)  # each earlier step has chosen one real token
    stop_logit = biased_stop(config, logits[..., -1], step, num_tokens, stop_bias)
    max_logit = 0.0 if config.stop == "hazard" else jnp.max(image_logits, axis=-1)
    return image_logits, stop_logit, stop_logit - max_logit


def step_distribution(
    config: PolicyConfig,
    logits: Float[Array, "*b m"],
    available: Bool[Array, "*b n"],
    step: Int[Array, "*#b"],
    *,
    limits: RowLimits,
    stop_bias: Float[Array, "*#b"],
) -> StepDistribution:
    """Computes the probabilities of each token and of the stop at a step, Eqs. (6)-(7).

    p_t(i) = (1 - p_t(stop)) softmax_i(l_t / tau) over the available tokens, with logits l_t and
    tau = `config.temperature`. `PolicyConfig.stop` defines p_t(stop).

    Args:
        config: policy configuration.
        logits: [..., m] unmasked logits, with the stop logit last.
        available: [..., n] True at real tokens that are not chosen yet.
        step: number of the step, from 0.
        limits: bounds on the number of kept tokens of each row.
        stop_bias: bias of each row's stop logit.

    Returns:
        The probabilities and the hard decision of the stop, in the dtype of `logits`.
    """
    image_logits, stop_logit, margin = stop_margin(config, logits, available, step, stop_bias)
    scaled_logits = image_logits / config.temperature
    # In both cases p_t(stop) = sigmoid(stop_log_odds).
    if config.stop == "softmax":
        log_partition = jax.nn.logsumexp(scaled_logits, axis=-1)
        stop_log_odds = stop_logit / config.temperature - log_partition
    else:
        stop_log_odds = margin / config.stop_temperature
    must_stop = (step >= limits.max_tokens) | ~jnp.any(available, axis=-1)
    must_continue = (step < limits.min_tokens) & ~must_stop
    # In a tie the token wins, because argmax returns the lowest slot and the stop is the last slot.
    is_stopped = must_stop | (~must_continue & (margin > 0))
    stop_prob = jnp.where(must_stop, 1.0, jax.nn.sigmoid(stop_log_odds))
    stop_prob = jnp.where(must_continue, 0.0, stop_prob)
    log_continue = jnp.where(must_stop, MASKED, jax.nn.log_sigmoid(-stop_log_odds))
    log_continue = jnp.where(must_continue, 0.0, log_continue)
    is_possible = available & ~must_stop[..., None]
    log_prob = jax.nn.log_softmax(scaled_logits, axis=-1) + log_continue[..., None]
    log_prob = jnp.where(is_possible, log_prob, MASKED)
    prob = jnp.where(is_possible, jnp.exp(log_prob), 0.0)
    return StepDistribution(log_prob, prob, stop_prob, log_continue, margin, is_stopped)


def read_trajectory(
    config: PolicyConfig,
    logits: Float[Array, "b t m"],
    choice: Int[Array, "b t"],
    *,
    first_step: Int[Array, "b n"],
    image_mask: Bool[Array, "b n"],
    limits: RowLimits,
    stop_bias: Float[Array, "b"],
) -> Trajectory:
    """Computes probabilities and stop decisions of a rollout, for all steps at once.

    Args:
        config: policy configuration.
        logits: [b, t, m] unmasked logits of all steps, with the stop logit last.
        choice: [b, t] index of the token that each step chooses if the episode continues.
        first_step: [b, n] first step that chooses each token; t or more for other tokens.
        image_mask: [b, n] True at real tokens.
        limits: bounds on the number of kept tokens of each row.
        stop_bias: [b] bias of the stop logits.

    Returns:
        The trajectory. Each row ends at the first step whose stop wins.
    """
    num_steps, n = logits.shape[1], image_mask.shape[1]
    step = jnp.arange(num_steps)[None]
    # [b, t, n]: a token is available at the step that chooses it, and before.
    available = image_mask[:, None] & (first_step[:, None] >= step[..., None])
    column_limits = RowLimits(limits.min_tokens[:, None], limits.max_tokens[:, None])
    distribution = step_distribution(
        config, logits, available, step, limits=column_limits, stop_bias=stop_bias[:, None]
    )
    count = first_true(distribution.stop)
    return Trajectory(
        action=jnp.where(step < count[:, None], choice, n).astype(jnp.int32),
        choice=choice,
        log_prob=distribution.log_prob,
        prob=distribution.prob,
        stop_prob=distribution.stop_prob,
        log_continue=distribution.log_continue,
        margin=distribution.margin,
        alive=step <= count[:, None],
        count=count,
        selected=image_mask & (first_step < count[:, None]),
    )


def first_true(flags: Bool[Array, "b t"]) -> Int[Array, "b"]:
    """Returns the index of the first True in each row, or t for a row without True."""
    index = jnp.argmax(flags, axis=1)
    return jnp.where(jnp.any(flags, axis=1), index, flags.shape[1]).astype(jnp.int32)


@implicit_promotion()
def count_at_bias(
    margin: Float[Array, "b t"], bias: ArrayLike, min_tokens: int = 1
) -> Int[Array, "b"]:
    """Returns the number of tokens that each row keeps if `bias` is added to its stop logits.

    The order of tokens does not depend on the stop, so the margins of one rollout determine the
    count for every bias.

    Args:
        margin: [b, t] stop margins (stop logit minus the best token's logit) before each step,
            `Trajectory.margin`. A row ends at an infinite margin, whatever the bias.
        bias: added to the margins; a number, or an array that broadcasts to them.
        min_tokens: number of tokens that are chosen before the stop is available.

    Returns:
        [b] counts.
    """
    step = jnp.arange(margin.shape[1])
    is_stopped = (margin + bias > 0) & (step >= min_tokens)
    return first_true(is_stopped | jnp.isposinf(margin))
