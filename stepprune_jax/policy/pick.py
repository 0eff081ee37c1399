"""Selection without gradients: `pick`, with early exit, and `rank`, for all counts at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.policy import layers
from stepprune_jax.policy.checks import AnyArray, checked
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.decoder import (
    Decoder,
    empty_history,
    hazard_logits,
    pointer_init,
    pointer_step,
)
from stepprune_jax.policy.episode import Bounds, Episode, prepare
from stepprune_jax.policy.params import Params
from stepprune_jax.policy.rollout import best_token, best_tokens, grouped, hard_feedback
from stepprune_jax.policy.tables import Walk, start_walk, tabulate, take_rows, walk_logits
from stepprune_jax.policy.trajectory import biased_stop, first_true, stop_margin

# Tokens between two checks of the stop. Those after the last row has stopped are wasted; each check
# reads the hazard's weights.
BLOCK = 16
# Steps compiled as one body with one decoder layer: on a GPU a step is six kernels then, and the
# loop itself three or four. With more layers a step is thirty.
UNROLL = 8
# Tables grow with the square of the tokens. Episodes with larger ones are walked step by step.
MOST_TABLE_BYTES = 4 << 30


class Picks(NamedTuple):
    """The decisions of a `Trajectory`, without its probabilities.

    Attributes:
        action: a_t; n from the step at which the row stopped.
        count: K, the number of tokens kept.
        selected: whether token i is kept.
    """

    action: Int[Array, "b t"]
    count: Int[Array, "b"]
    selected: Bool[Array, "b n"]


class Ranked(NamedTuple):
    """Order and margins of a `Trajectory`, without its probabilities.

    Attributes:
        choice: the token pointed at in every step.
        margin: as in `Trajectory`.
    """

    choice: Int[Array, "b t"]
    margin: Float[Array, "b t"]


class Walker(NamedTuple):
    """A walk through an episode, block by block.

    Attributes:
        start: initial state.
        advance: `(state, first) -> (state, choice [k, b], margin [k, b] or None)`: the next k
            tokens, from number `first` on, and the stop's margins before each.
        block: k.
    """

    start: Any
    advance: Callable[[Any, Int[Array, ""]], tuple[Any, Array, Array | None]]
    block: int


def step_by_step(
    params: Params, config: PolicyConfig, episode: Episode, step_fn: Callable[..., Any]
) -> Walker:
    """Walks with a `step_fn`, one token per block: the reference, and for custom decoders."""
    query, context, cache = episode.decoder
    n = episode.image_mask.shape[1]

    def advance(state, step):
        query, cache, available = state
        logits, cache = step_fn(params, config, context, query, cache, step)
        margin = stop_margin(config, logits, available, step, episode.stop_bias)[2]
        choice = best_token(logits, available)
        available = available & (jnp.arange(n) != choice[:, None])
        state = (hard_feedback(episode.slots, None, choice), cache, available)
        return state, choice[None], margin[None]

    return Walker((query, cache, episode.image_mask), advance, 1)


def has_tables(init_fn: Callable[..., Decoder], step_fn: Callable[..., Any]) -> bool:
    """Returns whether a decoder is the built-in one, whose slots can be tabulated."""
    return init_fn is pointer_init and step_fn is pointer_step


def tables_fit(config: PolicyConfig, episode: Episode) -> bool:
    """Returns whether the tables of an episode are within `MOST_TABLE_BYTES`."""
    b, m, _ = episode.slots.shape
    width = layers.score_dtype(episode.slots.dtype).itemsize
    return width * b * m**2 * (config.num_heads + 1) <= MOST_TABLE_BYTES


def by_tables(
    params: Params, config: PolicyConfig, episode: Episode, block: int, margins: bool
) -> Walker:
    """Walks with tables over slots, several steps per block.

    Args:
        params: policy weights.
        config: policy configuration.
        episode: episode whose decoder is from `pointer_init`.
        block: minimum number of tokens per block; rounded up to whole groups.
        margins: whether to compute the stop's margins.
    """
    group, n = episode.group, episode.image_mask.shape[1]
    pointer_steps = -(-block // group)
    block = pointer_steps * group
    rows = -(-episode.steps // block) * block
    query, context, _ = episode.decoder
    tables = tabulate(params, config, context, episode.slots, query)
    hazard = margins and config.stop == "hazard"
    past = empty_history(config, episode.slots, rows) if hazard else ()
    tokens = jnp.sum(episode.image_mask, axis=1, dtype=jnp.int32)

    def step(walk, number):
        logits, cache = walk_logits(params, config, context, tables, walk, number)
        available = episode.image_mask & ~walk.seen[:, :n]
        choice, strongest = best_tokens(logits, available, group)
        chosen = jnp.any(choice[..., None] == jnp.arange(n + 1), axis=1)
        return Walk(choice, walk.seen | chosen, cache), (choice, logits[:, -1:], strongest)

    unroll = min(UNROLL, pointer_steps) if config.decoder_layers == 1 else 1

    def advance(state, first):
        walk, past = state
        before = walk.at[:, -1:]
        numbers = first // group + jnp.arange(pointer_steps)
        walk, read = jax.lax.scan(step, walk, numbers, unroll=unroll)
        choice, stop, strongest = (x.swapaxes(0, 1) for x in read)
        choice = choice.reshape(-1, block)
        if not margins:
            return (walk, past), choice.T, None
        if hazard:
            at = jnp.concatenate([before, choice[:, :-1]], axis=1)
            queries = take_rows(tables.query, at)
            stop, past = hazard_logits(params, config, context, queries, past, first)
            strongest = 0.0
        else:
            strongest = strongest.reshape(-1, block)
            stop = jnp.broadcast_to(stop, (*stop.shape[:2], group)).reshape(-1, block)
        at_step = first + jnp.arange(block)
        columns = (tokens[:, None], episode.stop_bias[:, None])
        margin = biased_stop(config, stop, at_step, *columns) - strongest
        return (walk, past), choice.T, margin.T

    return Walker((start_walk(config, tables, rows, group), past), advance, block)


@checked
def pick(
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
) -> Picks:
    """Makes the decisions of `select` with `hard_feedback`, for inference.

    Runs a `lax.while_loop` that ends with the last row instead of at T_max, without a host round
    trip; not differentiable. With the built-in decoder it reads tables over slots (`tables.py`) and
    checks the stop every `BLOCK` tokens, or, given a `budget`, never. Any other decoder is run step
    by step, for at most max_b K_b + 1 steps, and so is the built-in one if its tables would be
    large (more than 7,900 tokens of an image, with 16 heads).

    Args, returns and raises as `select`; the result holds no probabilities.
    """
    bounds = Bounds(max_steps, min_tokens, max_tokens, budget, group)
    episode = prepare(params, config, memory, image_mask, bounds, stop_bias, init_fn)
    (b, n), steps = episode.image_mask.shape, episode.steps
    if has_tables(init_fn, step_fn) and tables_fit(config, episode):
        walker = by_tables(params, config, episode, min(BLOCK, steps), margins=budget is None)
    else:
        walker = step_by_step(params, config, *grouped(episode, step_fn))
    least, most = episode.limits
    most = jnp.minimum(most, steps)

    def running(carry):
        first, alive, *_ = carry
        return (first < steps) & jnp.any(alive)

    def body(carry):
        first, alive, state, choice, stop = carry
        state, chosen, margin = walker.advance(state, first)
        step = first + jnp.arange(walker.block)[:, None]
        now = step >= most
        if budget is None:
            assert margin is not None  # requested above
            now = now | ((step >= least) & (margin > 0))
        choice, stop = (
            jax.lax.dynamic_update_slice_in_dim(whole, part, first, axis=0)
            for whole, part in ((choice, chosen), (stop, now))
        )
        # Rows that are full need no further step to stop.
        alive = alive & ~jnp.any(now, axis=0) & (first + walker.block < most)
        return first + walker.block, alive, state, choice, stop

    rows = -(-steps // walker.block) * walker.block
    carry = (
        jnp.int32(0),
        jnp.ones(b, bool),
        walker.start,
        jnp.full((rows, b), n, jnp.int32),
        jnp.ones((rows, b), bool),
    )
    *_, choice, stop = jax.lax.while_loop(running, body, carry)
    count = first_true(stop.T)
    action = jnp.where(jnp.arange(steps) < count[:, None], choice[:steps].T, n)
    kept = jnp.zeros((b, n), bool).at[jnp.arange(b)[:, None], action].set(True, mode="drop")
    return Picks(action, count, kept)


@checked
def rank(
    params: Params,
    config: PolicyConfig,
    memory: Float[AnyArray, "b m d"],
    *,
    image_mask: Bool[AnyArray, "b n"] | None = None,
    max_steps: int | None = None,
    stop_bias: ArrayLike = 0.0,
    group: int | None = None,
) -> Ranked:
    """Computes order and margins of `select` with `hard_feedback`, for all counts and stop biases.

    No episode is cut, and probabilities are not computed; not differentiable. A prefix of the order
    is what `pick` keeps at that budget, and `count_at_bias` finds where an episode stops.

    Args and raises as `select`.

    Returns:
        The order and its margins; undefined where a row has no token left.
    """
    bounds = Bounds(max_steps=max_steps, group=group)
    episode = prepare(params, config, memory, image_mask, bounds, stop_bias, pointer_init)
    if tables_fit(config, episode):
        walker = by_tables(params, config, episode, episode.steps, margins=True)
        _, choice, margin = walker.advance(walker.start, jnp.int32(0))
        assert margin is not None  # requested above
    else:
        walker = step_by_step(params, config, *grouped(episode, pointer_step))

        def step(state, number):
            state, choice, margin = walker.advance(state, number)
            assert margin is not None  # of every step
            return state, (choice[0], margin[0])

        _, (choice, margin) = jax.lax.scan(step, walker.start, jnp.arange(episode.steps))
    return Ranked(choice[: episode.steps].T, margin[: episode.steps].T)
