"""From pointer logits to probabilities, stop decisions and the selected set (Eqs. 6-8)."""

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
    """Bounds on the count of each row; equal bounds are an exact budget."""

    min_tokens: Int[Array, "*#b"]
    max_tokens: Int[Array, "*#b"]


class StepDistribution(NamedTuple):
    """Fields of a `Trajectory` at one step, and whether the episode, if still alive, ends here."""

    log_prob: Float[Array, "*b n"]
    prob: Float[Array, "*b n"]
    stop_prob: Float[Array, "*b"]
    log_continue: Float[Array, "*b"]
    margin: Float[Array, "*b"]
    stop: Bool[Array, "*b"]


def log_price_growth(
    config: PolicyConfig, count: Int[Array, "*#b"], num_tokens: Int[Array, "*#b"]
) -> Float[Array, "*b"]:
    """Returns the logarithm of the `count`-th token's price over the price at a tenth of N."""
    share = jnp.maximum(count, 1) / (0.1 * jnp.maximum(num_tokens, 1))
    return config.price_growth * jnp.log(share)


def biased_stop(
    config: PolicyConfig,
    logit: Float[Array, "*b"],
    step: Int[Array, "*#b"],
    num_tokens: Int[Array, "*#b"],
    stop_bias: Float[Array, "*#b"],
) -> Float[Array, "*b"]:
    """Returns the stop logit at `step` with all biases; `num_tokens` are each row's real tokens."""
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
    """Returns masked image logits, the stop logit, and its margin over the best token or 0."""
    image = jnp.where(available, logits[..., :-1], MASKED)
    real = step + jnp.sum(available, axis=-1)  # each step takes one; padding does not count
    stop = biased_stop(config, logits[..., -1], step, real, stop_bias)
    strongest = 0.0 if config.stop == "hazard" else jnp.max(image, axis=-1)
    return image, stop, stop - strongest


def step_distribution(
    config: PolicyConfig,
    logits: Float[Array, "*b m"],
    available: Bool[Array, "*b n"],
    step: Int[Array, "*#b"],
    limits: RowLimits,
    stop_bias: Float[Array, "*#b"],
) -> StepDistribution:
    """Computes pointer and stop probabilities of a step, Eqs. (6)-(7), in the dtype of `logits`.

    p_t(i) = (1 - p_t(stop)) softmax_i(l_t / tau) over the remaining tokens; `PolicyConfig.stop`
    says what p_t(stop) is.
    """
    image, stop, margin = stop_margin(config, logits, available, step, stop_bias)
    scaled = image / config.temperature
    if config.stop == "softmax":
        score = stop / config.temperature - jax.nn.logsumexp(scaled, axis=-1)
    else:
        score = margin / config.stop_temperature
    must = (step >= limits.max_tokens) | ~jnp.any(available, axis=-1)
    may_not = (step < limits.min_tokens) & ~must
    # A tie between stop and token keeps the token: the stop has the highest slot.
    decided = must | (~may_not & (margin > 0))
    stop_prob = jnp.where(may_not, 0.0, jnp.where(must, 1.0, jax.nn.sigmoid(score)))
    log_continue = jnp.where(may_not, 0.0, jnp.where(must, MASKED, jax.nn.log_sigmoid(-score)))
    open_slots = available & ~must[..., None]
    log_prob = jax.nn.log_softmax(scaled, axis=-1) + log_continue[..., None]
    log_prob = jnp.where(open_slots, log_prob, MASKED)
    prob = jnp.where(open_slots, jnp.exp(log_prob), 0.0)
    return StepDistribution(log_prob, prob, stop_prob, log_continue, margin, decided)


def read_trajectory(
    config: PolicyConfig,
    logits: Float[Array, "b t m"],
    choice: Int[Array, "b t"],
    picked: Int[Array, "b n"],
    image_mask: Bool[Array, "b n"],
    limits: RowLimits,
    stop_bias: Float[Array, "b"],
) -> Trajectory:
    """Reads a whole rollout at once; `picked` is the first step at which a token is pointed at."""
    steps, n = logits.shape[1], image_mask.shape[1]
    step = jnp.arange(steps)[None]
    available = image_mask[:, None] & (picked[:, None] >= step[..., None])
    columns = RowLimits(limits.min_tokens[:, None], limits.max_tokens[:, None])
    p = step_distribution(config, logits, available, step, columns, stop_bias[:, None])
    count = first_true(p.stop)
    kept = step < count[:, None]
    return Trajectory(
        action=jnp.where(kept, choice, n).astype(jnp.int32),
        choice=choice,
        log_prob=p.log_prob,
        prob=p.prob,
        stop_prob=p.stop_prob,
        log_continue=p.log_continue,
        margin=p.margin,
        alive=step <= count[:, None],
        count=count,
        selected=image_mask & (picked < count[:, None]),
    )


def first_true(flags: Bool[Array, "b t"]) -> Int[Array, "b"]:
    """Returns the index of the first true flag of each row; t if there is none."""
    index = jnp.argmax(flags, axis=1)
    return jnp.where(jnp.any(flags, axis=1), index, flags.shape[1]).astype(jnp.int32)


@implicit_promotion()
def count_at_bias(
    margin: Float[Array, "b t"], bias: ArrayLike, min_tokens: int = 1
) -> Int[Array, "b"]:
    """Returns K of each row as if `bias` had been added to its stop logits.

    The order of tokens does not depend on the stop, so the margins of one rollout determine the
    count for every bias, without a second rollout. A row ends at an infinite margin in any case.
    """
    step = jnp.arange(margin.shape[1])
    stops = (margin + bias > 0) & (step >= min_tokens)
    return first_true(stops | jnp.isposinf(margin))
