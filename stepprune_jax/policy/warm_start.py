"""The warm start: a policy learns from the gradients of the frozen model which tokens matter.

One backward pass of the frozen model tells how much each token contributes to an answer. The
pointer is trained towards these contributions by cross-entropy. No label is needed, because the
answer may be the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from stepprune_jax.policy.base import AnyArray, DecoderFns, Inputs, Limits, Params
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.decoder import POINTER
from stepprune_jax.policy.encoder import read_inputs
from stepprune_jax.policy.jax_settings import check_key, implicit_promotion, threefry
from stepprune_jax.policy.layers import MASKED
from stepprune_jax.policy.objective import pointer_entropy
from stepprune_jax.policy.selection import encode_episode, roll_out

# Number of tokens that an episode of the warm start chooses. The importance of most answers is
# spread over fewer tokens.
WARM_START_STEPS = 8


class WarmStart(NamedTuple):
    """Loss of the warm start, and metrics.

    Attributes:
        loss: [] cross-entropy in nats.
        covered: [] mean fraction of the importance that the chosen tokens have.
        entropy: [] mean entropy of the pointer in nats.
    """

    loss: Float[Array, ""]
    covered: Float[Array, ""]
    entropy: Float[Array, ""]


@implicit_promotion()
def token_importance(
    loss_fn: Callable[[Float[Array, "b n d"]], Float[Array, "*shape"]],
    tokens: Float[AnyArray, "b n d"],
    mean: Float[AnyArray, "d"] | None = None,
) -> Float[Array, "b n"]:
    """Computes how much each token contributes to a loss: (dL / dg_i)^2 at gates g = 1.

    The gate of a token scales it between the mean token and itself: mean + g (x - mean). The
    derivative is the inner product of the gradient of the token and x - mean, so one backward pass
    gives the importance of all tokens. The derivative is squared, so that the few tokens that
    decide an answer outweigh the many others together.

    Args:
        loss_fn: maps all tokens [b, n, d] to the loss of each row, or to the sum of these losses.
            The loss of the model's own answer needs no label.
        tokens: [b, n, d] tokens of the images.
        mean: [d] mean of the tokens of many images, such as `FeatureStats.mean`; None for the mean
            of each image's tokens.

    Returns:
        [b, n] importance of each token, at least 0, in float32.
    """
    tokens = jnp.asarray(tokens)
    grads = jax.grad(lambda tokens: jnp.sum(loss_fn(tokens)))(tokens)
    x = tokens.astype(jnp.float32)
    center = jnp.mean(x, axis=1, keepdims=True) if mean is None else mean
    return jnp.sum(grads.astype(jnp.float32) * (x - center), axis=-1) ** 2


def normalize_importance(importance: ArrayLike, real: Bool[Array, "b n"]) -> Float[Array, "b n"]:
    """Scales the importance of each row's real tokens to sum 1, without a gradient.

    Args:
        importance: [b, n] importance of each token, at least 0.
        real: [b, n] True at real tokens.

    Returns:
        [b, n] float32 weights; 0 in the padding, and everywhere in a row without importance.

    Raises:
        ValueError: `importance` has another shape than `real`.
    """
    importance = jnp.asarray(importance, jnp.float32)
    if importance.shape != real.shape:
        raise ValueError(f"importance is of shape {importance.shape}, expected {real.shape}")
    importance = jax.lax.stop_gradient(jnp.where(real, importance, 0))
    total = jnp.sum(importance, axis=1, keepdims=True)
    return importance / jnp.where(total > 0, total, 1)


@implicit_promotion()
def warm_start_loss(
    params: Params,
    config: PolicyConfig,
    key: Array,
    inputs: Inputs,
    importance: ArrayLike,
    *,
    steps: int = WARM_START_STEPS,
    decoder: DecoderFns = POINTER,
) -> WarmStart:
    """Computes the loss that trains the pointer towards the importance of the tokens.

    The policy samples an episode of `steps` tokens. With w_i the importance of token i, scaled to
    sum 1 over the image, and A_t the tokens that are not chosen before step t, the loss is the
    mean over steps of -sum_{i in A_t} w_i log p_t(i). A step whose remaining tokens have little
    importance therefore counts little.

    Args:
        params: policy weights; differentiate with respect to `params` only.
        config: policy configuration.
        key: PRNG key; consumed.
        inputs: image and question, never the answer.
        importance: [b, n] importance of each token, at least 0, as from `token_importance`. A row
            of zeros trains nothing.
        steps: number of tokens that the episode chooses.
        decoder: functions of the decoder.

    Returns:
        The loss, and metrics.

    Raises:
        ValueError: inputs do not fit the policy, or `importance` has another shape.
    """
    inputs, token_key = read_inputs(params, config, inputs), threefry(check_key(key))
    target = normalize_importance(importance, inputs.real)
    num_rows, n = target.shape
    steps = min(steps, n)
    # At temperature 1, tokens are drawn from the distribution that the loss trains.
    limits = Limits(budget=jnp.int32(steps), max_steps=steps, draw=1.0)
    episode = encode_episode(
        params,
        config,
        inputs,
        limits,
        decoder=decoder,
        key=jax.random.split(token_key, num_rows),
    )
    trajectory = roll_out(params, config, episode, decoder, "parallel")
    can_be_chosen = trajectory.log_prob > 0.5 * MASKED  # [b, t, n]
    terms = jnp.where(can_be_chosen, target[:, None] * trajectory.log_prob, 0)
    return WarmStart(
        loss=-jnp.mean(jnp.sum(terms, axis=-1)),
        covered=jnp.mean(jnp.sum(jnp.where(trajectory.selected, target, 0), axis=1)),
        entropy=pointer_entropy(trajectory),
    )
