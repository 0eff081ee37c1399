"""`select`: a whole selection episode; `pick`: the same decisions with early exit."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.policy import layers
from stepprune_jax.policy.checks import checked, require, require_count, require_finite
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.decoder import Decoder, pointer_init, pointer_sequence, pointer_step
from stepprune_jax.policy.params import Params
from stepprune_jax.policy.rollout import (
    Loop,
    Operands,
    best_token,
    hard_feedback,
    pick_step,
    saved_rollout,
    straight_through,
)
from stepprune_jax.policy.trajectory import (
    Limits,
    Trajectory,
    hard_stop,
    read_trajectory,
    stop_margin,
)


class Picks(NamedTuple):
    """The decisions of a `Trajectory`, without its probabilities.

    Attributes:
      action: a_t; n from the step on at which the row stopped.
      count: K, the number of tokens kept.
      selected: Whether token i is kept.
    """

    action: Int[Array, "b t"]
    count: Int[Array, "b"]
    selected: Bool[Array, "b n"]


class _Bounds(NamedTuple):
    """Bounds of an episode as `select` was given them, see there; None for those left out."""

    max_steps: int | None
    min_tokens: ArrayLike | None
    max_tokens: ArrayLike | None
    budget: ArrayLike | None


class _Episode(NamedTuple):
    """Arguments of an episode, checked and given full shape; `slots` is M without its padding."""

    decoder: Decoder
    slots: Float[Array, "b m d"]
    image_mask: Bool[Array, "b n"]
    limits: Limits
    stop_bias: Float[Array, "b"]
    steps: int


def read_bounds(
    config: PolicyConfig,
    batch: int,
    num_tokens: int,
    max_steps: int | None,
    min_tokens: ArrayLike | None,
    max_tokens: ArrayLike | None,
    budget: ArrayLike | None,
) -> tuple[int, Limits]:
    """T_max and the limits of each row, from the arguments of `select`.

    Raises:
      ValueError: T_max > N, a count out of range where it can be read, or a budget beside another
        bound.
    """
    n = num_tokens
    steps = config.steps(n) if max_steps is None else max_steps
    require(0 < steps <= n, "max_steps (T_max)", steps, f"within [1, {n}] for {n} image tokens")
    if budget is not None:
        require(
            min_tokens is None and max_tokens is None,
            "budget",
            "given with min_tokens or max_tokens",
            "one or the other",
        )
        exact = require_count("budget", budget, 1, steps, batch)
        return steps, Limits(exact, exact)
    low = min(config.min_tokens, steps) if min_tokens is None else min_tokens
    high = steps if max_tokens is None else max_tokens
    most = require_count("max_tokens", high, 0, n, batch)
    return steps, Limits(require_count("min_tokens", low, 0, steps, batch), most)


def _prepare(params, config, memory, image_mask, bounds: _Bounds, stop_bias, init_fn) -> _Episode:
    b, n = memory.shape[0], memory.shape[1] - 1
    require(n > 0, "memory", f"of shape {memory.shape}", "at least one token and the stop slot")
    if image_mask is None:
        image_mask = jnp.ones((b, n), bool)
    require(image_mask.shape == (b, n), "image_mask", f"of shape {image_mask.shape}", f"[{b}, {n}]")
    image_mask = jnp.asarray(image_mask)
    memory_mask = jnp.concatenate([image_mask, jnp.ones((b, 1), bool)], axis=1)
    require_finite("memory", memory, memory_mask)
    steps, limits = read_bounds(config, b, n, *bounds)
    # A row cannot keep more tokens than it has, whatever it was asked for.
    most = jnp.minimum(limits.max_tokens, jnp.sum(image_mask, axis=1, dtype=jnp.int32))
    limits = Limits(jnp.minimum(limits.min_tokens, most), most)
    slots = jnp.where(memory_mask[..., None], memory, 0)
    decoder = init_fn(params, config, slots, memory_mask, steps)
    bias = jnp.asarray(stop_bias, layers.score_dtype(memory.dtype))
    return _Episode(decoder, slots, image_mask, limits, jnp.broadcast_to(bias, (b,)), steps)


@checked
def select(
    params: Params,
    config: PolicyConfig,
    memory: Float[ArrayLike, "b m d"],
    *,
    image_mask: Bool[ArrayLike, "b n"] | None = None,
    max_steps: int | None = None,
    min_tokens: ArrayLike | None = None,
    max_tokens: ArrayLike | None = None,
    budget: ArrayLike | None = None,
    stop_bias: ArrayLike = 0.0,
    init_fn: Callable[..., Decoder] = pointer_init,
    step_fn: Callable[..., Any] = pointer_step,
    feedback_fn: Callable[..., Array] = straight_through,
    rollout_fn: Callable[..., Any] = saved_rollout,
    unroll: int = 1,
) -> Trajectory:
    """Runs the sequential policy for T_max steps, Eqs. (5)-(9), with gradients.

    Each step points at the best token not yet chosen, feeds its memory slot back as the next query
    and goes on to T_max; the episode ends where the stop first wins. Rows do not influence each
    other, and padding influences nothing.

    Args:
      params: Policy weights; only what `init_fn` and `step_fn` read.
      config: Policy configuration.
      memory: M = [H; s_stop] from `memory`; slot n is the stop.
      image_mask: True at real tokens. A row keeps at most as many as it has, possibly none.
      max_steps: T_max; default `config.steps(n)`.
      min_tokens: Tokens chosen before the stop is available; default `config.min_tokens`. Like
        the next two, an integer or one per row.
      max_tokens: Tokens after which a row is stopped.
      budget: Exact count; replaces the two before.
      stop_bias: Added to the stop logit, a number or one per row.
      init_fn: Prepares the decoder; see `decoder.py` for the three functions a decoder is made of.
      step_fn: Pointer logits of one step; append-only.
      feedback_fn: `(memory, prob [b, m], choice [b]) -> query [b, d]`: `straight_through` (paper),
        `hard_feedback`, or your own.
      rollout_fn: `saved_rollout`, whose backward pass is linear in T_max, or `plain_rollout`.
      unroll: Passed to `lax.scan`.

    Returns:
      The trajectory, its probabilities in float32 at least.

    Raises:
      ValueError: Wrong shapes or dtypes, T_max > N, a count out of range, non-finite memory; as
        far as they can be read before tracing.
    """
    bounds = _Bounds(max_steps, min_tokens, max_tokens, budget)
    episode = _prepare(params, config, memory, image_mask, bounds, stop_bias, init_fn)
    loop = Loop(config, step_fn, feedback_fn, episode.steps, unroll)
    query, context, cache = episode.decoder
    operands = Operands(params, context, episode.slots, query, cache, episode.stop_bias)
    rollout = rollout_fn(loop, operands, episode.image_mask, episode.limits)
    return _read(config, episode, rollout.logits.swapaxes(0, 1), rollout.choice)


def _read(config: PolicyConfig, episode: _Episode, logits, choice) -> Trajectory:
    picked = pick_step(choice, episode.image_mask.shape[1])
    return read_trajectory(
        config, logits, choice.T, picked, episode.image_mask, episode.limits, episode.stop_bias
    )


@checked
def select_parallel(
    params: Params,
    config: PolicyConfig,
    memory: Float[ArrayLike, "b m d"],
    *,
    image_mask: Bool[ArrayLike, "b n"] | None = None,
    max_steps: int | None = None,
    min_tokens: ArrayLike | None = None,
    max_tokens: ArrayLike | None = None,
    budget: ArrayLike | None = None,
    stop_bias: ArrayLike = 0.0,
    init_fn: Callable[..., Decoder] = pointer_init,
    step_fn: Callable[..., Any] = pointer_step,
    sequence_fn: Callable[..., Array] = pointer_sequence,
    unroll: int = 1,
) -> Trajectory:
    """`select` with `hard_feedback`, its gradient taken in one causal pass instead of the loop.

    The loop runs without gradient; then `sequence_fn` scores all steps at once, the chosen slots
    being their queries. Value and gradient equal those of `select(feedback_fn=hard_feedback)` up
    to rounding, at a fraction of time and memory, because nothing is differentiated step by step.

    Args, returns and raises as `select`, and:
      sequence_fn: Pointer logits of all steps, given their queries.
    """
    bounds = _Bounds(max_steps, min_tokens, max_tokens, budget)
    episode = _prepare(params, config, memory, image_mask, bounds, stop_bias, init_fn)
    query, context, cache = episode.decoder
    loop = Loop(config, step_fn, hard_feedback, episode.steps, unroll)
    operands = Operands(params, context, episode.slots, query, cache, episode.stop_bias)
    frozen = jax.lax.stop_gradient(operands)
    choice = saved_rollout(loop, frozen, episode.image_mask, episode.limits).choice
    later = jnp.take_along_axis(episode.slots, choice[:-1].T[..., None], axis=1)
    queries = jnp.concatenate([query[:, None], later], axis=1)
    logits = sequence_fn(params, config, context, queries, cache)
    return _read(config, episode, logits, choice)


@checked
def pick(
    params: Params,
    config: PolicyConfig,
    memory: Float[ArrayLike, "b m d"],
    *,
    image_mask: Bool[ArrayLike, "b n"] | None = None,
    max_steps: int | None = None,
    min_tokens: ArrayLike | None = None,
    max_tokens: ArrayLike | None = None,
    budget: ArrayLike | None = None,
    stop_bias: ArrayLike = 0.0,
    init_fn: Callable[..., Decoder] = pointer_init,
    step_fn: Callable[..., Any] = pointer_step,
) -> Picks:
    """The decisions of `select` for inference: a `lax.while_loop` that ends with the last row.

    Takes at most max_b K_b + 1 steps instead of T_max, with no host round trip, and is not
    differentiable.

    Args, returns and raises as `select`; the result holds no probabilities.
    """
    bounds = _Bounds(max_steps, min_tokens, max_tokens, budget)
    episode = _prepare(params, config, memory, image_mask, bounds, stop_bias, init_fn)
    (b, n), steps = episode.image_mask.shape, episode.steps
    query, context, cache = episode.decoder

    def running(carry):
        step, alive, *_ = carry
        return (step < steps) & jnp.any(alive)

    def body(carry):
        step, alive, query, cache, available, action, count = carry
        logits, cache = step_fn(params, config, context, query, cache, step)
        margin = stop_margin(config, logits, available, step, episode.stop_bias)[2]
        stop = hard_stop(margin, available, step, episode.limits)[0]
        alive = alive & ~stop
        choice = best_token(logits, available)
        action = jax.lax.dynamic_update_slice_in_dim(
            action, jnp.where(alive, choice, n)[None], step, axis=0
        )
        available = available & (jnp.arange(n) != choice[:, None])
        query = hard_feedback(episode.slots, None, choice)
        count = count + alive
        # Rows that are full need no further step to say so.
        alive = alive & (step + 1 < episode.limits.max_tokens)
        return step + 1, alive, query, cache, available, action, count

    action = jnp.full((steps, b), n, jnp.int32)
    carry = (jnp.int32(0), jnp.ones(b, bool), query, cache, episode.image_mask, action)
    *_, action, count = jax.lax.while_loop(running, body, (*carry, jnp.zeros(b, jnp.int32)))
    kept = jnp.zeros((b, n), bool).at[jnp.arange(b), action].set(True, mode="drop")
    return Picks(action.T, count, kept)
