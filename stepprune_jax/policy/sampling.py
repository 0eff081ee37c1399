"""Sets drawn from a policy, with their probabilities: what a policy gradient needs."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from stepprune_jax.policy.base import (
    DecoderFns,
    Inputs,
    Limits,
    OwnStop,
    Params,
    SampledSubsets,
    Trajectory,
)
from stepprune_jax.policy.budget import count_at_price, draw_log_prices, expected_price
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.decoder import POINTER
from stepprune_jax.policy.encoder import read_inputs
from stepprune_jax.policy.jax_settings import AnyKey, implicit_promotion, threefry
from stepprune_jax.policy.objective import pointer_entropy
from stepprune_jax.policy.rollout import longest
from stepprune_jax.policy.selection import begin, first_picks, roll_out
from stepprune_jax.policy.trajectory import first_true

_LEAST = 1e-30  # least probability whose logarithm is taken


@implicit_promotion()
def sample(
    params: Params,
    config: PolicyConfig,
    inputs: Inputs,
    limits: Limits,
    keys: AnyKey,
    *,
    text_gate: ArrayLike = 1.0,
    stop_bias: ArrayLike = 0.0,
    decoder: DecoderFns = POINTER,
) -> SampledSubsets:
    """Draws g sets for each row, tokens and stop alike, at a temperature of 1.

    The stop is one more action: before each token from `min_tokens` on, the episode ends with its
    probability. The inputs are encoded once for all draws. The gradient is that of `"parallel"`
    whatever the estimator: what was drawn is given, and straight-through would add to it, as a
    decoder's own feedback still does. With a hazard, the gradient of the stop reaches the hazard's
    own weights alone, as it always does.

    Args:
        params: policy weights.
        config: policy configuration; `draw` and `estimator` are not read, nor is `limits.draw`.
        inputs: image and question.
        limits: bounds on the counts. An exact budget leaves the stop no choice.
        keys: g PRNG keys, one for each draw; consumed.
        text_gate: g_txt.
        stop_bias: added to the stop logits, a number or one per row.
        decoder: functions of the decoder.

    Returns:
        The draws; the probability of a set of given order is differentiable in `params`.

    Raises:
        ValueError: as `select`.
    """
    inputs, keys = read_inputs(params, config, inputs), threefry(keys)
    if keys.ndim != 1:
        raise ValueError(
            f"keys is of shape {keys.shape}, expected (g,), a key for each draw: "
            "jax.random.split(key, g)"
        )
    b, limits = inputs.image.shape[0], dataclasses.replace(limits, draw=1.0)
    started = begin(params, config, inputs, limits, text_gate, stop_bias, decoder)

    def one(key):
        order_key, stop_key = jax.random.split(key)
        episode = started._replace(key=jax.random.split(order_key, b))
        return read_draw(roll_out(params, config, episode, decoder, "parallel"), stop_key)

    return jax.vmap(one)(keys)


@implicit_promotion()
def price_stop(
    params: Params,
    config: PolicyConfig,
    inputs: Inputs,
    key: Array,
    *,
    text_gate: ArrayLike = 1.0,
    decoder: DecoderFns = POINTER,
) -> OwnStop:
    """Computes the expected price of the tokens that a policy keeps by its own stop.

    One episode of drawn tokens is rolled out to T_max without an end, so that the stop is priced
    before every token, also where no drawn set is so large. Each row has a price of its own, see
    `PolicyConfig.price_range`. With a hazard, only the hazard's weights receive a gradient.

    Args:
        params: policy weights; differentiate with respect to these alone.
        config: policy configuration; `draw` and `estimator` are not read.
        inputs: image and question.
        key: PRNG key; consumed (prices and tokens).
        text_gate: g_txt.
        decoder: functions of the decoder.

    Returns:
        Price, count and bounds of each row.

    Raises:
        ValueError: as `select`.
    """
    price_key, draw_key = jax.random.split(threefry(key))
    tokens, limits = jnp.sum(inputs.real, axis=1), Limits(draw=1.0)
    log_price = draw_log_prices(price_key, config, len(tokens))
    keys = jax.random.split(draw_key, len(tokens))
    episode = begin(params, config, inputs, limits, text_gate, log_price, decoder, keys)
    trajectory = roll_out(params, config, episode, decoder, "parallel")
    most = longest(config, tokens)
    return OwnStop(
        price=expected_price(config, trajectory.stop_prob, tokens, log_price),
        count=count_at_price(config, trajectory, log_price, most),
        shortest=jnp.minimum(config.min_tokens, most),
        longest=most,
    )


def read_draw(t: Trajectory, key: Array) -> SampledSubsets:
    """Draws where an episode of drawn tokens ends; `key` is consumed."""
    count = first_true(jax.random.uniform(key, t.stop_prob.shape, jnp.float32) < t.stop_prob)
    step = jnp.arange(t.stop_prob.shape[1])
    kept = step < count[:, None]
    tokens = jnp.take_along_axis(t.log_prob, t.choice[..., None], axis=-1)[..., 0]
    stop = jnp.log(jnp.maximum(t.stop_prob, _LEAST))
    ends = step == count[:, None]  # nowhere in an episode that is as long as the loop
    log_prob = jnp.sum(jnp.where(kept, tokens, 0) + jnp.where(ends, stop, 0), axis=1)
    entropy = pointer_entropy(t._replace(alive=kept))
    return SampledSubsets(first_picks(t.choice, count, t.prob.shape[-1]), log_prob, entropy)


@implicit_promotion()
def leave_one_out(reward: Float[Array, "g b"]) -> Float[Array, "g b"]:
    """Returns each draw's reward less the mean reward of the row's other draws.

    With these as advantages, mean(advantage x log_prob) has the gradient of the mean reward
    (Kool et al., 2019, https://openreview.net/forum?id=r1lgTGL5DE).
    """
    g = len(reward)
    if g < 2:
        raise ValueError(f"reward has {g} draw of each row, expected at least 2")
    return (reward - jnp.mean(reward, axis=0)) * (g / (g - 1))
