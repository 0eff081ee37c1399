"""`select`: a whole selection episode, with gradients."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.policy.checks import AnyArray, checked
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.decoder import Decoder, pointer_init, pointer_sequence, pointer_step
from stepprune_jax.policy.episode import Bounds, Episode, prepare
from stepprune_jax.policy.params import Params
from stepprune_jax.policy.pick import by_tables, has_tables
from stepprune_jax.policy.rollout import (
    Loop,
    Operands,
    Rollout,
    grouped,
    hard_feedback,
    hold,
    pick_step,
    saved_rollout,
    straight_through,
)
from stepprune_jax.policy.trajectory import Trajectory, read_trajectory


@checked
def select(
    params: Params,
    config: PolicyConfig,
    memory: Float[AnyArray, "b m d"],
    *,
    image_mask: Bool[AnyArray, "b n"] | None = None,
    max_steps: int | None = None,
    min_tokens: ArrayLike | None = None,
    max_tokens: ArrayLike | None = None,
    budget: ArrayLike | None = None,
    stop_bias: ArrayLike = 0.0,
    group: int | None = None,
    init_fn: Callable[..., Decoder] = pointer_init,
    step_fn: Callable[..., Any] = pointer_step,
    feedback_fn: Callable[..., Array] = straight_through,
    rollout_fn: Callable[..., Any] = saved_rollout,
    unroll: int = 1,
) -> Trajectory:
    """Runs the sequential policy for T_max steps, Eqs. (5)-(9), with gradients.

    Each step points at the best token not yet chosen, feeds its memory slot back as the next query
    and continues to T_max; the episode ends where the stop first wins. Rows do not influence each
    other, and padding influences nothing.

    Args:
        params: policy weights; only what `init_fn` and `step_fn` read.
        config: policy configuration.
        memory: M = [H; s_stop] from `memory`; slot n is the stop.
        image_mask: True at real tokens. A row keeps at most those, possibly none.
        max_steps: T_max, at most N; default `config.steps(n)`.
        min_tokens: tokens chosen before the stop is available; default `config.min_tokens`. Like
            the next two, an integer or one per row.
        max_tokens: tokens after which a row is stopped.
        budget: exact count; replaces the two bounds.
        stop_bias: added to the stop logit, a number or one per row.
        group: g, tokens taken from one pointer distribution; default `config.group`. Token t
            (counted from 0) is the best remaining one by the logits of step g floor(t / g). All g
            slots enter the history in order of choice and the last of them is the next query, as if
            they had been taken one by one: the decoder sees nothing new compared with g = 1, so no
            retraining is needed, and history and query remain a set of slots and a slot. Everything
            else is computed token by token: p_t(i) over the remaining tokens, the stop (a hazard
            before each token, the other two by the group's logits), A_t and beta^t; the credit of
            each of the g tokens is a gradient to the group's logits. The last group is cut where
            the episode ends.
        init_fn: prepares the decoder; see `decoder.py` for the three functions a decoder is made
            of.
        step_fn: pointer logits of one step; append-only.
        feedback_fn: `(memory, prob [b, m], choice [b]) -> query [b, d]`: `straight_through`
            (paper), `hard_feedback`, or a custom one.
        rollout_fn: `saved_rollout`, whose backward pass is linear in T_max, or `plain_rollout`.
        unroll: passed to `lax.scan`, where the loop runs step by step.

    Returns:
        The trajectory, its probabilities in at least float32.

    Raises:
        ValueError: wrong shapes or dtypes, T_max below 1, a count out of range, a group below 1,
            non-finite memory, where these can be read before tracing.
    """
    bounds = Bounds(max_steps, min_tokens, max_tokens, budget, group)
    episode = prepare(params, config, memory, image_mask, bounds, stop_bias, init_fn)
    episode, step_fn = grouped(episode, step_fn)
    loop = Loop(config, step_fn, feedback_fn, episode.steps, unroll)
    operands = Operands.of(params, episode)
    rollout = rollout_fn(loop, operands, episode.image_mask, episode.limits)
    return _read(config, episode, rollout.logits.swapaxes(0, 1), rollout.choice)


def _read(config: PolicyConfig, episode: Episode, logits, choice) -> Trajectory:
    picked = pick_step(choice, episode.image_mask.shape[1])
    return read_trajectory(
        config, logits, choice.T, picked, episode.image_mask, episode.limits, episode.stop_bias
    )


@checked
def select_parallel(
    params: Params,
    config: PolicyConfig,
    memory: Float[AnyArray, "b m d"],
    *,
    image_mask: Bool[AnyArray, "b n"] | None = None,
    max_steps: int | None = None,
    min_tokens: ArrayLike | None = None,
    max_tokens: ArrayLike | None = None,
    budget: ArrayLike | None = None,
    stop_bias: ArrayLike = 0.0,
    group: int | None = None,
    init_fn: Callable[..., Decoder] = pointer_init,
    step_fn: Callable[..., Any] = pointer_step,
    sequence_fn: Callable[..., Array] = pointer_sequence,
    unroll: int = 1,
) -> Trajectory:
    """Runs `select` with `hard_feedback`, its gradient taken in one causal pass, not the loop.

    The loop runs without gradient; then `sequence_fn` scores all steps at once, with the chosen
    slots as their queries. Value and gradient equal those of `select(feedback_fn=hard_feedback)` up
    to rounding, in a fraction of the time and memory, as nothing is differentiated step by step.

    Args, returns and raises as `select`, and:
      sequence_fn: Pointer logits of all steps, given their queries.
    """
    bounds = Bounds(max_steps, min_tokens, max_tokens, budget, group)
    episode = prepare(params, config, memory, image_mask, bounds, stop_bias, init_fn)
    choice = _order(params, config, episode, init_fn, step_fn, unroll)
    query, context, cache = episode.decoder
    later = jnp.take_along_axis(episode.slots, choice[:-1].T[..., None], axis=1)
    queries = jnp.concatenate([query[:, None], later], axis=1)
    logits = sequence_fn(params, config, context, queries, cache)
    logits = hold(config, logits, episode.group)
    return _read(config, episode, logits, choice)


def _order(
    params: Params,
    config: PolicyConfig,
    episode: Episode,
    init_fn: Callable[..., Decoder],
    step_fn: Callable[..., Any],
    unroll: int,
) -> Int[Array, "t b"]:
    """Returns the token pointed at in every step, with hard feedback and without gradient."""
    given = (params, episode.decoder, episode.slots)
    params, decoder, slots = jax.lax.stop_gradient(given)
    episode = episode._replace(decoder=decoder, slots=slots)
    if has_tables(init_fn, step_fn):
        walker = by_tables(params, config, episode, episode.steps, margins=False)
        return walker.advance(walker.start, jnp.int32(0))[1][: episode.steps]
    episode, step_fn = grouped(episode, step_fn)
    loop = Loop(config, step_fn, hard_feedback, episode.steps, unroll)
    operands = Operands.of(params, episode)
    rollout = saved_rollout(loop, operands, episode.image_mask, episode.limits)
    return cast(Rollout, rollout).choice
