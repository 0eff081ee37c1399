"""Sampled subsets with their log-probabilities, for training with RLOO.

RLOO (REINFORCE leave-one-out) samples several subsets of tokens per question. The advantage of a
subset is its reward minus the mean reward of the question's other subsets.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from stepprune_jax.policy.base import (
    DecoderFns,
    Inputs,
    Limits,
    Params,
    SampledSubsets,
    StopPrice,
    Trajectory,
)
from stepprune_jax.policy.budget import count_at_price, draw_log_prices, expected_price
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.decoder import POINTER
from stepprune_jax.policy.encoder import read_inputs
from stepprune_jax.policy.jax_settings import AnyKey, implicit_promotion, threefry
from stepprune_jax.policy.objective import pointer_entropy
from stepprune_jax.policy.rollout import max_steps_per_row
from stepprune_jax.policy.selection import encode_episode, first_picks, roll_out
from stepprune_jax.policy.trajectory import first_true

# Lower bound on probabilities before their logarithm, within the range of float32.
_MIN_PROB = 1e-30


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
    """Samples g subsets per row, at sampling temperature 1.

    Both tokens and stop are sampled: once `min_tokens` are chosen, the episode ends before each
    further token with probability p_t(stop). The inputs are encoded once for all subsets.

    `log_prob` conditions on the sampled tokens, so its gradient is exact without a gradient through
    the choices: the estimator `"parallel"` is used. A decoder with custom feedback adds the
    gradient of its feedback. With a hazard, the gradient of the stop reaches only the weights of
    the hazard layer.

    Args:
        params: policy weights.
        config: policy configuration; `draw` and `estimator` are ignored.
        inputs: image and question.
        limits: bounds on the counts; `draw` is ignored. With an exact budget the stop is not
            sampled.
        keys: [g] PRNG keys, one per subset; consumed.
        text_gate: g_txt in [0, 1]; see `PolicyConfig.text_gate`.
        stop_bias: added to the stop logits, a number or one per row.
        decoder: functions of the decoder.

    Returns:
        The subsets, with a leading axis g. `log_prob` is differentiable in `params`.

    Raises:
        ValueError: inputs or limits do not fit the policy, or `keys` has another shape.
    """
    inputs, keys = read_inputs(params, config, inputs), threefry(keys)
    if keys.ndim != 1:
        raise ValueError(
            f"keys is of shape {keys.shape}, expected (g,), a key for each subset: "
            "jax.random.split(key, g)"
        )
    batch_size = inputs.image.shape[0]
    limits = dataclasses.replace(limits, draw=1.0)
    episode = encode_episode(
        params,
        config,
        inputs,
        limits,
        text_gate=text_gate,
        stop_bias=stop_bias,
        decoder=decoder,
    )

    def sample_subset(key):
        order_key, stop_key = jax.random.split(key)
        keyed_episode = episode._replace(key=jax.random.split(order_key, batch_size))
        trajectory = roll_out(params, config, keyed_episode, decoder, "parallel")
        return sample_stop(trajectory, stop_key)

    return jax.vmap(sample_subset)(keys)


@implicit_promotion()
def price_stop(
    params: Params,
    config: PolicyConfig,
    inputs: Inputs,
    key: Array,
    *,
    text_gate: ArrayLike = 1.0,
    decoder: DecoderFns = POINTER,
) -> StopPrice:
    """Computes the expected price of the tokens that a policy keeps by its learned stop.

    The price of a token is its part of the length penalty. One episode per row is sampled to T_max
    without a stop, so the price also trains the stop beyond the size of the largest sampled subset.
    Each row has a random price; see `PolicyConfig.price_range`. With a hazard, only the weights of
    the hazard layer receive a gradient.

    Args:
        params: policy weights; differentiate with respect to `params` only.
        config: policy configuration; `draw` and `estimator` are ignored.
        inputs: image and question.
        key: PRNG key; consumed (prices and tokens).
        text_gate: g_txt in [0, 1]; see `PolicyConfig.text_gate`.
        decoder: functions of the decoder.

    Returns:
        The expected price of each row, the count at which its stop acts, and bounds on that count.

    Raises:
        ValueError: inputs do not fit the policy.
    """
    price_key, token_key = jax.random.split(threefry(key))
    num_tokens, limits = jnp.sum(inputs.real, axis=1), Limits(draw=1.0)
    log_price = draw_log_prices(price_key, config, len(num_tokens))
    episode = encode_episode(
        params,
        config,
        inputs,
        limits,
        text_gate=text_gate,
        stop_bias=log_price,
        decoder=decoder,
        key=jax.random.split(token_key, len(num_tokens)),
    )
    trajectory = roll_out(params, config, episode, decoder, "parallel")
    max_steps = max_steps_per_row(config, num_tokens)
    return StopPrice(
        price=expected_price(config, trajectory.stop_prob, num_tokens, log_price),
        count=count_at_price(config, trajectory, log_price, max_steps),
        shortest=jnp.minimum(config.min_tokens, max_steps),
        longest=max_steps,
    )


def sample_stop(trajectory: Trajectory, key: Array) -> SampledSubsets:
    """Samples the step at which each episode ends, and keeps the tokens chosen before it.

    Args:
        trajectory: episodes to T_max whose tokens were sampled.
        key: PRNG key; consumed.

    Returns:
        One subset per row, with the log-probability of its tokens, its order and its end.
    """
    stop_prob, choice = trajectory.stop_prob, trajectory.choice
    count = first_true(jax.random.uniform(key, stop_prob.shape, jnp.float32) < stop_prob)
    step = jnp.arange(stop_prob.shape[1])
    is_kept = step < count[:, None]
    is_end = step == count[:, None]  # False at all steps if the episode ends at T_max
    # log p_t(i) of a token includes the probability of not stopping before it.
    token_log_prob = jnp.take_along_axis(trajectory.log_prob, choice[..., None], axis=-1)[..., 0]
    stop_log_prob = jnp.log(jnp.maximum(stop_prob, _MIN_PROB))
    step_log_prob = jnp.where(is_kept, token_log_prob, 0) + jnp.where(is_end, stop_log_prob, 0)
    log_prob = jnp.sum(step_log_prob, axis=1)
    return SampledSubsets(
        picks=first_picks(choice, count, trajectory.prob.shape[-1]),
        log_prob=log_prob,
        entropy=pointer_entropy(trajectory._replace(alive=is_kept)),
    )


@implicit_promotion()
def leave_one_out(reward: Float[Array, "g b"]) -> Float[Array, "g b"]:
    """Returns each subset's reward minus the mean reward of the row's other subsets.

    With these advantages, mean(advantage x log_prob) has the gradient of the mean reward
    (Kool et al., 2019, https://openreview.net/forum?id=r1lgTGL5DE).

    Args:
        reward: [g, b] rewards of g subsets per row.

    Returns:
        [g, b] advantages, with mean 0 over g.

    Raises:
        ValueError: g is below 2.
    """
    g = len(reward)
    if g < 2:
        raise ValueError(f"reward has {g} subset of each row, expected at least 2")
    return (reward - jnp.mean(reward, axis=0)) * (g / (g - 1))
