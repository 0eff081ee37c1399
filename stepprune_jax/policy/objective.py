"""The policy's two pathways: soft for training (`gate`), hard for inference (`prune`)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.policy.budget import (
    differentiable_count,
    draw_budgets,
    draw_log_prices,
    soft_budget,
    update_running_count,
)
from stepprune_jax.policy.checks import (
    AnyArray,
    checked,
    is_static,
    require,
    require_finite,
    require_finite_tree,
    require_row_numbers,
)
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.decoder import Decoder, pointer_init, pointer_sequence, pointer_step
from stepprune_jax.policy.denoiser import denoise
from stepprune_jax.policy.encoder import encode, memory
from stepprune_jax.policy.episode import Bounds
from stepprune_jax.policy.gather import (
    ORDERS,
    Pruned,
    bucket_ladder,
    check_ladder,
    choose_bucket,
    gather,
)
from stepprune_jax.policy.losses import length_penalty, total_loss
from stepprune_jax.policy.noise_gate import FeatureStats, apply_gate, restore, standardise
from stepprune_jax.policy.params import INFERENCE_PARTS, PARTS, Params, check_params
from stepprune_jax.policy.pick import Picks, has_tables, pick
from stepprune_jax.policy.rollout import hard_feedback, straight_through
from stepprune_jax.policy.scores import expected_count, polarisation_temperature, trajectory_scores
from stepprune_jax.policy.select import select, select_parallel
from stepprune_jax.policy.soft_topk import soft_topk
from stepprune_jax.policy.trajectory import Trajectory, count_at_bias, log_price_growth


class Gated(NamedTuple):
    """Result of the training pathway: all N tokens, each as noisy as the policy decides.

    Attributes:
        tokens: X^, full length, in the space of the given features.
        alpha: gate of each token.
        budget: k of SoftTopK.
        trajectory: the selection behind it.
        price: factor on lambda for each row at its count, see `PolicyConfig.price_range` and
            `price_growth`.
        stopped: count at which a row stops by itself; under a probe, the one at a price factor of
            1.
        running_count: updated running mean of K.
    """

    tokens: Float[Array, "b n d"]
    alpha: Float[Array, "b n"]
    budget: Float[Array, "b"]
    trajectory: Trajectory
    price: Float[Array, "b"]
    stopped: Int[Array, "b"]
    running_count: Float[Array, ""]


def _encoded(params, config, image, text, image_mask, text_mask, text_gate, stats):
    """Returns the memory over standardised tokens, and those tokens."""
    x = standardise(jnp.asarray(image), stats)
    encoded = encode(
        params, config, x, text, image_mask=image_mask, text_mask=text_mask, text_gate=text_gate
    )
    return memory(params, encoded), x


def gate_tokens(
    params: Params,
    config: PolicyConfig,
    key: Array,
    x: Float[Array, "b n d"],
    alpha: Float[Array, "b n"],
    real: Bool[Array, "b n"],
    stats: FeatureStats | None,
) -> Float[Array, "b n d"]:
    """Gates tokens with noise, denoises them, and maps them back to the space of the features.

    Eqs. (13) and (14).

    Args:
        params: policy weights; the denoiser's are used.
        config: policy configuration.
        key: PRNG key; consumed.
        x: standardised tokens.
        alpha: gate of each token.
        real: True at real tokens; padding may hold anything.
        stats: statistics that `x` was standardised with, or `None`.

    Returns:
        The tokens, zero in the padding.
    """
    noisy = apply_gate(config.gate, key, jnp.where(real[..., None], x, 0), alpha)
    return jnp.where(real[..., None], restore(denoise(params, config, noisy), stats), 0)


@checked
def gate(
    params: Params,
    config: PolicyConfig,
    key: Array,
    image: Float[AnyArray, "b n d"],
    text: Float[AnyArray, "b l e"] | None,
    *,
    image_mask: Bool[AnyArray, "b n"] | None = None,
    text_mask: Bool[AnyArray, "b l"] | None = None,
    text_gate: ArrayLike = 1.0,
    stats: FeatureStats | None = None,
    running_count: ArrayLike = 0.0,
    stop_bias: ArrayLike = 0.0,
    max_steps: int | None = None,
    progress: ArrayLike = 1.0,
    init_fn: Callable[..., Decoder] = pointer_init,
    step_fn: Callable[..., Any] = pointer_step,
    sequence_fn: Callable[..., Array] | None = None,
    feedback_fn: Callable[..., Array] | None = None,
) -> Gated:
    """Selects softly and gates every token with noise, Eqs. (3)-(14).

    encode -> select -> scores -> SoftTopK -> noise gate -> denoise, with features standardised on
    the way in and restored on the way out if `stats` is given.

    Args:
        params: policy weights.
        config: policy configuration.
        key: PRNG key; consumed (budgets, prices and noise).
        image: image tokens X.
        text: word embeddings of the question, never of the answer.
        image_mask: True at real image tokens.
        text_mask: True at real text tokens.
        text_gate: g_txt.
        stats: statistics of the features; `None` skips standardisation.
        running_count: running mean of K, 0 at the start; read by `soft_budget="batch_mean"` only.
        stop_bias: added to the stop logits.
        max_steps: T_max, at most N; default `config.steps` of each row's real tokens.
        progress: share of training done, in [0, 1]; sets the temperature of SoftTopK where
            `config.polarisation_share` is above 0.
        init_fn: prepares the decoder; a custom decoder also defines `params["decoder"]`.
        step_fn: pointer logits of one step.
        sequence_fn: pointer logits of all steps, for the estimator `"parallel"`. Without one, that
            estimator differentiates the loop of a custom decoder, with the same gradient.
        feedback_fn: as in `select`, whose loop is then differentiated whatever the estimator;
            default `straight_through` or, for `"parallel"`, `hard_feedback`.

    Returns:
        The gated tokens, in the dtype of `image` and zero in the padding, and what led to them.
    """
    own_decoder = not has_tables(init_fn, step_fn)
    check_params(params, config, [part for part in PARTS if part != "decoder" or not own_decoder])
    image = jnp.asarray(image)
    b, n, _ = image.shape
    budget_key, noise_key = jax.random.split(key)
    slots, x = _encoded(params, config, image, text, image_mask, text_mask, text_gate, stats)
    real = jnp.ones((b, n), bool) if image_mask is None else jnp.asarray(image_mask)
    steps = Bounds(max_steps).steps(config, n)
    count = jnp.sum(real, axis=1)
    # T_max of a smaller image follows from its own tokens.
    halved = max_steps is None and config.max_steps is None
    longest = jnp.maximum(1, count // 2) if halved else steps
    if config.batch_budget == "probe":
        least = most = draw_budgets(budget_key, count, longest)
    else:
        least, most = jnp.minimum(config.min_tokens, longest), longest
    log_price = draw_log_prices(jax.random.fold_in(budget_key, 1), config, b)
    if sequence_fn is None and not own_decoder:
        sequence_fn = pointer_sequence
    through_loop = config.estimator == "straight_through" or feedback_fn is not None
    if through_loop or sequence_fn is None:
        default = straight_through if config.estimator == "straight_through" else hard_feedback
        chooser = functools.partial(select, feedback_fn=feedback_fn or default)
    else:
        chooser = functools.partial(select_parallel, sequence_fn=sequence_fn)
    trajectory = chooser(
        params,
        config,
        slots,
        image_mask=image_mask,
        max_steps=steps,
        min_tokens=least,
        max_tokens=most,
        stop_bias=stop_bias + log_price,
        init_fn=init_fn,
        step_fn=step_fn,
    )
    running = jnp.asarray(running_count, jnp.float32)
    running = update_running_count(running, trajectory.count)
    k = soft_budget(config, trajectory, running, count)
    alpha = soft_topk(
        trajectory_scores(config, trajectory),
        k,
        polarisation_temperature(config, progress),
        where=image_mask,
    )
    tokens = gate_tokens(params, config, noise_key, x, alpha, real, stats).astype(image.dtype)
    stopped = trajectory.count
    if config.batch_budget == "probe":
        stopped = count_at_bias(trajectory.margin, -log_price[:, None], config.min_tokens)
    price = jnp.exp(log_price + log_price_growth(config, trajectory.count, count))
    return Gated(tokens, alpha, k, trajectory, price, stopped, jax.lax.stop_gradient(running))


def train_loss(
    params: Params,
    config: PolicyConfig,
    key: Array,
    image: Float[AnyArray, "b n d"],
    text: Float[AnyArray, "b l e"] | None,
    lm_loss_fn: Callable[[Float[Array, "b n d"]], Float[Array, ""]],
    *,
    length_weight: ArrayLike | None = None,
    **arguments: Any,
) -> tuple[Float[Array, ""], Gated]:
    """Computes the training objective for any differentiable consumer of tokens, Eq. (15).

    Args:
        params: policy weights; differentiate with respect to these alone.
        config: policy configuration.
        key: PRNG key; consumed.
        image: image tokens.
        text: word embeddings of the question.
        lm_loss_fn: maps the gated tokens to the mean language-modelling loss. Frozen weights it
            needs should be arguments of the surrounding step, not constants.
        length_weight: lambda; default `config.length_weight`.
        **arguments: keyword arguments of `gate`.

    Returns:
        The loss, and the `Gated` behind it.
    """
    gated = gate(params, config, key, image, text, **arguments)
    trajectory, image_mask = gated.trajectory, arguments.get("image_mask")
    tokens = image.shape[1] if image_mask is None else jnp.sum(jnp.asarray(image_mask), axis=1)
    penalty = length_penalty(
        trajectory.count,
        differentiable_count(config, trajectory),
        tokens,
        price=gated.price,
    )
    weight = config.length_weight if length_weight is None else length_weight
    return total_loss(lm_loss_fn(gated.tokens), penalty, weight), gated


def policy_metrics(
    gated: Gated, image_mask: Bool[Array, "b n"] | None = None
) -> dict[str, Float[Array, ""]]:
    """Returns scalars that show whether a policy learns.

    `k_mean`, `k_std`: hard count. `k_soft`: expected count. `k_cap`: share of rows stopped by
    T_max. `alpha_in`, `alpha_out`: mean gate inside and
    outside the hard set. `iou`: agreement of {alpha > 1/2} with it. `entropy`: mean entropy in nats
    of the pointer over alive steps.
    """
    t, count = gated.trajectory, gated.stopped.astype(jnp.float32)
    real = jnp.ones(gated.alpha.shape, bool) if image_mask is None else image_mask
    outside = real & ~t.selected

    def mean(x, weight):
        return jnp.sum(x * weight) / jnp.maximum(jnp.sum(weight), 1)

    open_gate = (gated.alpha > 0.5) & real
    union = jnp.maximum(jnp.sum(open_gate | t.selected, axis=1), 1)
    share = jnp.exp(t.log_prob - t.log_continue[..., None])
    entropy = -jnp.sum(jnp.where(t.prob > 0, share * jnp.log(jnp.maximum(share, 1e-30)), 0), -1)
    return {
        "k_mean": jnp.mean(count),
        "k_std": jnp.std(count),
        "k_soft": jnp.mean(expected_count(t.stop_prob)),
        "k_cap": jnp.mean(count >= t.action.shape[1]),
        "alpha_in": mean(gated.alpha, t.selected.astype(jnp.float32)),
        "alpha_out": mean(gated.alpha, outside.astype(jnp.float32)),
        "iou": jnp.mean(jnp.sum(open_gate & t.selected, axis=1) / union),
        "entropy": mean(entropy, (t.alive & (jnp.sum(t.prob, -1) > 0)).astype(jnp.float32)),
    }


@checked
def choose(
    params: Params,
    config: PolicyConfig,
    image: Float[ArrayLike, "b n d"],
    text: Float[ArrayLike, "b l e"] | None,
    *,
    image_mask: Bool[ArrayLike, "b n"] | None = None,
    text_mask: Bool[ArrayLike, "b l"] | None = None,
    stats: FeatureStats | None = None,
    budget: ArrayLike | None = None,
    min_tokens: ArrayLike | None = None,
    max_tokens: ArrayLike | None = None,
    stop_bias: ArrayLike = 0.0,
    max_steps: int | None = None,
    group: int | None = None,
    init_fn: Callable[..., Decoder] = pointer_init,
    step_fn: Callable[..., Any] = pointer_step,
) -> Picks:
    """Chooses the tokens of a batch, entirely on the device: `prune` before it gathers.

    Every shape is static, so that it can be called inside a jitted function, followed by
    `gather(picks, image, capacity)`.

    Args, returns and raises as `prune` and `pick`.
    """
    slots, _ = _encoded(params, config, image, text, image_mask, text_mask, 1.0, stats)
    return pick(
        params,
        config,
        slots,
        image_mask=image_mask,
        max_steps=max_steps,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        budget=budget,
        stop_bias=stop_bias,
        group=group,
        init_fn=init_fn,
        step_fn=step_fn,
    )


_choose = jax.jit(choose, static_argnames=("config", "max_steps", "group", "init_fn", "step_fn"))
_gather = jax.jit(gather, static_argnames=("capacity", "order"))


@checked
def prune(
    params: Params,
    config: PolicyConfig,
    image: Float[AnyArray, "b n d"],
    text: Float[AnyArray, "b l e"] | None,
    *,
    image_mask: Bool[AnyArray, "b n"] | None = None,
    text_mask: Bool[AnyArray, "b l"] | None = None,
    stats: FeatureStats | None = None,
    budget: ArrayLike | None = None,
    min_tokens: ArrayLike | None = None,
    max_tokens: ArrayLike | None = None,
    stop_bias: ArrayLike = 0.0,
    max_steps: int | None = None,
    group: int | None = None,
    ladder: Sequence[int] | None = None,
    order: str = "raster",
    init_fn: Callable[..., Decoder] = pointer_init,
    step_fn: Callable[..., Any] = pointer_step,
) -> Pruned:
    """Prunes a batch of image tokens for its questions: the inference pathway.

    Runs two compiled programs: one selects; the host reads the largest count and chooses a bucket;
    the other gathers. The first is compiled once per shape, the second once per bucket. There is no
    noise and no denoiser. Inside a jitted function, where no count can be read, call `choose` and
    `gather`.

    Args:
        params: policy weights.
        config: policy configuration.
        image: image tokens X.
        text: word embeddings of the question.
        image_mask: True at real image tokens.
        text_mask: True at real text tokens.
        stats: the statistics the policy was trained with.
        budget: exact count, at most T_max; an integer or one per row.
        min_tokens: smallest count of a row.
        max_tokens: largest count of a row.
        stop_bias: added to the stop logits; see `calibrate_stop_bias`.
        max_steps: T_max, at most N; default `config.steps(n)`.
        group: tokens taken from one pointer distribution; default `config.group`.
        ladder: bucket sizes; default `bucket_ladder(T_max)`.
        order: order of the kept tokens, as in `gather`.
        init_fn: prepares the decoder; a program is compiled for each pair of functions.
        step_fn: pointer logits of one step.

    Returns:
        The kept tokens in the smallest bucket that holds every row.

    Raises:
        ValueError: as `encode` and `select`, or weights that do not fit the configuration or are
            not finite, before anything is compiled; as `choose_bucket`, once the counts are known.
        TypeError: called inside a jitted function.
    """
    if not all(map(is_static, jax.tree.leaves((params, image, text)))):
        raise TypeError(
            "prune reads the counts on the host and cannot be jitted: jit choose(params, config, "
            "image, text, ...) and gather(picks, image, capacity), or Policy.select_fn"
        )
    own_decoder = not has_tables(init_fn, step_fn)
    check_params(params, config, ("encoder", "stop") if own_decoder else INFERENCE_PARTS)
    require_finite("image", image, image_mask)
    if text is not None:
        require_finite("text", text, text_mask)
    require_finite_tree("params", params)
    require_finite_tree("stats", stats)
    require_row_numbers("stop_bias", stop_bias, image.shape[0])
    require(0 not in image.shape, "image", f"of shape {image.shape}", "at least one token")
    require(order in ORDERS, "order", repr(order), f"one of {ORDERS}")
    bounds = Bounds(max_steps, min_tokens, max_tokens, budget, group)
    steps, limits = bounds.read(config, *image.shape[:2])
    sizes = bucket_ladder(steps) if ladder is None else ladder
    check_ladder(sizes)
    picks = _choose(
        params,
        config,
        image,
        text,
        image_mask=image_mask,
        text_mask=text_mask,
        stats=stats,
        stop_bias=stop_bias,
        max_steps=steps,
        group=bounds.tokens_a_step(config, image.shape[1]),
        init_fn=init_fn,
        step_fn=step_fn,
        **(limits._asdict() if budget is None else {"budget": limits.max_tokens}),
    )
    return _gather(picks, image, choose_bucket(picks.count, sizes), order=order)
