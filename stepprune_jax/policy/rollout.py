"""An episode and its loop: the token that each step points at, and its gradient.

The loop, `rollout`, is a `lax.scan` for gradients: it runs all `steps` steps and ignores the stop.
Inference uses another loop, `selection.py: choose_tokens`, which ends at the stop. The pointer
always moves on to the best remaining token, so a token's score exists at every step. The end of the
episode is decided afterwards, from the same logits (`trajectory.py`).
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
        slots: memory of the decoder: one slot per image token, then the stop slot; zero in the
            padding.
        image_mask: True at real image tokens.
        limits: bounds on the count of each row.
        stop_bias: number added to the stop logits of each row.
        steps: T_max.
        group: number of tokens that are chosen by one pointer distribution; see `Limits`.
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
    """Checks limits and fills in the missing limits from a configuration.

    Args:
        limits: bounds on the number of kept tokens.
        config: policy configuration, which fills in missing limits.
        batch: b, the number of rows.
        num_tokens: number of image tokens per row, including padding.

    Returns:
        A tuple (steps, group, row_limits). steps: T_max, the number of steps of the episode. group:
        number of tokens that are chosen by one distribution. row_limits: [b] bounds on each row's
        count.

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
        counts = row_counts("budget", limits.budget, 1, steps, batch, source=source)
        return steps, group, RowLimits(min_tokens=counts, max_tokens=counts)
    min_tokens = min(config.min_tokens, steps) if low is None else low
    min_tokens = row_counts("min_tokens", min_tokens, 0, steps, batch)
    max_tokens = row_counts("max_tokens", steps if high is None else high, 0, num_tokens, batch)
    # Defaults always fit. Traced counts have no values to compare yet.
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
        batch: b, the number of rows.
        source: explanation of `high` that is appended to the message.

    Returns:
        [b] int32 counts. Traced counts are not checked.

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
    """Prepares an episode: the sequential choice of tokens from encoded image tokens.

    Args:
        params: policy weights.
        config: policy configuration.
        memory: [b, m, d] encoded image tokens, followed by the stop slot.
        image_mask: [b, n] True at real image tokens; None marks all tokens as real.
        limits: bounds on the counts.
        stop_bias: added to the stop logits, a number or one per row.
        decoder: functions of the decoder.
        key: PRNG key of the sampled tokens, one for all rows or one per row; not used at sampling
            temperature 0.

    Returns:
        The episode before its first step.

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
        # T_max was resolved from the padded number of tokens; rows with padding have a smaller one.
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
    """Returns the sampling temperature of the limits, or else of the configuration.

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
    """Samples Gumbel noise for the logits of a step, so that their argmax is a random sample.

    The noise of a token depends on the key of its row, the step and the position of the token, but
    not on other rows or the amount of padding.

    Args:
        scale: temperature of the sampled distribution; multiplies the noise.
        key: [b] PRNG key of each row.
        step: [] number of the step, from 0.
        num_tokens: n, the number of image tokens per row.
        dtype: dtype of the noise.

    Returns:
        [b, n] noise to add to the logits.
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
    """Returns the logits of the image tokens, with Gumbel noise if tokens are sampled.

    Args:
        config: policy configuration; `temperature` is used.
        episode: the episode, with its sampling temperature and keys.
        logits: [b, m] logits of the image tokens, followed by the stop logit.
        step: [] number of the step that the noise belongs to.

    Returns:
        [b, n] logits whose argmax is the choice of the step.
    """
    image_logits = logits[:, :-1]
    if episode.key is None:
        return image_logits
    scale, num_tokens = episode.draw * config.temperature, image_logits.shape[1]
    return image_logits + gumbel(scale, episode.key, step, num_tokens, image_logits.dtype)


def best_token(
    image_logits: Float[Array, "*b n"], available: Bool[Array, "*b n"]
) -> Int[Array, "*b"]:
    """Returns the index of the available token with the largest logit; ties go to the lower one."""
    return jnp.argmax(mask_logits(image_logits, available), axis=-1).astype(jnp.int32)


def best_tokens(
    image_logits: Float[Array, "b n"], available: Bool[Array, "b n"], group: int
) -> Int[Array, "b g"]:
    """Returns the indices of the `group` available tokens with the largest logits, best first."""
    if group == 1:
        return best_token(image_logits, available)[:, None]
    return jax.lax.top_k(mask_logits(image_logits, available), group)[1].astype(jnp.int32)


def remaining_max_logit(
    image_logits: Float[Array, "b n"], available: Bool[Array, "b n"], choice: Int[Array, "b g"]
) -> Float[Array, "b g"]:
    """Returns the largest logit of the tokens that remain before each choice of a group.

    The tokens of a group are chosen one by one, by the same logits.

    Args:
        image_logits: [b, n] logits of the image tokens.
        available: [b, n] True at real tokens that were not chosen before the group.
        choice: [b, g] tokens of the group, in order of choice.

    Returns:
        [b, g] largest logit before each of the g choices.
    """
    is_chosen = choice[..., None] == jnp.arange(image_logits.shape[1])
    # The cumulative sum counts the choice itself, which is still available before it is made.
    is_chosen_earlier = (jnp.cumsum(is_chosen, axis=1) - is_chosen) > 0
    lowest = jnp.finfo(image_logits.dtype).min
    masked_logits = mask_logits(image_logits, available)[:, None]
    return jnp.max(jnp.where(is_chosen_earlier, lowest, masked_logits), axis=-1)


def mask_logits(
    image_logits: Float[Array, "*b n"], available: Bool[Array, "*b n"]
) -> Float[Array, "*b n"]:
    """Replaces the logits of unavailable tokens by the lowest finite number of the dtype."""
    return jnp.where(available, image_logits, jnp.finfo(image_logits.dtype).min)


@jax.custom_vjp
def straight_through(
    memory: Float[Array, "b m d"], prob: Float[Array, "b m"], choice: Int[Array, "b"]
) -> Float[Array, "b d"]:
    """Returns the memory slot of each row's choice, with a straight-through gradient.

    Computes M^T (onehot(a) - stop_gradient(p) + p) with memory M, choice a and probabilities p. The
    forward pass only gathers the slot; the backward pass forms the product with p.

    Args:
        memory: [b, m, d] encoded image tokens, followed by the stop slot.
        prob: [b, m] probabilities of the step.
        choice: [b] index of the chosen slot.

    Returns:
        [b, d] the next query of the decoder.
    """
    del prob  # only the backward pass uses it
    return hard_feedback(memory, None, choice)


def hard_feedback(
    memory: Float[Array, "b m d"], prob: Float[Array, "b m"] | None, choice: Int[Array, "b"]
) -> Float[Array, "b d"]:
    """Returns the memory slot of each row's choice, without a gradient to the probabilities.

    Takes the arguments of `straight_through`; see `FeedbackFn`.
    """
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
    """Returns the first step that chooses each token.

    Args:
        choice: [t, b] index of the token that each of t steps chooses.
        num_tokens: n, the number of image tokens per row.

    Returns:
        [b, n] number of the step, from 0; t for a token that no step chooses.
    """
    num_steps, b = choice.shape
    step = jnp.broadcast_to(jnp.arange(num_steps, dtype=jnp.int32)[:, None], (num_steps, b))
    never_chosen = jnp.full((b, num_tokens), num_steps, jnp.int32)
    return never_chosen.at[jnp.arange(b)[None], choice].min(step)


def repeat_group_logits(
    config: PolicyConfig, logits: Float[Array, "b t m"], group: int
) -> Float[Array, "b t m"]:
    """Replaces the logits of each step by the logits of its group's first step.

    Args:
        config: policy configuration. The stop logits of a hazard, which is evaluated before each
            token, are not replaced.
        logits: [b, t, m] logits of all steps, with the stop logit last.
        group: number of consecutive tokens that are chosen by the logits of one step.

    Returns:
        [b, t, m] logits that the steps choose by.
    """
    if group == 1:
        return logits
    step = jnp.arange(logits.shape[1])
    group_logits = logits[:, step - step % group]
    if config.stop == "hazard":
        group_logits = group_logits.at[..., -1].set(logits[..., -1])
    return group_logits


def wrap_step_for_groups(episode: Episode, step: StepFn) -> tuple[Episode, StepFn]:
    """Wraps a step function to return the logits of the first step of each group.

    The loop calls the decoder for every token, because each token has to enter the decoder's cache.
    The wrapped function stores the logits of the group's first step and returns these, as
    `repeat_group_logits` does for all steps at once.

    Args:
        episode: prepared episode.
        step: step function of the decoder; see `StepFn`.

    Returns:
        A tuple (episode, step). episode: the episode, whose cache also stores the logits of one
        step. step: the wrapped function. Both are unchanged if groups have one token.
    """
    group = episode.group
    if group == 1:
        return episode, step

    def group_step(params, config, context, query, cache_and_logits, t):
        cache, first_logits = cache_and_logits
        logits, cache = step(params, config, context, query, cache, t)
        logits = logits.astype(first_logits.dtype)
        first_logits = jnp.where(t % group == 0, logits, first_logits)
        group_logits = first_logits
        if config.stop == "hazard":  # a hazard is evaluated before each token
            group_logits = group_logits.at[:, -1].set(logits[:, -1])
        return group_logits, (cache, first_logits)

    b, m, _ = episode.slots.shape
    first_logits = jnp.zeros((b, m), score_dtype(episode.slots.dtype))
    return episode._replace(cache=(episode.cache, first_logits)), group_step


def rollout(
    params: Params,
    config: PolicyConfig,
    episode: Episode,
    step: StepFn,
    feedback: FeedbackFn,
) -> tuple[Float[Array, "t b m"], Int[Array, "t b"]]:
    """Chooses one token per step, for all T steps of an episode.

    The loop continues to T also for rows that stop earlier. The backward pass stores the state at
    the start of each of sqrt(T) blocks and recomputes the steps of a block, instead of storing the
    decoder cache of every step.

    Args:
        params: policy weights.
        config: policy configuration.
        episode: prepared episode.
        step: step function of the decoder; see `StepFn`.
        feedback: maps the chosen slot to the next query; see `FeedbackFn`.

    Returns:
        A tuple (logits, choice). logits: [t, b, m] unmasked logits of each step, with the stop
        logit last. choice: [t, b] index of the token that each step chooses.
    """
    episode, step = wrap_step_for_groups(episode, step)
    block_size = math.isqrt(episode.steps - 1) + 1
    token_index = jnp.arange(episode.image_mask.shape[1])

    def run_step(carry, t):
        """Chooses the best available token and feeds its slot back as the next query."""
        query, cache, available = carry
        logits, cache = step(params, config, episode.context, query, cache, t)
        noisy_logits = perturbed_logits(config, episode, logits, t - t % episode.group)
        choice = best_token(noisy_logits, available)
        distribution = step_distribution(
            config, logits, available, t, limits=episode.limits, stop_bias=episode.stop_bias
        )
        stop_prob = distribution.stop_prob[..., None]
        prob = jnp.concatenate([distribution.prob, stop_prob], axis=-1)
        available = available & (token_index != choice[:, None])
        return (feedback(episode.slots, prob, choice), cache, available), (logits, choice)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def run_block(carry, first_step):
        # The last block is filled up with repetitions of the last step, which are cut off below.
        steps = jnp.minimum(first_step + jnp.arange(block_size, dtype=jnp.int32), episode.steps - 1)
        return jax.lax.scan(run_step, carry, steps)

    start = (episode.query, episode.cache, episode.image_mask)
    first_steps = jnp.arange(0, episode.steps, block_size, dtype=jnp.int32)
    _, block_outputs = jax.lax.scan(run_block, start, first_steps)
    logits, choice = (x.reshape(-1, *x.shape[2:])[: episode.steps] for x in block_outputs)
    return logits, choice
