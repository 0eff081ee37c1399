"""The autoregressive loop: which token is pointed at in each step, and its gradient.

The loop runs all `steps` regardless of the stop: the pointer always moves on to the best remaining
token, so that a token's score exists at every step. Where the episode ends is decided afterwards,
from the same logits (`trajectory.py`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.policy.checks import require
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.decoder import Decoder
from stepprune_jax.policy.episode import Episode
from stepprune_jax.policy.layers import score_dtype
from stepprune_jax.policy.trajectory import Limits, step_distribution


class Loop(NamedTuple):
    """The static half of a rollout: configuration, functions and length."""

    config: PolicyConfig
    step_fn: Callable
    feedback_fn: Callable
    steps: int
    unroll: int


class Operands(NamedTuple):
    """The differentiable half of a rollout."""

    params: Any
    context: Any
    memory: Float[Array, "b m d"]
    query: Float[Array, "b d"]
    cache: Any
    stop_bias: Float[Array, "b"]

    @classmethod
    def of(cls, params: Any, episode: Episode) -> "Operands":
        """Collects the operands of an episode."""
        query, context, cache = episode.decoder
        return cls(params, context, episode.slots, query, cache, episode.stop_bias)


class Rollout(NamedTuple):
    """The loop's record: unmasked logits and the token pointed at, time first."""

    logits: Float[Array, "t b m"]
    choice: Int[Array, "t b"]


def best_token(logits: Float[Array, "*b m"], available: Bool[Array, "*b n"]) -> Int[Array, "*b"]:
    """Returns the masked argmax over the image slots; ties go to the lowest index."""
    return jnp.argmax(_left(logits, available), axis=-1).astype(jnp.int32)


def best_tokens(
    logits: Float[Array, "b m"], available: Bool[Array, "b n"], group: int
) -> tuple[Int[Array, "b g"], Float[Array, "b g"]]:
    """Returns the `group` best image slots, best first, and their logits."""
    left = _left(logits, available)
    if group == 1:
        return best_token(logits, available)[:, None], jnp.max(left, axis=-1, keepdims=True)
    strongest, choice = jax.lax.top_k(left, group)
    return choice.astype(jnp.int32), strongest


def _left(logits: Float[Array, "*b m"], available: Bool[Array, "*b n"]) -> Float[Array, "*b n"]:
    return jnp.where(available, logits[..., :-1], jnp.finfo(logits.dtype).min)


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


def grouped(episode: Episode, step_fn: Callable[..., Any]) -> tuple[Episode, Callable[..., Any]]:
    """Makes the steps of an episode use the logits of their group's first step.

    The logits of all steps are one more leaf of the decoder's cache, written and read as an
    append-only `step_fn` may.
    """
    query, context, cache = episode.decoder
    group = episode.group
    if group == 1:
        return episode, step_fn

    def held_step(params, config, context, query, cache, step):
        cache, logits = cache
        own, cache = step_fn(params, config, context, query, cache, step)
        logits = jax.lax.dynamic_update_slice_in_dim(
            logits, own[:, None].astype(logits.dtype), step, axis=1
        )
        held = jax.lax.dynamic_index_in_dim(logits, step - step % group, axis=1, keepdims=False)
        held = held.at[:, -1].set(own[:, -1]) if config.stop == "hazard" else held
        return held, (cache, logits)

    b, m, _ = episode.slots.shape
    logits = jnp.zeros((b, episode.steps, m), score_dtype(episode.slots.dtype))
    return episode._replace(decoder=Decoder(query, context, (cache, logits))), held_step


def _feedback(loop: Loop, memory, logits, available, step, limits, stop_bias, choice):
    """Computes the next query from one step's logits."""
    p = step_distribution(loop.config, logits, available, step, limits, stop_bias)
    prob = jnp.concatenate([p.prob, p.stop_prob[..., None]], axis=-1)
    return loop.feedback_fn(memory, prob, choice)


def plain_rollout(
    loop: Loop, operands: Operands, image_mask: Bool[Array, "b n"], limits: Limits
) -> Rollout:
    """Runs the loop as one `lax.scan` that JAX differentiates itself; a `rollout_fn`.

    Its backward pass keeps one copy of the cache per step: memory grows as the square of `steps`.
    Kept as the reference for `saved_rollout`.
    """
    return Rollout(*_scan(loop, operands, image_mask, limits)[0][1:])


def _scan(loop: Loop, operands: Operands, image_mask, limits):
    def body(carry, step):
        query, cache, available = carry
        logits, cache = loop.step_fn(
            operands.params, loop.config, operands.context, query, cache, step
        )
        choice = best_token(logits, available)
        following = _feedback(
            loop, operands.memory, logits, available, step, limits, operands.stop_bias, choice
        )
        chosen = jnp.arange(available.shape[1]) == choice[:, None]
        return (following, cache, available & ~chosen), (query, logits, choice)

    start = (operands.query, operands.cache, image_mask)
    steps = jnp.arange(loop.steps, dtype=jnp.int32)
    (_, cache, _), outputs = jax.lax.scan(body, start, steps, unroll=loop.unroll)
    return outputs, cache


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def saved_rollout(
    loop: Loop, operands: Operands, image_mask: Bool[Array, "b n"], limits: Limits
) -> Rollout:
    """Runs the same loop with a backward pass whose memory is linear in `steps`; a `rollout_fn`.

    The forward pass saves each step's query and logits, and the final cache once. The backward
    pass walks the steps in reverse, recomputes a step from the final cache (a `step_fn` is
    append-only, so later rows are invisible to it) and accumulates the cotangents of weights,
    memory and cache. Gradients equal those of `plain_rollout`.
    """
    return plain_rollout(loop, operands, image_mask, limits)


def _saved_fwd(loop, operands, image_mask, limits):
    for leaf in jax.tree.leaves(operands.cache):
        floating = jnp.issubdtype(leaf.dtype, jnp.inexact)
        require(floating, "a leaf of the decoder's cache", f"of dtype {leaf.dtype}", "floating")
    (queries, logits, choice), cache = _scan(loop, operands, image_mask, limits)
    return Rollout(logits, choice), (operands, image_mask, limits, queries, logits, choice, cache)


def _saved_bwd(loop, residuals, cotangents):
    operands, image_mask, limits, queries, logits, choices, cache = residuals
    picked = pick_step(choices, image_mask.shape[1])

    def body(carry, inputs):
        totals, query_bar, cache_bar = carry
        step, query, logits_t, choice, logits_bar = inputs
        available = image_mask & (picked >= step)

        def feedback(memory, logits, stop_bias):
            return _feedback(loop, memory, logits, available, step, limits, stop_bias, choice)

        def recompute(params, context, query, cache):
            return loop.step_fn(params, loop.config, context, query, cache, step)

        _, feedback_vjp = jax.vjp(feedback, operands.memory, logits_t, operands.stop_bias)
        memory_bar, through, bias_bar = feedback_vjp(query_bar)
        _, step_vjp = jax.vjp(recompute, operands.params, operands.context, query, cache)
        params_bar, context_bar, query_bar, cache_bar = step_vjp((logits_bar + through, cache_bar))
        here = _floats((params_bar, context_bar, memory_bar, bias_bar))
        return (jax.tree.map(jnp.add, totals, here), query_bar, cache_bar), None

    primals = (operands.params, operands.context, operands.memory, operands.stop_bias)
    # Sums over hundreds of steps are kept in at least float32, whatever the compute dtype.
    totals = jax.tree.map(lambda x: jnp.zeros(x.shape, score_dtype(x.dtype)), _floats(primals))
    start = (totals, *jax.tree.map(jnp.zeros_like, (operands.query, cache)))
    steps = jnp.arange(loop.steps, dtype=jnp.int32)
    inputs = (steps, queries, logits, choices, cotangents.logits)
    (totals, query_bar, cache_bar), _ = jax.lax.scan(
        body, start, inputs, reverse=True, unroll=loop.unroll
    )
    totals = jax.tree.map(lambda total, x: total.astype(x.dtype), totals, _floats(primals))
    params_bar, context_bar, memory_bar, bias_bar = totals
    return Operands(params_bar, context_bar, memory_bar, query_bar, cache_bar, bias_bar), None, None


def _floats(tree: Any) -> Any:
    """Replaces leaves that carry no gradient, such as masks, by `None`."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, tree)


saved_rollout.defvjp(_saved_fwd, _saved_bwd)
