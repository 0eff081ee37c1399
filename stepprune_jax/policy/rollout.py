"""An episode and its loop: the token that each step points at, and its gradient.

The loop runs all `steps` steps and ignores the stop. The pointer always moves on to the best
remaining token, so a token's score exists at every step. The end of the episode is decided
afterwards, from the same logits (`trajectory.py`).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from stepprune_jax.policy.base import AnyArray, DecoderFns, FeedbackFn, Limits, Params, StepFn
from stepprune_jax.policy.config import PolicyConfig, is_integer, is_number
from stepprune_jax.policy.decoder import POINTER
from stepprune_jax.policy.jax_settings import THREEFRY, implicit_promotion, threefry
from stepprune_jax.policy.layers import score_dtype
from stepprune_jax.policy.trajectory import RowLimits, step_distribution


class Episode(NamedTuple):
    """Prepared episode of a batch, created by `start_episode`.

    Attributes:
        query: first query of the decoder.
        context: decoder context; see `InitFn`.
        cache: empty decoder cache; see `InitFn`.
        slots: memory of the decoder; zero in the padding.
        image_mask: True at real image tokens.
        limits: bounds on the count of each row.
        stop_bias: number added to the stop logits of each row.
        steps: T_max.
        group: number of tokens that are taken from one pointer distribution.
        exact: whether the count is an exact budget, so the stop need not be evaluated.
        key: PRNG key of each row; None if tokens are not sampled.
        draw: sampling temperature; 0 takes the most probable tokens.
    """

    query: Float[Array, "b d"]
    context: Any
    cache: Any
    slots: Float[Array, "b m d"]
    image_mask: Bool[Array, "b n"]
    limits: RowLimits
    stop_bias: Float[Array, "b"]
    steps: int
    group: int
    exact: bool
    key: Key[Array, "b"] | None
    draw: float | int


def read_limits(
    limits: Limits, config: PolicyConfig, batch: int, num_tokens: int
) -> tuple[int, int, RowLimits]:
    """Resolves limits to T_max, the group and the bounds of each row.

    Args:
        limits: bounds on the counts.
        config: policy configuration, which fills in missing limits.
        batch: number of rows.
        num_tokens: number of image tokens per row.

    Returns:
        A tuple (T_max, group, bounds).

    Raises:
        ValueError: T_max or the group is below 1; a concrete count is out of range; `min_tokens`
            exceeds `max_tokens`; or a budget is combined with another bound.
    """
    steps = config.steps(num_tokens) if limits.max_steps is None else limits.max_steps
    group = config.group if limits.group is None else limits.group
    for name, value in (("max_steps (T_max)", steps), ("group", group)):
        if not (is_integer(value) and value >= 1):
            raise ValueError(f"{name} is {value!r}, expected an integer from 1")
    steps, group = min(steps, num_tokens), min(group, num_tokens)
    low, high = limits.min_tokens, limits.max_tokens
    if limits.budget is not None:
        if low is not None or high is not None:
            raise ValueError("budget is given with min_tokens or max_tokens, expected one of them")
        source = f", T_max (max_steps) of {num_tokens} tokens"
        exact = row_counts("budget", limits.budget, 1, steps, batch, source=source)
        return steps, group, RowLimits(exact, exact)
    min_tokens = min(config.min_tokens, steps) if low is None else low
    min_tokens = row_counts("min_tokens", min_tokens, 0, steps, batch)
    max_tokens = row_counts("max_tokens", steps if high is None else high, 0, num_tokens, batch)
    is_concrete = not any(x is None or isinstance(x, Tracer) for x in (low, high))
    if is_concrete and (np.asarray(low) > np.asarray(high)).any():
        raise ValueError(f"min_tokens is {low}, expected at most max_tokens ({high})")
    return steps, group, RowLimits(min_tokens, max_tokens)


def max_steps_per_row(config: PolicyConfig, num_tokens: Int[AnyArray, "b"]) -> Int[Array, "b"]:
    """Returns T_max of each row, given its number of real tokens; see `PolicyConfig.steps`."""
    if config.max_steps is None:
        return jnp.maximum(1, num_tokens // 2)
    return jnp.maximum(1, jnp.minimum(config.max_steps, num_tokens))


def row_counts(
    name: str, value: ArrayLike, low: int, high: int, batch: int, *, source: str = ""
) -> Int[Array, "b"]:
    """Broadcasts a count to one integer per row, and checks a concrete count.

    Args:
        name: name of the argument, for the message.
        value: an integer, or one integer per row.
        low: smallest valid count.
        high: largest valid count.
        batch: number of rows.
        source: explanation of `high` that is appended to the message.

    Raises:
        ValueError: a concrete count is no integer, or lies outside [low, high].
    """
    if not isinstance(value, Tracer):
        counts = np.asarray(value)
        if counts.dtype.kind not in "iu" or counts.shape not in ((), (batch,)):
            raise ValueError(f"{name} is {value!r}, expected an integer or one for each row")
        if not ((counts >= low) & (counts <= high)).all():
            raise ValueError(f"{name} is {value}, expected within [{low}, {high}]{source}")
    return jnp.broadcast_to(jnp.asarray(value, jnp.int32), (batch,))


def start_episode(
    params: Params,
    config: PolicyConfig,
    memory: Float[AnyArray, "b m d"],
    image_mask: Bool[AnyArray, "b n"] | None = None,
    limits: Limits = Limits(),
    *,
    stop_bias: ArrayLike = 0.0,
    decoder: DecoderFns = POINTER,
    key: Array | None = None,
) -> Episode:
    """Prepares an episode over the encoded image tokens.

    Args:
        params: policy weights.
        config: policy configuration.
        memory: [b, m, d] encoded image tokens, followed by the stop slot.
        image_mask: [b, n] True at real image tokens; None marks all tokens as real.
        limits: bounds on the counts.
        stop_bias: added to the stop logits, a number or one per row.
        decoder: functions of the decoder.
        key: PRNG key of the sampled tokens, one for all rows or one per row.

    Raises:
        ValueError: limits, key or sampling temperature are invalid.
    """
    b, n = memory.shape[0], memory.shape[1] - 1
    image_mask = jnp.ones((b, n), bool) if image_mask is None else jnp.asarray(image_mask)
    memory_mask = jnp.concatenate([image_mask, jnp.ones((b, 1), bool)], axis=1)
    steps, group, row_limits = read_limits(limits, config, b, n)
    # A row cannot keep more tokens than it has, whatever the budget.
    num_tokens = jnp.sum(image_mask, axis=1, dtype=jnp.int32)
    max_tokens = jnp.minimum(row_limits.max_tokens, num_tokens)
    if limits.max_steps is None and limits.budget is None:
        max_tokens = jnp.minimum(max_tokens, max_steps_per_row(config, num_tokens))
    slots = jnp.where(memory_mask[..., None], memory, 0)
    query, context, cache = decoder.init(params, config, slots, memory_mask, steps)
    bias = jnp.asarray(stop_bias, score_dtype(memory.dtype))
    temperature = read_temperature(limits, config)
    return Episode(
        query=query,
        context=context,
        cache=cache,
        slots=slots,
        image_mask=image_mask,
        limits=RowLimits(jnp.minimum(row_limits.min_tokens, max_tokens), max_tokens),
        stop_bias=jnp.broadcast_to(bias, (b,)),
        steps=steps,
        group=group,
        exact=limits.budget is not None,
        key=read_key(key, b) if temperature else None,
        draw=temperature,
    )


def read_temperature(limits: Limits, config: PolicyConfig) -> float | int:
    """Returns the sampling temperature.

    Raises:
        ValueError: the temperature is not a number >= 0.
    """
    temperature = config.draw if limits.draw is None else limits.draw
    if not (is_number(temperature) and temperature >= 0):
        raise ValueError(f"draw is {temperature!r}, expected a number >= 0")
    return temperature


def read_key(key: Array | None, batch: int) -> Key[Array, "b"]:
    """Returns one threefry key per row; all rows share one key unless each has its own.

    Args:
        key: one PRNG key, one per row, or None for the key of seed 0.
        batch: number of rows.

    Raises:
        ValueError: `key` is neither one PRNG key nor one for each row.
    """
    keys = jax.random.key(0, impl=THREEFRY) if key is None else threefry(key)
    if keys.shape not in ((), (batch,)):
        raise ValueError(f"key is {key!r}, expected one PRNG key, or one for each row")
    return jnp.broadcast_to(keys, (batch,))


def gumbel(
    scale: float | int,
    key: Key[Array, "b"],
    step: Int[Array, ""],
    num_tokens: int,
    dtype: DTypeLike,
) -> Float[Array, "b n"]:
    """Samples the Gumbel noise of a step: the argmax of noisy logits is a sample.

    The noise of a token depends on its row's key, the step and its position, but not on other rows
    or the amount of padding.

    Args:
        scale: temperature of the sampled distribution; multiplies the noise.
        key: [b] PRNG key of each row.
        step: number of the step.
        num_tokens: n, the number of image slots.
        dtype: dtype of the noise.
    """
    keys = jax.vmap(jax.random.fold_in, (0, None))(key, step)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (num_tokens,), dtype))(keys)
    return scale * noise


def perturbed_logits(
    config: PolicyConfig,
    episode: Episode,
    logits: Float[Array, "b m"],
    step: Int[Array, ""],
) -> Float[Array, "b n"]:
    """Returns the logits of the image slots, plus the Gumbel noise of `step` if sampling."""
    image_logits = logits[:, :-1]
    if episode.key is None:
        return image_logits
    scale, num_tokens = episode.draw * config.temperature, image_logits.shape[1]
    return image_logits + gumbel(scale, episode.key, step, num_tokens, image_logits.dtype)


def best_token(
    image_logits: Float[Array, "*b n"], available: Bool[Array, "*b n"]
) -> Int[Array, "*b"]:
    """Returns the available image slot with the largest logit; ties go to the lowest index."""
    return jnp.argmax(mask_logits(image_logits, available), axis=-1).astype(jnp.int32)


def best_tokens(
    image_logits: Float[Array, "b n"], available: Bool[Array, "b n"], group: int
) -> Int[Array, "b g"]:
    """Returns the `group` available image slots with the largest logits, best first."""
    if group == 1:
        return best_token(image_logits, available)[:, None]
    return jax.lax.top_k(mask_logits(image_logits, available), group)[1].astype(jnp.int32)


def remaining_max_logit(
    image_logits: Float[Array, "b n"], available: Bool[Array, "b n"], choice: Int[Array, "b g"]
) -> Float[Array, "b g"]:
    """Returns the largest logit among the slots that remain before each choice of a group."""
    is_chosen = choice[..., None] == jnp.arange(image_logits.shape[1])
    chosen_earlier = (jnp.cumsum(is_chosen, axis=1) - is_chosen) > 0
    lowest = jnp.finfo(image_logits.dtype).min
    remaining = mask_logits(image_logits, available)[:, None]
    return jnp.max(jnp.where(chosen_earlier, lowest, remaining), axis=-1)


def mask_logits(
    image_logits: Float[Array, "*b n"], available: Bool[Array, "*b n"]
) -> Float[Array, "*b n"]:
    """Replaces the logits of unavailable slots by the lowest number of the dtype."""
    return jnp.where(available, image_logits, jnp.finfo(image_logits.dtype).min)


@jax.custom_vjp
def straight_through(
    memory: Float[Array, "b m d"], prob: Float[Array, "b m"], choice: Int[Array, "b"]
) -> Float[Array, "b d"]:
    """Returns the chosen slot with the gradient of p: M^T (onehot(a) - sg(p) + p).

    The forward pass is a gather; only the backward pass forms the product with p.
    """
    del prob
    return hard_feedback(memory, None, choice)


def hard_feedback(
    memory: Float[Array, "b m d"], prob: Float[Array, "b m"] | None, choice: Int[Array, "b"]
) -> Float[Array, "b d"]:
    """Returns the chosen slot, without a gradient to the probabilities."""
    del prob
    return jnp.take_along_axis(memory, choice[:, None, None], axis=1)[:, 0]


def _straight_through_fwd(memory, prob, choice):
    return straight_through(memory, prob, choice), (memory, prob, choice)


@implicit_promotion()
def _straight_through_bwd(residuals, cotangent):
    memory, prob, choice = residuals
    one_hot = jax.nn.one_hot(choice, memory.shape[1], dtype=cotangent.dtype)
    prob_bar = jnp.einsum("bmd,bd->bm", memory, cotangent, preferred_element_type=prob.dtype)
    return one_hot[..., None] * cotangent[:, None], prob_bar.astype(prob.dtype), None


straight_through.defvjp(_straight_through_fwd, _straight_through_bwd)


def first_step_of_tokens(choice: Int[Array, "t b"], num_tokens: int) -> Int[Array, "b n"]:
    """Returns the first step that points at each token; `t` for a token that no step points at."""
    steps, b = choice.shape
    step = jnp.broadcast_to(jnp.arange(steps, dtype=jnp.int32)[:, None], (steps, b))
    never = jnp.full((b, num_tokens), steps, jnp.int32)
    return never.at[jnp.arange(b)[None], choice].min(step)


def hold_group_logits(
    config: PolicyConfig, logits: Float[Array, "b t m"], group: int
) -> Float[Array, "b t m"]:
    """Replaces the logits of each step by the logits of its group's first step.

    A hazard's stop logits are not replaced: the hazard is evaluated before each token.
    """
    if group == 1:
        return logits
    step = jnp.arange(logits.shape[1])
    held = logits[:, step - step % group]
    return held.at[..., -1].set(logits[..., -1]) if config.stop == "hazard" else held


def hold_group_steps(episode: Episode, step: StepFn) -> tuple[Episode, StepFn]:
    """Wraps a step function as `hold_group_logits` does for logits of all steps.

    Args:
        episode: prepared episode.
        step: step function of the decoder.

    Returns:
        The episode, whose cache also stores the logits of all steps, and the wrapped function.
    """
    group = episode.group
    if group == 1:
        return episode, step

    def held_step(params, config, context, query, cache, t):
        cache, all_logits = cache
        logits, cache = step(params, config, context, query, cache, t)
        all_logits = jax.lax.dynamic_update_slice_in_dim(
            all_logits, logits[:, None].astype(all_logits.dtype), t, axis=1
        )
        held = jax.lax.dynamic_index_in_dim(all_logits, t - t % group, axis=1, keepdims=False)
        held = held.at[:, -1].set(logits[:, -1]) if config.stop == "hazard" else held
        return held, (cache, all_logits)

    b, m, _ = episode.slots.shape
    all_logits = jnp.zeros((b, episode.steps, m), score_dtype(episode.slots.dtype))
    return episode._replace(cache=(episode.cache, all_logits)), held_step


def rollout(
    params: Params,
    config: PolicyConfig,
    episode: Episode,
    step: StepFn,
    feedback: FeedbackFn,
) -> tuple[Float[Array, "t b m"], Int[Array, "t b"]]:
    """Runs the loop of an episode.

    The backward pass stores the state at the start of each of sqrt(T) blocks and recomputes the
    steps of a block, instead of storing the decoder cache of every step.

    Args:
        params: policy weights.
        config: policy configuration.
        episode: prepared episode.
        step: step function of the decoder.
        feedback: maps the slot that a step points at to the next query.

    Returns:
        The unmasked logits of each step, and the token that each step points at.
    """
    episode, step = hold_group_steps(episode, step)
    block_size = math.isqrt(episode.steps - 1) + 1
    token_index = jnp.arange(episode.image_mask.shape[1])

    def run_step(carry, t):
        query, cache, available = carry
        logits, cache = step(params, config, episode.context, query, cache, t)
        noisy_logits = perturbed_logits(config, episode, logits, t - t % episode.group)
        choice = best_token(noisy_logits, available)
        p = step_distribution(
            config, logits, available, t, limits=episode.limits, stop_bias=episode.stop_bias
        )
        prob = jnp.concatenate([p.prob, p.stop_prob[..., None]], axis=-1)
        available = available & (token_index != choice[:, None])
        return (feedback(episode.slots, prob, choice), cache, available), (logits, choice)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def run_block(carry, first):
        # The last block is filled up with repetitions of the last step, which are cut off below.
        steps = jnp.minimum(first + jnp.arange(block_size, dtype=jnp.int32), episode.steps - 1)
        return jax.lax.scan(run_step, carry, steps)

    start = (episode.query, episode.cache, episode.image_mask)
    first_steps = jnp.arange(0, episode.steps, block_size, dtype=jnp.int32)
    _, blocks = jax.lax.scan(run_block, start, first_steps)
    logits, choice = (x.reshape(-1, *x.shape[2:])[: episode.steps] for x in blocks)
    return logits, choice
