"""An episode and its loop: which token is pointed at in each step, and its gradient.

The loop runs all `steps` regardless of the stop: the pointer always moves on to the best remaining
token, so that a token's score exists at every step. Where the episode ends is decided afterwards,
from the same logits (`trajectory.py`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from stepprune_jax.policy.base import AnyArray, DecoderFns, Limits, Params, StepFn
from stepprune_jax.policy.config import PolicyConfig, is_integer, is_number
from stepprune_jax.policy.decoder import POINTER
from stepprune_jax.policy.jax_settings import THREEFRY, implicit_promotion, threefry
from stepprune_jax.policy.layers import score_dtype
from stepprune_jax.policy.trajectory import RowLimits, step_distribution


class Episode(NamedTuple):
    """Arguments of an episode, broadcast to full shape: slots are zero in the padding.

    `exact` says whether the count is given, so that no stop has to be looked at. `key` has one for
    each row if tokens are drawn, and is None otherwise; `draw` is their temperature.
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
    """Returns T_max, the group and the bounds of each row.

    Raises:
        ValueError: T_max or the group below 1, a count out of range where it can be read,
            `min_tokens` above `max_tokens`, or a budget together with another bound.
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
        bound = f", T_max (max_steps) of {num_tokens} tokens"
        exact = row_counts("budget", limits.budget, 1, steps, batch, bound)
        return steps, group, RowLimits(exact, exact)
    least = min(config.min_tokens, steps) if low is None else low
    least = row_counts("min_tokens", least, 0, steps, batch)
    most = row_counts("max_tokens", steps if high is None else high, 0, num_tokens, batch)
    readable = not any(x is None or isinstance(x, Tracer) for x in (low, high))
    if readable and (np.asarray(low) > np.asarray(high)).any():
        raise ValueError(f"min_tokens is {low}, expected at most max_tokens ({high})")
    return steps, group, RowLimits(least, most)


def longest(config: PolicyConfig, tokens: Int[AnyArray, "b"]) -> Int[Array, "b"]:
    """Returns `config.steps`, T_max, of rows with so many tokens each."""
    most = tokens // 2 if config.max_steps is None else jnp.minimum(config.max_steps, tokens)
    return jnp.maximum(1, most)


def row_counts(
    name: str, value: ArrayLike, low: int, high: int, batch: int, bound: str = ""
) -> Int[Array, "b"]:
    """Returns a count per row; raises if it can be read and is not in `[low, high]`.

    `bound` says in the message where `high` comes from.
    """
    if not isinstance(value, Tracer):
        found = np.asarray(value)
        if found.dtype.kind not in "iu" or found.shape not in ((), (batch,)):
            raise ValueError(f"{name} is {value!r}, expected an integer or one for each row")
        if not ((found >= low) & (found <= high)).all():
            raise ValueError(f"{name} is {value}, expected within [{low}, {high}]{bound}")
    return jnp.broadcast_to(jnp.asarray(value, jnp.int32), (batch,))


def start_episode(
    params: Params,
    config: PolicyConfig,
    memory: Float[AnyArray, "b m d"],
    image_mask: Bool[AnyArray, "b n"] | None = None,
    limits: Limits = Limits(),
    stop_bias: ArrayLike = 0.0,
    decoder: DecoderFns = POINTER,
    key: Array | None = None,
) -> Episode:
    """Prepares an episode over a memory; raises as `read_limits`."""
    b, n = memory.shape[0], memory.shape[1] - 1
    image_mask = jnp.ones((b, n), bool) if image_mask is None else jnp.asarray(image_mask)
    memory_mask = jnp.concatenate([image_mask, jnp.ones((b, 1), bool)], axis=1)
    steps, group, rows = read_limits(limits, config, b, n)
    # A row cannot keep more tokens than it has, whatever the budget.
    tokens = jnp.sum(image_mask, axis=1, dtype=jnp.int32)
    most = jnp.minimum(rows.max_tokens, tokens)
    if limits.max_steps is None and limits.budget is None:
        most = jnp.minimum(most, longest(config, tokens))
    rows = RowLimits(jnp.minimum(rows.min_tokens, most), most)
    slots = jnp.where(memory_mask[..., None], memory, 0)
    start = decoder.init(params, config, slots, memory_mask, steps)
    bias = jnp.broadcast_to(jnp.asarray(stop_bias, score_dtype(memory.dtype)), (b,))
    exact = limits.budget is not None
    draw = read_temperature(limits, config)
    keys = read_key(key, b) if draw else None
    return Episode(*start, slots, image_mask, rows, bias, steps, group, exact, keys, draw)


def read_temperature(limits: Limits, config: PolicyConfig) -> float | int:
    """Returns the temperature of the draws; raises a ValueError unless it is a number >= 0."""
    draw = config.draw if limits.draw is None else limits.draw
    if not (is_number(draw) and draw >= 0):
        raise ValueError(f"draw is {draw!r}, expected a number >= 0")
    return draw


def read_key(key: Array | None, batch: int) -> Key[Array, "b"]:
    """Returns a key for each row; without one, that of seed 0 for all.

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
    """Draws the noise of a step, by which the argmax of the logits becomes a draw.

    The noise of a token depends on the row's key, the step and its place: neither on other rows nor
    on padding. It is multiplied by `scale`, the temperature of the distribution that is drawn from.
    """
    keys = jax.vmap(jax.random.fold_in, (0, None))(key, step)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (num_tokens,), dtype))(keys)
    return scale * noise


def perturbed(
    config: PolicyConfig,
    episode: Episode,
    logits: Float[Array, "b m"],
    step: Int[Array, ""],
) -> Float[Array, "b n"]:
    """Returns the logits of the image slots, with the noise of a step where tokens are drawn."""
    image = logits[:, :-1]
    if episode.key is None:
        return image
    scale, num_tokens = episode.draw * config.temperature, image.shape[1]
    return image + gumbel(scale, episode.key, step, num_tokens, image.dtype)


def best_token(image: Float[Array, "*b n"], available: Bool[Array, "*b n"]) -> Int[Array, "*b"]:
    """Returns the masked argmax over the image slots; ties go to the lowest index."""
    return jnp.argmax(masked(image, available), axis=-1).astype(jnp.int32)


def best_tokens(
    image: Float[Array, "b n"], available: Bool[Array, "b n"], group: int
) -> Int[Array, "b g"]:
    """Returns the `group` best image slots, best first."""
    if group == 1:
        return best_token(image, available)[:, None]
    return jax.lax.top_k(masked(image, available), group)[1].astype(jnp.int32)


def strongest(
    image: Float[Array, "b n"], available: Bool[Array, "b n"], choice: Int[Array, "b g"]
) -> Float[Array, "b g"]:
    """Returns the largest logit that is left before each choice of a group."""
    chosen = choice[..., None] == jnp.arange(image.shape[1])
    earlier = (jnp.cumsum(chosen, axis=1) - chosen) > 0
    left = jnp.where(earlier, jnp.finfo(image.dtype).min, masked(image, available)[:, None])
    return jnp.max(left, axis=-1)


def masked(image: Float[Array, "*b n"], available: Bool[Array, "*b n"]) -> Float[Array, "*b n"]:
    """Replaces the logits of tokens that cannot be chosen by the lowest number."""
    return jnp.where(available, image, jnp.finfo(image.dtype).min)


@jax.custom_vjp
def straight_through(
    memory: Float[Array, "b m d"], prob: Float[Array, "b m"], choice: Int[Array, "b"]
) -> Float[Array, "b d"]:
    """Feeds back M^T (onehot(a) - sg(p) + p): the hard choice, with the gradient of p.

    The value is a gather; the product with p is formed in the backward pass alone.
    """
    del prob
    return hard_feedback(memory, None, choice)


def hard_feedback(
    memory: Float[Array, "b m d"], prob: Float[Array, "b m"] | None, choice: Int[Array, "b"]
) -> Float[Array, "b d"]:
    """Feeds back the chosen slot; no gradient to the probabilities."""
    del prob
    return jnp.take_along_axis(memory, choice[:, None, None], axis=1)[:, 0]


def _straight_through_fwd(memory, prob, choice):
    return straight_through(memory, prob, choice), (memory, prob, choice)


@implicit_promotion()
def _straight_through_bwd(residuals, cotangent):
    memory, prob, choice = residuals
    chosen = jax.nn.one_hot(choice, memory.shape[1], dtype=cotangent.dtype)
    prob_bar = jnp.einsum("bmd,bd->bm", memory, cotangent, preferred_element_type=prob.dtype)
    return chosen[..., None] * cotangent[:, None], prob_bar.astype(prob.dtype), None


straight_through.defvjp(_straight_through_fwd, _straight_through_bwd)


def pick_step(choice: Int[Array, "t b"], num_tokens: int) -> Int[Array, "b n"]:
    """Returns the first step at which each token was pointed at; `t` where it never was."""
    steps, b = choice.shape
    step = jnp.broadcast_to(jnp.arange(steps, dtype=jnp.int32)[:, None], (steps, b))
    never = jnp.full((b, num_tokens), steps, jnp.int32)
    return never.at[jnp.arange(b)[None], choice].min(step)


def hold(config: PolicyConfig, logits: Float[Array, "b t m"], group: int) -> Float[Array, "b t m"]:
    """Replaces the logits of each step by those of its group's first; a hazard keeps its own."""
    if group == 1:
        return logits
    step = jnp.arange(logits.shape[1])
    held = logits[:, step - step % group]
    return held.at[..., -1].set(logits[..., -1]) if config.stop == "hazard" else held


def grouped(episode: Episode, step: StepFn) -> tuple[Episode, StepFn]:
    """Makes the steps of an episode use the logits of their group's first step.

    The logits of all steps are one more leaf of the decoder's cache.
    """
    group = episode.group
    if group == 1:
        return episode, step

    def held_step(params, config, context, query, cache, t):
        cache, logits = cache
        own, cache = step(params, config, context, query, cache, t)
        logits = jax.lax.dynamic_update_slice_in_dim(
            logits, own[:, None].astype(logits.dtype), t, axis=1
        )
        held = jax.lax.dynamic_index_in_dim(logits, t - t % group, axis=1, keepdims=False)
        held = held.at[:, -1].set(own[:, -1]) if config.stop == "hazard" else held
        return held, (cache, logits)

    b, m, _ = episode.slots.shape
    logits = jnp.zeros((b, episode.steps, m), score_dtype(episode.slots.dtype))
    return episode._replace(cache=(episode.cache, logits)), held_step


def rollout(
    params: Params,
    config: PolicyConfig,
    episode: Episode,
    step: StepFn,
    feedback: Callable[..., Array],
) -> tuple[Float[Array, "t b m"], Int[Array, "t b"]]:
    """Runs the loop; returns each step's unmasked logits and the token pointed at.

    A gradient stores what each of sqrt(T) blocks begins with and computes the block's steps again,
    rather than storing the decoder's cache of every step.
    """
    episode, step = grouped(episode, step)
    size = math.isqrt(episode.steps - 1) + 1
    tokens = jnp.arange(episode.image_mask.shape[1])

    def body(carry, t):
        query, cache, available = carry
        logits, cache = step(params, config, episode.context, query, cache, t)
        noisy = perturbed(config, episode, logits, t - t % episode.group)
        choice = best_token(noisy, available)
        p = step_distribution(config, logits, available, t, episode.limits, episode.stop_bias)
        prob = jnp.concatenate([p.prob, p.stop_prob[..., None]], axis=-1)
        available = available & (tokens != choice[:, None])
        return (feedback(episode.slots, prob, choice), cache, available), (logits, choice)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(carry, first):
        # What the last block has too many are repetitions of its last step, cut off below.
        steps = jnp.minimum(first + jnp.arange(size, dtype=jnp.int32), episode.steps - 1)
        return jax.lax.scan(body, carry, steps)

    start = (episode.query, episode.cache, episode.image_mask)
    _, found = jax.lax.scan(block, start, jnp.arange(0, episode.steps, size, dtype=jnp.int32))
    logits, choice = (x.reshape(-1, *x.shape[2:])[: episode.steps] for x in found)
    return logits, choice
