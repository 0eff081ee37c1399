"""The training pathway: gating of all tokens with noise, and the objective, Eq. (15)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.policy.base import (
    AnyArray,
    DecoderFns,
    Gated,
    Inputs,
    Limits,
    Params,
    Progress,
    TrainAux,
    Trajectory,
)
from stepprune_jax.policy.budget import (
    RANDOM_BUDGET,
    budget_range,
    count_at_price,
    differentiable_count,
    draw_budgets,
    draw_log_prices,
    late_stop,
    soft_budget,
    update_running_count,
)
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.decoder import POINTER
from stepprune_jax.policy.encoder import read_inputs
from stepprune_jax.policy.jax_settings import check_key, implicit_promotion
from stepprune_jax.policy.layers import score_dtype
from stepprune_jax.policy.noise import gate_tokens
from stepprune_jax.policy.rollout import max_steps_per_row
from stepprune_jax.policy.scores import expected_count, polarisation_temperature, trajectory_scores
from stepprune_jax.policy.selection import encode_episode, roll_out
from stepprune_jax.policy.soft_topk import soft_topk
from stepprune_jax.policy.trajectory import log_price_growth

# Expected shape of the language-modeling loss, for error messages.
ONE_LOSS = "a scalar, the mean over the batch"


@implicit_promotion()
def gate(
    params: Params,
    config: PolicyConfig,
    key: Array,
    inputs: Inputs,
    progress: Progress = Progress(),
    *,
    stop_bias: ArrayLike = 0.0,
    decoder: DecoderFns = POINTER,
) -> Gated:
    """Runs the training pathway: mixes every image token with noise by its score, Eqs. (3)-(14).

    The steps are: encode tokens and question, select tokens step by step, sum the selection
    probabilities to one score per token, turn scores to gates in [0, 1] with SoftTopK, mix each
    token with noise by its gate, and denoise. Features are standardized first and restored last.

    Args:
        params: policy weights; a custom decoder defines `params["decoder"]`.
        config: policy configuration. If `max_steps` is None, T_max is computed from the number of
            real tokens of each row.
        key: PRNG key; consumed (budgets, prices and noise).
        inputs: image and question, never the answer.
        progress: progress of training.
        stop_bias: added to the stop logits.
        decoder: functions of the decoder.

    Returns:
        The gated tokens, and the episode, budget and gates that they were computed from.

    Raises:
        ValueError: features or embeddings have another width, or masks another shape.
    """
    inputs = read_inputs(params, config, inputs)
    budget_key, noise_key = jax.random.split(check_key(key))
    num_tokens = jnp.sum(inputs.real, axis=1)
    max_steps = max_steps_per_row(config, num_tokens)
    # Temperature 0: as in the paper, each step conditions on the most probable previous tokens.
    limits = Limits(draw=0.0)
    if config.batch_budget == "probe":
        # Every row keeps a random number of tokens, which trains the policy for all budgets.
        fraction_range = budget_range(RANDOM_BUDGET, config.budget_anneal, progress.share)
        budget = draw_budgets(budget_key, num_tokens, max_steps, fraction_range)
        limits = Limits(min_tokens=budget, max_tokens=budget, draw=0.0)
    log_price = draw_log_prices(jax.random.fold_in(budget_key, 1), config, len(num_tokens))
    episode = encode_episode(
        params,
        config,
        inputs,
        limits,
        text_gate=progress.text_gate,
        stop_bias=stop_bias + log_price,
        decoder=decoder,
    )
    trajectory = late_stop(config, roll_out(params, config, episode, decoder), progress.share)
    # The state of training is the running mean count, if k is that mean.
    running_count, state = 0.0, ()
    if config.soft_budget == "batch_mean":
        (previous_count,) = jax.tree.leaves(progress.state) or (0.0,)
        running_count = state = update_running_count(previous_count, trajectory.count)
    k = soft_budget(config, trajectory, running_count, num_tokens)
    scores = trajectory_scores(config, trajectory)
    temperature = polarisation_temperature(config, progress.share)
    alpha = soft_topk(scores, k, temperature, where=inputs.image_mask)
    stop_count = trajectory.count
    if config.batch_budget == "probe":
        # `trajectory.count` is the random budget. Metrics need the count of the learned stop.
        stop_count = count_at_price(config, trajectory, log_price, max_steps)
    return Gated(
        tokens=gate_tokens(params, config, noise_key, inputs, alpha),
        alpha=alpha,
        budget=k,
        trajectory=trajectory,
        price=jnp.exp(log_price + log_price_growth(config, trajectory.count, num_tokens)),
        stopped=stop_count,
        shortest=jnp.minimum(config.min_tokens, max_steps),
        longest=max_steps,
        state=jax.lax.stop_gradient(state),
        real=inputs.real,
    )


def length_penalty(
    count: Int[AnyArray, "b"],
    expected: Float[AnyArray, "b"],
    num_tokens: ArrayLike,
    price: Float[AnyArray, "b"],
) -> Float[Array, ""]:
    """Returns the mean of price * K/N over rows, with the gradient of price * E[K]/N.

    Args:
        count: [b] K, the number of kept tokens, which has no gradient.
        expected: [b] differentiable surrogate of the count, such as E[K].
        num_tokens: N, the number of real tokens; a number or one per row.
        price: [b] factor on each row's penalty.

    Returns:
        [] the penalty, before its factor lambda.
    """
    expected = jnp.asarray(expected)
    straight_through = jnp.asarray(count) + (expected - jax.lax.stop_gradient(expected))
    ratio = straight_through / jnp.maximum(jnp.asarray(num_tokens, straight_through.dtype), 1)
    return jnp.mean(ratio * price)


def require_losses(name: str, losses: Any, shape: tuple[int, ...], expected: str) -> None:
    """Raises a ValueError unless a user's loss function returned losses of the required shape.

    Losses of another shape could broadcast: losses [b] in place of [b, g] give plausible metrics.

    Args:
        name: name of the function, for the message.
        losses: result of the function.
        shape: required shape of the losses.
        expected: description of the required shape, for the message.
    """
    actual_shape = jax.tree.map(lambda leaf: tuple(np.shape(leaf)), losses)
    if actual_shape != shape:
        raise ValueError(f"{name} returned losses of shape {actual_shape}, expected {expected}")


@implicit_promotion()
def train_loss(
    params: Params,
    config: PolicyConfig,
    key: Array,
    inputs: Inputs,
    lm_loss_fn: Callable[[Float[Array, "b n d"]], Float[Array, ""]],
    *,
    progress: Progress = Progress(),
    length_weight: ArrayLike | None = None,
    decoder: DecoderFns = POINTER,
) -> tuple[Float[Array, ""], TrainAux]:
    """Computes the training objective L = L_LM + lambda K/N, Eq. (15), in at least float32.

    Args:
        params: policy weights; differentiate with respect to `params` only.
        config: policy configuration.
        key: PRNG key; consumed.
        inputs: image and question, never the answer.
        lm_loss_fn: maps the gated tokens [b, n, d] to the mean language-modeling loss []. Any
            differentiable function of the tokens can be used. Pass its frozen weights as arguments
            of the jitted training step: captured weights would be compiled in as constants.
        progress: progress of training.
        length_weight: lambda; default `config.length_weight`.
        decoder: functions of the decoder.

    Returns:
        The loss, and auxiliary output for `policy_metrics`.

    Raises:
        ValueError: inputs that `gate` rejects, or `lm_loss_fn` returned no scalar.
    """
    gated = gate(params, config, key, inputs, progress, decoder=decoder)
    lm_loss = lm_loss_fn(gated.tokens)
    require_losses("lm_loss_fn", lm_loss, (), ONE_LOSS)
    lm_loss = jnp.asarray(lm_loss)
    weight = config.length_weight if length_weight is None else length_weight
    return total_loss(config, gated, lm_loss, weight), TrainAux(gated, lm_loss)


def total_loss(
    config: PolicyConfig, gated: Gated, lm_loss: Float[Array, ""], length_weight: ArrayLike
) -> Float[Array, ""]:
    """Adds the length penalty to the language-modeling loss, Eq. (15).

    Args:
        config: policy configuration.
        gated: result of `gate`.
        lm_loss: [] language-modeling loss on the gated tokens.
        length_weight: lambda, the weight of the penalty.

    Returns:
        [] the loss, in at least float32.
    """
    trajectory, num_tokens = gated.trajectory, jnp.sum(gated.real, axis=1)
    expected = differentiable_count(config, trajectory)
    penalty = length_penalty(trajectory.count, expected, num_tokens, gated.price)
    dtype = score_dtype(lm_loss.dtype)
    return lm_loss.astype(dtype) + length_weight * penalty.astype(dtype)


@implicit_promotion()
def policy_metrics(aux: TrainAux) -> dict[str, Float[Array, ""]]:
    """Returns scalars for monitoring the training of a policy.

    Args:
        aux: auxiliary output of `train_loss`.

    Returns:
        Scalars by name:

        * `lm_loss`: language-modeling loss, without the length penalty.
        * `k_mean`, `k_std`, `k_floor`, `k_cap`: counts of the learned stop; see `stop_metrics`.
        * `k_soft`: expected number of kept tokens if the stop is sampled.
        * `alpha_in`, `alpha_out`, `iou`: gates of kept and dropped tokens; see `gate_metrics`.
        * `entropy`: mean entropy of the pointer in nats, over the steps that choose a token.
    """
    gated, trajectory = aux.gated, aux.gated.trajectory
    return {
        "lm_loss": aux.lm_loss,
        **stop_metrics(gated.stopped, gated.shortest, gated.longest),
        "k_soft": jnp.mean(expected_count(trajectory.stop_prob)),
        "entropy": pointer_entropy(trajectory),
        **gate_metrics(gated.alpha, trajectory.selected, gated.real),
    }


def stop_metrics(
    count: Int[Array, "b"], shortest: Int[Array, "b"], longest: Int[Array, "b"]
) -> dict[str, Float[Array, ""]]:
    """Returns statistics of the number of tokens that each row keeps by its learned stop.

    Args:
        count: [b] number of kept tokens.
        shortest: [b] smallest possible count: the number of tokens before the stop is available.
        longest: [b] largest possible count, T_max.

    Returns:
        Scalars by name: the mean `k_mean` and standard deviation `k_std` of the counts, and the
        fractions of rows at the smallest count (`k_floor`) and at the largest count (`k_cap`).
    """
    count_f32 = count.astype(jnp.float32)
    return {
        "k_mean": jnp.mean(count_f32),
        "k_std": jnp.std(count_f32),
        "k_floor": jnp.mean((count <= shortest).astype(jnp.float32)),
        "k_cap": jnp.mean((count >= longest).astype(jnp.float32)),
    }


def gate_metrics(
    alpha: Float[Array, "b n"], selected: Bool[Array, "b n"], real: Bool[Array, "b n"]
) -> dict[str, Float[Array, ""]]:
    """Returns metrics that compare the gates of training with the kept tokens of inference.

    Args:
        alpha: [b, n] gate of each token, in [0, 1].
        selected: [b, n] True at kept tokens.
        real: [b, n] True at real tokens.

    Returns:
        Scalars by name: `alpha_in` and `alpha_out`, the mean gates of kept and of dropped tokens,
        and `iou`, the intersection over union of the kept tokens and the tokens with alpha > 1/2.
    """
    is_open = (alpha > 0.5) & real

    def mean_gate(where):
        return jnp.sum(alpha * where) / jnp.maximum(jnp.sum(where), 1)

    union = jnp.maximum(jnp.sum(is_open | selected, axis=1), 1)
    return {
        "alpha_in": mean_gate(selected),
        "alpha_out": mean_gate(real & ~selected),
        "iou": jnp.mean(jnp.sum(is_open & selected, axis=1) / union),
    }


def pointer_entropy(trajectory: Trajectory) -> Float[Array, ""]:
    """Returns the mean entropy in nats of the distributions that tokens are chosen from.

    Args:
        trajectory: the episodes.

    Returns:
        [] mean over all steps that choose a token; 0 if there is no such step.
    """
    # p_t(i) / (1 - p_t(stop)): the distribution over tokens if the episode continues.
    prob = jnp.exp(trajectory.log_prob - trajectory.log_continue[..., None])
    # 1e-30 avoids log(0); a product with a probability of 0 is 0.
    terms = jnp.where(trajectory.prob > 0, prob * jnp.log(jnp.maximum(prob, 1e-30)), 0)
    entropy = -jnp.sum(terms, -1)
    is_choice = trajectory.alive & (jnp.sum(trajectory.prob, -1) > 0)
    weight = is_choice.astype(jnp.float32)
    return jnp.sum(entropy * weight) / jnp.maximum(jnp.sum(weight), 1)
