"""Selection: `select` with gradients, `choose` and `rank` without, the latter for all counts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from stepprune_jax.policy import layers
from stepprune_jax.policy.base import (
    AnyArray,
    DecoderFns,
    Inputs,
    Limits,
    Params,
    Picks,
    Ranked,
    StepFn,
    Trajectory,
)
from stepprune_jax.policy.config import PolicyConfig
from stepprune_jax.policy.decoder import (
    POINTER,
    empty_history,
    hazard_logits,
    pointer_init,
    pointer_step,
)
from stepprune_jax.policy.encoder import encode_with_query, memory
from stepprune_jax.policy.jax_settings import implicit_promotion
from stepprune_jax.policy.pointer_cache import (
    Walk,
    start_walk,
    table_bytes,
    tabulate,
    take_rows,
    walk_logits,
)
from stepprune_jax.policy.rollout import (
    Episode,
    best_token,
    best_tokens,
    grouped,
    gumbel,
    hard_feedback,
    hold,
    perturbed,
    pick_step,
    rollout,
    start_episode,
    straight_through,
    strongest,
)
from stepprune_jax.policy.trajectory import (
    biased_stop,
    first_true,
    read_trajectory,
    stop_margin,
)

# Tokens between two checks of the stop. Those after the last row has stopped are wasted; each check
# reads the hazard's weights.
BLOCK = 16
# Steps compiled as one body with one decoder layer: on a GPU a step is six kernels then, and the
# loop itself three or four. With more layers a step is thirty.
UNROLL = 8
# Tables grow with the square of the tokens. Episodes with larger ones are walked step by step.
MOST_TABLE_BYTES = 4 << 30


def begin(
    params: Params,
    config: PolicyConfig,
    inputs: Inputs,
    limits: Limits,
    text_gate: ArrayLike,
    stop_bias: ArrayLike,
    decoder: DecoderFns,
    key: Array | None = None,
) -> Episode:
    """Encodes the inputs and prepares an episode over them."""
    encoded, asked = encode_with_query(params, config, inputs, text_gate)
    slots, mask = memory(params, encoded), inputs.image_mask
    episode = start_episode(params, config, slots, mask, limits, stop_bias, decoder, key)
    return episode if asked is None else episode._replace(query=episode.query + asked)


@implicit_promotion()
def select(
    params: Params,
    config: PolicyConfig,
    inputs: Inputs,
    limits: Limits = Limits(),
    *,
    text_gate: ArrayLike = 1.0,
    stop_bias: ArrayLike = 0.0,
    decoder: DecoderFns = POINTER,
    key: Array | None = None,
) -> Trajectory:
    """Runs the sequential policy for T_max steps, Eqs. (3)-(9), with gradients.

    Each step points at the best token not yet chosen, feeds its memory slot back as the next query
    and continues to T_max; the episode ends where the stop first wins. Rows do not influence each
    other, and padding influences nothing. `config.estimator` says how it is differentiated.

    Args:
        params: policy weights.
        config: policy configuration.
        inputs: image and question.
        limits: bounds on the counts.
        text_gate: g_txt.
        stop_bias: added to the stop logits, a number or one per row.
        decoder: functions of the decoder.
        key: PRNG key of the draws if their temperature is not 0, one for all rows or one for each;
            consumed. By default a fixed one, so that a question's tokens are always the same.

    Returns:
        The trajectory, its probabilities in at least float32.

    Raises:
        ValueError: inputs or limits that do not fit, where this can be read before tracing.
    """
    episode = begin(params, config, inputs, limits, text_gate, stop_bias, decoder, key)
    return roll_out(params, config, episode, decoder)


def roll_out(
    params: Params,
    config: PolicyConfig,
    episode: Episode,
    decoder: DecoderFns = POINTER,
    estimator: str | None = None,
) -> Trajectory:
    """Runs an episode with an estimator, the configuration's by default, and the feedback of it."""
    straight = (estimator or config.estimator) == "straight_through"
    if not straight and decoder.sequence is not None and decoder.feedback is None:
        return select_parallel(params, config, episode, decoder)
    feedback = decoder.feedback or (straight_through if straight else hard_feedback)
    return select_loop(params, config, episode, decoder, feedback)


def select_loop(
    params: Params,
    config: PolicyConfig,
    episode: Episode,
    decoder: DecoderFns = POINTER,
    feedback: Callable[..., Array] = straight_through,
) -> Trajectory:
    """Runs an episode whose loop is differentiated step by step."""
    logits, choice = rollout(params, config, episode, decoder.step, feedback)
    return _read(config, episode, logits.swapaxes(0, 1), choice)


def _read(config: PolicyConfig, episode: Episode, logits, choice) -> Trajectory:
    picked = pick_step(choice, episode.image_mask.shape[1])
    return read_trajectory(
        config, logits, choice.T, picked, episode.image_mask, episode.limits, episode.stop_bias
    )


def select_parallel(
    params: Params, config: PolicyConfig, episode: Episode, decoder: DecoderFns = POINTER
) -> Trajectory:
    """Runs an episode with `hard_feedback`, its gradient taken in one causal pass, not the loop.

    The loop runs without gradient; then `decoder.sequence` scores all steps at once, with the
    chosen slots as their queries. Value and gradient equal those of the loop up to rounding, in a
    fraction of the time and memory, as nothing is differentiated step by step.
    """
    assert decoder.sequence is not None  # it scores all steps at once
    choice = _order(params, config, episode, decoder)
    later = jnp.take_along_axis(episode.slots, choice[:-1].T[..., None], axis=1)
    queries = jnp.concatenate([episode.query[:, None], later], axis=1)
    logits = decoder.sequence(params, config, episode.context, queries, episode.cache)
    logits = hold(config, logits, episode.group)
    return _read(config, episode, logits, choice)


def _order(
    params: Params, config: PolicyConfig, episode: Episode, decoder: DecoderFns
) -> Int[Array, "t b"]:
    """Returns the token pointed at in every step, with hard feedback and without gradient."""
    given = (params, episode.query, episode.context, episode.cache, episode.slots)
    params, query, context, cache, slots = jax.lax.stop_gradient(given)
    episode = episode._replace(query=query, context=context, cache=cache, slots=slots)
    if tables_fit(config, episode, decoder):
        walker = table_rollout(params, config, episode, episode.steps, margins=False)
        return walker.advance(walker.start, jnp.int32(0))[1][: episode.steps]
    return rollout(params, config, episode, decoder.step, hard_feedback)[1]


class Walker(NamedTuple):
    """A walk through an episode, `block` tokens at a time.

    `advance(state, first)` returns the next state, the tokens from number `first` on, and the
    stop's margins before each of them, if asked for.
    """

    start: Any
    advance: Callable[[Any, Int[Array, ""]], tuple[Any, Array, Array | None]]
    block: int


def step_by_step(params: Params, config: PolicyConfig, episode: Episode, step: StepFn) -> Walker:
    """Walks one token per block: the reference, and for custom decoders."""
    episode, step = grouped(episode, step)
    n = episode.image_mask.shape[1]

    def advance(state, t):
        query, cache, available = state
        logits, cache = step(params, config, episode.context, query, cache, t)
        margin = stop_margin(config, logits, available, t, episode.stop_bias)[2]
        first = t - t % episode.group
        choice = best_token(perturbed(config, episode, logits, first), available)
        available = available & (jnp.arange(n) != choice[:, None])
        state = (hard_feedback(episode.slots, None, choice), cache, available)
        return state, choice[None], margin[None]

    return Walker((episode.query, episode.cache, episode.image_mask), advance, 1)


def tables_fit(config: PolicyConfig, episode: Episode, decoder: DecoderFns) -> bool:
    """Returns whether its slots can be tabulated, as the built-in decoder's, within a bound."""
    b, m, _ = episode.slots.shape
    rows = b if isinstance(b, int) else 1  # `jax.export` may leave the batch open
    size = rows * table_bytes(config, m, episode.slots.dtype)
    own = decoder.init is pointer_init and decoder.step is pointer_step
    return own and size <= MOST_TABLE_BYTES


def table_rollout(
    params: Params, config: PolicyConfig, episode: Episode, block: int, margins: bool
) -> Walker:
    """Walks with tables over slots, `block` tokens at a time, rounded up to whole groups.

    Margins of the stop are computed if asked for.
    """
    group, key, n = episode.group, episode.key, episode.image_mask.shape[1]
    pointer_steps = -(-block // group)
    block = pointer_steps * group
    rows = -(-episode.steps // block) * block
    context = episode.context
    tables = tabulate(params, config, context, episode.slots, episode.query, episode.steps)
    hazard = margins and config.stop == "hazard"
    competes = margins and not hazard  # the stop, with the best token that is left
    past = empty_history(config, episode.slots, rows) if hazard else ()
    tokens = jnp.sum(episode.image_mask, axis=1, dtype=jnp.int32)

    def step(walk, at):
        number, noise = at
        logits, cache = walk_logits(params, config, context, tables, walk, number)
        available = episode.image_mask & ~walk.seen[:, :n]
        image = logits[:, :-1]
        choice = best_tokens(image if noise is None else image + noise, available, group)
        chosen = jnp.any(choice[..., None] == jnp.arange(n + 1), axis=1)
        best = strongest(image, available, choice) if competes else None
        return Walk(choice, walk.seen | chosen, cache), (choice, logits[:, -1:], best)

    unroll = min(UNROLL, pointer_steps) if config.decoder_layers == 1 else 1

    def advance(state, first):
        walk, past = state
        before = walk.at[:, -1:]
        numbers = first // group + jnp.arange(pointer_steps)
        noise = None
        if key is not None:  # one draw for the whole block
            wide, scale = layers.score_dtype(episode.slots.dtype), episode.draw * config.temperature
            noise = jax.vmap(gumbel, (None, None, 0, None, None))(
                scale, key, numbers * group, n, wide
            )
        walk, read = jax.lax.scan(step, walk, (numbers, noise), unroll=unroll)
        choice, stop, best = jax.tree.map(lambda x: x.swapaxes(0, 1), read)
        choice = choice.reshape(-1, block)
        if not margins:
            return (walk, past), choice.T, None
        if hazard:
            at = jnp.concatenate([before, choice[:, :-1]], axis=1)
            queries = take_rows(tables.query, at)
            stop, past = hazard_logits(params, config, context, queries, past, first)
            best = 0.0
        else:
            best = best.reshape(-1, block)
            stop = jnp.broadcast_to(stop, (*stop.shape[:2], group)).reshape(-1, block)
        at_step = first + jnp.arange(block)
        columns = (tokens[:, None], episode.stop_bias[:, None])
        margin = biased_stop(config, stop, at_step, *columns) - best
        return (walk, past), choice.T, margin.T

    return Walker((start_walk(config, tables, rows, group), past), advance, block)


def pick(
    params: Params, config: PolicyConfig, episode: Episode, decoder: DecoderFns = POINTER
) -> Picks:
    """Makes the decisions of an episode with `hard_feedback`.

    Runs a `lax.while_loop` that ends with the last row instead of at T_max, without a host round
    trip; not differentiable. With the built-in decoder it reads tables over slots (`tables.py`) and
    checks the stop every `BLOCK` tokens, or, given a budget, never. Any other decoder is run step
    by step, for at most max_b K_b + 1 steps, and so is the built-in one if its tables would be
    large (more than 7,900 tokens of an image, with 16 heads).
    """
    (b, n), steps = episode.image_mask.shape, episode.steps
    if tables_fit(config, episode, decoder):
        margins = not episode.exact
        walker = table_rollout(params, config, episode, min(BLOCK, steps), margins=margins)
    else:
        walker = step_by_step(params, config, episode, decoder.step)
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
        if not episode.exact:
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
    return first_picks(choice[:steps].T, first_true(stop.T), n)


def first_picks(order: Int[AnyArray, "b t"], count: Int[AnyArray, "b"], num_tokens: int) -> Picks:
    """Picks the first `count` tokens of each row's order."""
    b, steps = order.shape
    action = jnp.where(jnp.arange(steps) < count[:, None], order, num_tokens)
    kept = jnp.zeros((b, num_tokens), bool)
    kept = kept.at[jnp.arange(b)[:, None], action].set(True, mode="drop")
    return Picks(action, jnp.asarray(count), kept)


@implicit_promotion()
def choose(
    params: Params,
    config: PolicyConfig,
    inputs: Inputs,
    limits: Limits = Limits(),
    *,
    stop_bias: ArrayLike = 0.0,
    decoder: DecoderFns = POINTER,
    key: Array | None = None,
) -> Picks:
    """Chooses the tokens of a batch, entirely on the device: `prune` before it gathers.

    Every shape is static, so that it can be called inside a jitted function, followed by
    `gather(picks, image, capacity)`. The decisions are those of `select`; not differentiable.

    Args, returns and raises as `prune`.
    """
    episode = begin(params, config, inputs, limits, 1.0, stop_bias, decoder, key)
    return pick(params, config, episode, decoder)


@implicit_promotion()
def rank(
    params: Params,
    config: PolicyConfig,
    inputs: Inputs,
    limits: Limits = Limits(),
    *,
    stop_bias: ArrayLike = 0.0,
    decoder: DecoderFns = POINTER,
    key: Array | None = None,
) -> Ranked:
    """Computes order and margins of `select`, for all counts and stop biases.

    No episode is cut, and probabilities are not computed; not differentiable. A prefix of the order
    is what `choose` keeps at that budget, and `calibrate_stop_bias` finds the stop bias of a mean
    count.

    Args, raises as `select`; of the limits, `max_steps` and `group` are read.

    Returns:
        The order and its margins; undefined where a row has no token left.
    """
    episode = begin(params, config, inputs, limits, 1.0, stop_bias, decoder, key)
    return order(params, config, episode, decoder)


def order(
    params: Params, config: PolicyConfig, episode: Episode, decoder: DecoderFns = POINTER
) -> Ranked:
    """Computes order and margins of an episode."""
    if tables_fit(config, episode, decoder):
        walker = table_rollout(params, config, episode, episode.steps, margins=True)
        _, choice, margin = walker.advance(walker.start, jnp.int32(0))
        assert margin is not None  # requested above
    else:
        walker = step_by_step(params, config, episode, decoder.step)

        def step(state, number):
            state, choice, margin = walker.advance(state, number)
            assert margin is not None  # a margin for every step
            return state, (choice[0], margin[0])

        _, (choice, margin) = jax.lax.scan(step, walker.start, jnp.arange(episode.steps))
    return Ranked(choice[: episode.steps].T, margin[: episode.steps].T)
