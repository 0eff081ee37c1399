"""The training pathway: `gate` makes every token as noisy as the policy decides; Eq. (15)."""

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
from stepprune_jax.policy.rollout import longest
from stepprune_jax.policy.scores import expected_count, polarisation_temperature, trajectory_scores
from stepprune_jax.policy.selection import begin, roll_out
from stepprune_jax.policy.soft_topk import soft_topk
from stepprune_jax.policy.trajectory import log_price_growth

# Shape of the language-modelling loss, in words.
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
    """Selects softly and gates every token with noise, Eqs. (3)-(14).

    encode -> select -> scores -> SoftTopK -> noise gate -> denoise, with features standardised on
    the way in and restored on the way out.

    Args:
        params: policy weights; a custom decoder defines `params["decoder"]`.
        config: policy configuration. Without `max_steps`, T_max follows from each row's own tokens.
        key: PRNG key; consumed (budgets, prices and noise).
        inputs: image and question, never the answer.
        progress: schedules of the training so far.
        stop_bias: added to the stop logits.
        decoder: functions of the decoder.

    Returns:
        The gated tokens and what led to them.

    Raises:
        ValueError: features or embeddings of another width, or masks of another shape.
    """
    inputs = read_inputs(params, config, inputs)
    budget_key, noise_key = jax.random.split(check_key(key))
    # The history is that of the best tokens, as printed.
    count, limits = jnp.sum(inputs.real, axis=1), Limits(draw=0.0)
    most = longest(config, count)
    if config.batch_budget == "probe":
        shares = budget_range(RANDOM_BUDGET, config.budget_anneal, progress.share)
        budget = draw_budgets(budget_key, count, most, shares)
        limits = Limits(min_tokens=budget, max_tokens=budget, draw=0.0)
    log_price = draw_log_prices(jax.random.fold_in(budget_key, 1), config, len(count))
    bias = stop_bias + log_price
    episode = begin(params, config, inputs, limits, progress.text_gate, bias, decoder)
    trajectory = late_stop(config, roll_out(params, config, episode, decoder), progress.share)
    running, state = 0.0, ()
    if config.soft_budget == "batch_mean":
        (before,) = jax.tree.leaves(progress.state) or (0.0,)
        running = state = update_running_count(before, trajectory.count)
    k = soft_budget(config, trajectory, running, count)
    scores = trajectory_scores(config, trajectory)
    temperature = polarisation_temperature(config, progress.share)
    alpha = soft_topk(scores, k, temperature, where=inputs.image_mask)
    stopped = trajectory.count
    if config.batch_budget == "probe":
        stopped = count_at_price(config, trajectory, log_price, most)
    return Gated(
        tokens=gate_tokens(params, config, noise_key, inputs, alpha),
        alpha=alpha,
        budget=k,
        trajectory=trajectory,
        price=jnp.exp(log_price + log_price_growth(config, trajectory.count, count)),
        stopped=stopped,
        shortest=jnp.minimum(config.min_tokens, most),
        longest=most,
        state=jax.lax.stop_gradient(state),
        real=inputs.real,
    )


def length_penalty(
    count: Int[AnyArray, "b"],
    expected: Float[AnyArray, "b"],
    num_tokens: ArrayLike,
    price: Float[AnyArray, "b"],
) -> Float[Array, ""]:
    """Returns the mean of K/N times the price, with the gradient of E[K]/N.

    The hard count has no gradient; the expected one carries it through every stop probability.
    """
    expected = jnp.asarray(expected)
    soft = jnp.asarray(count) + (expected - jax.lax.stop_gradient(expected))
    ratio = soft / jnp.maximum(jnp.asarray(num_tokens, soft.dtype), 1)
    return jnp.mean(ratio * price)


def require_losses(name: str, losses: Any, shape: tuple[int, ...], expected: str) -> None:
    """Raises a ValueError unless a user's function returned losses of a shape.

    A wrong shape would broadcast: losses [b] in place of [b, g] give plausible metrics.

    Args:
        name: name of the function, for the message.
        losses: result of the function.
        shape: shape that the losses must have.
        expected: description of that shape, for the message.
    """
    given = jax.tree.map(lambda leaf: tuple(np.shape(leaf)), losses)
    if given != shape:
        raise ValueError(f"{name} returned losses of shape {given}, expected {expected}")


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
    """Computes the training objective for any differentiable consumer of tokens, Eq. (15).

    L = L_LM + lambda K/N, in at least float32.

    Args:
        params: policy weights; differentiate with respect to these alone.
        config: policy configuration.
        key: PRNG key; consumed.
        inputs: image and question, never the answer.
        lm_loss_fn: maps the gated tokens to the mean language-modelling loss. Frozen weights it
            needs should be arguments of the surrounding step, not constants.
        progress: schedules of the training so far.
        length_weight: lambda; default `config.length_weight`.
        decoder: functions of the decoder.

    Returns:
        The loss, and what led to it.

    Raises:
        ValueError: as `gate`, or a language-modelling loss that is no scalar.
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
    """L = L_LM + lambda K/N, Eq. (15), in at least float32."""
    trajectory, tokens = gated.trajectory, jnp.sum(gated.real, axis=1)
    expected = differentiable_count(config, trajectory)
    penalty = length_penalty(trajectory.count, expected, tokens, gated.price)
    wide = score_dtype(lm_loss.dtype)
    return lm_loss.astype(wide) + length_weight * penalty.astype(wide)


@implicit_promotion()
def policy_metrics(aux: TrainAux) -> dict[str, Float[Array, ""]]:
    """Returns scalars that show whether a policy learns.

    `lm_loss`: the loss without its penalty. `k_mean`, `k_std`, `k_floor`, `k_cap`: what the learned
    stop keeps, see `stop_metrics`. `k_soft`: expected count. `alpha_in`, `alpha_out`: mean gate
    inside and outside the hard set. `iou`: agreement of {alpha > 1/2} with it. `entropy`: mean
    entropy in nats of the pointer over alive steps.
    """
    gated, t = aux.gated, aux.gated.trajectory
    return {
        "lm_loss": aux.lm_loss,
        **stop_metrics(gated.stopped, gated.shortest, gated.longest),
        "k_soft": jnp.mean(expected_count(t.stop_prob)),
        "entropy": pointer_entropy(t),
        **gate_metrics(gated.alpha, t.selected, gated.real),
    }


def stop_metrics(
    count: Int[Array, "b"], shortest: Int[Array, "b"], longest: Int[Array, "b"]
) -> dict[str, Float[Array, ""]]:
    """Returns mean and deviation of the counts at which rows stop, and the shares at a bound.

    `k_floor` is the share of rows that stop at the minimum, `k_cap` the share that T_max ends.
    """
    wide = count.astype(jnp.float32)
    return {
        "k_mean": jnp.mean(wide),
        "k_std": jnp.std(wide),
        "k_floor": jnp.mean((count <= shortest).astype(jnp.float32)),
        "k_cap": jnp.mean((count >= longest).astype(jnp.float32)),
    }


def gate_metrics(
    alpha: Float[Array, "b n"], selected: Bool[Array, "b n"], real: Bool[Array, "b n"]
) -> dict[str, Float[Array, ""]]:
    """Returns the mean gate inside and outside the hard set, and {alpha > 1/2}'s agreement."""
    open_gate = (alpha > 0.5) & real

    def mean(where):
        return jnp.sum(alpha * where) / jnp.maximum(jnp.sum(where), 1)

    union = jnp.maximum(jnp.sum(open_gate | selected, axis=1), 1)
    return {
        "alpha_in": mean(selected),
        "alpha_out": mean(real & ~selected),
        "iou": jnp.mean(jnp.sum(open_gate & selected, axis=1) / union),
    }


def pointer_entropy(t: Trajectory) -> Float[Array, ""]:
    """Returns the mean entropy of the pointer in nats, over steps that point at a token."""
    share = jnp.exp(t.log_prob - t.log_continue[..., None])
    entropy = -jnp.sum(jnp.where(t.prob > 0, share * jnp.log(jnp.maximum(share, 1e-30)), 0), -1)
    asked = (t.alive & (jnp.sum(t.prob, -1) > 0)).astype(jnp.float32)
    return jnp.sum(entropy * asked) / jnp.maximum(jnp.sum(asked), 1)
