"""Selection of tokens: `select` with gradients, `choose` and `rank` for inference.

`choose` decides which tokens to keep within limits. `rank` orders tokens and records the margins of
the stop, which determine the kept tokens for every budget and stop bias.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from stepprune_jax.policy import layers
from stepprune_jax.policy.base import (
    AnyArray,
    DecoderFns,
    FeedbackFn,
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
    TableState,
    build_tables,
    init_state,
    table_bytes,
    table_logits,
    tabulates_pairs,
    take_rows,
)
from stepprune_jax.policy.rollout import (
    Episode,
    best_token,
    best_tokens,
    first_step_of_tokens,
    gumbel,
    hard_feedback,
    perturbed_logits,
    remaining_max_logit,
    repeat_group_logits,
    rollout,
    start_episode,
    straight_through,
    wrap_step_for_groups,
)
from stepprune_jax.policy.trajectory import (
    biased_stop,
    first_true,
    read_trajectory,
    stop_margin,
)

# Number of tokens between two checks of the stop. Tokens that are computed after the last row has
# stopped are wasted, but each check reads the hazard's weights.
BLOCK = 16
# Number of steps that are compiled as one loop body with one decoder layer. On a GPU such a step is
# six kernels, and one iteration of the loop costs three or four more. With more layers a step is
# thirty kernels, so unrolling saves little.
UNROLL = 8
# Bound on the memory of the tables, which grows with the square of the number of tokens. Episodes
# with larger tables run step by step.
MAX_TABLE_BYTES = 4 << 30


def encode_episode(
    params: Params,
    config: PolicyConfig,
    inputs: Inputs,
    limits: Limits,
    *,
    text_gate: ArrayLike = 1.0,
    stop_bias: ArrayLike = 0.0,
    decoder: DecoderFns = POINTER,
    key: Array | None = None,
) -> Episode:
    """Encodes image and question, and prepares the sequential choice of tokens.

    Args:
        params: policy weights.
        config: policy configuration.
        inputs: image and question.
        limits: bounds on the number of kept tokens.
        text_gate: g_txt in [0, 1]; see `PolicyConfig.text_gate`.
        stop_bias: added to the stop logits, a number or one per row.
        decoder: functions of the decoder.
        key: PRNG key of the sampled tokens, as in `select`.

    Returns:
        The episode before its first step.
    """
    encoded, question = encode_with_query(params, config, inputs, text_gate)
    episode = start_episode(
        params,
        config,
        memory(params, encoded),
        inputs.image_mask,
        limits,
        stop_bias=stop_bias,
        decoder=decoder,
        key=key,
    )
    return episode if question is None else episode._replace(query=episode.query + question)


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

    Each step points at the best remaining token and feeds its memory slot back as the next query.
    The loop always continues to T_max; the episode ends at the first step whose stop wins. Rows do
    not influence each other, and padding does not influence the result. `config.estimator` selects
    the gradient.

    Args:
        params: policy weights.
        config: policy configuration.
        inputs: image and question.
        limits: bounds on the counts.
        text_gate: g_txt in [0, 1]; see `PolicyConfig.text_gate`.
        stop_bias: added to the stop logits, a number or one per row.
        decoder: functions of the decoder.
        key: PRNG key of the sampled tokens, one for all rows or one per row; consumed. Not used at
            sampling temperature 0. None uses a fixed key, so the result is deterministic.

    Returns:
        The trajectory, with probabilities in at least float32.

    Raises:
        ValueError: inputs or limits do not fit the policy. Traced counts are not checked.
    """
    episode = encode_episode(
        params,
        config,
        inputs,
        limits,
        text_gate=text_gate,
        stop_bias=stop_bias,
        decoder=decoder,
        key=key,
    )
    return roll_out(params, config, episode, decoder)


def roll_out(
    params: Params,
    config: PolicyConfig,
    episode: Episode,
    decoder: DecoderFns = POINTER,
    estimator: str | None = None,
) -> Trajectory:
    """Runs an episode to T_max, with the gradient of the chosen estimator.

    Args:
        params: policy weights.
        config: policy configuration.
        episode: prepared episode.
        decoder: functions of the decoder.
        estimator: `"straight_through"` or `"parallel"`, as in `PolicyConfig`; None selects
            `config.estimator`.

    Returns:
        The trajectory, with probabilities that are differentiable in `params`.
    """
    is_straight_through = (estimator or config.estimator) == "straight_through"
    if not is_straight_through and decoder.sequence is not None and decoder.feedback is None:
        return select_parallel(params, config, episode, decoder)
    default_feedback = straight_through if is_straight_through else hard_feedback
    return select_loop(params, config, episode, decoder, decoder.feedback or default_feedback)


def select_loop(
    params: Params,
    config: PolicyConfig,
    episode: Episode,
    decoder: DecoderFns = POINTER,
    feedback: FeedbackFn = straight_through,
) -> Trajectory:
    """Runs an episode in a loop over its steps, which the backward pass differentiates."""
    logits, choice = rollout(params, config, episode, decoder.step, feedback)
    return _read_episode(config, episode, logits.swapaxes(0, 1), choice)


def _read_episode(
    config: PolicyConfig,
    episode: Episode,
    logits: Float[Array, "b t m"],
    choice: Int[Array, "t b"],
) -> Trajectory:
    """Computes probabilities and stop decisions of an episode.

    Args:
        config: policy configuration.
        episode: the episode, with its limits and stop bias.
        logits: [b, t, m] unmasked logits of all steps, with the stop logit last.
        choice: [t, b] index of the token that each step chooses.

    Returns:
        The trajectory.
    """
    return read_trajectory(
        config,
        logits,
        choice.T,
        first_step=first_step_of_tokens(choice, episode.image_mask.shape[1]),
        image_mask=episode.image_mask,
        limits=episode.limits,
        stop_bias=episode.stop_bias,
    )


def select_parallel(
    params: Params, config: PolicyConfig, episode: Episode, decoder: DecoderFns = POINTER
) -> Trajectory:
    """Runs an episode whose gradient is computed in one causal pass over all steps.

    The loop chooses the tokens without gradient. Then `decoder.sequence` computes the logits of all
    steps at once, with the chosen slots as queries. Up to rounding, values and gradients equal the
    results of `select_loop` with `hard_feedback`, in a fraction of the time and memory.

    Args:
        params: policy weights.
        config: policy configuration.
        episode: prepared episode.
        decoder: functions of the decoder; `sequence` is required.

    Returns:
        The trajectory.

    Raises:
        ValueError: the decoder has no `sequence`.
    """
    if decoder.sequence is None:
        raise ValueError("decoder.sequence is None, expected a function: see DecoderFns")
    choice = _choices_without_gradient(params, config, episode, decoder)
    chosen_slots = jnp.take_along_axis(episode.slots, choice[:-1].T[..., None], axis=1)
    # The first query is the start token; each later query is the slot that was chosen before.
    queries = jnp.concatenate([episode.query[:, None], chosen_slots], axis=1)
    logits = decoder.sequence(params, config, episode.context, queries, episode.cache)
    logits = repeat_group_logits(config, logits, episode.group)
    return _read_episode(config, episode, logits, choice)


def _choices_without_gradient(
    params: Params, config: PolicyConfig, episode: Episode, decoder: DecoderFns
) -> Int[Array, "t b"]:
    """Returns the index of the token that each step chooses, computed without gradient."""
    params, query, context, cache, slots = jax.lax.stop_gradient(
        (params, episode.query, episode.context, episode.cache, episode.slots)
    )
    episode = episode._replace(query=query, context=context, cache=cache, slots=slots)
    if can_use_tables(config, episode, decoder):
        walk = table_walk(params, config, episode, episode.steps, has_margins=False)
        return walk.advance(walk.start, jnp.int32(0))[1][: episode.steps]
    return rollout(params, config, episode, decoder.step, hard_feedback)[1]


@runtime_checkable
class AdvanceFn(Protocol):
    """Type of `Walk.advance`."""

    def __call__(self, state: Any, first: Array, /) -> tuple[Any, Array, Array | None]:
        """Chooses the next block of tokens.

        Args:
            state: `Walk.start`, or the state that the previous call returned.
            first: number of tokens that were chosen before.

        Returns:
            A tuple (state, choice, margin). choice: [block, b] tokens. margin: [block, b] margins
            of the stop before each token, or None if the walk has no margins.
        """
        ...


class Walk(NamedTuple):
    """An episode without gradient that advances `block` tokens at a time.

    Attributes:
        start: state before the first token.
        advance: chooses the next `block` tokens.
        block: number of tokens per call of `advance`.
    """

    start: Any
    advance: AdvanceFn
    block: int


def step_walk(params: Params, config: PolicyConfig, episode: Episode, step: StepFn) -> Walk:
    """Returns a walk that calls the decoder once per token; used for custom decoders.

    Args:
        params: policy weights.
        config: policy configuration.
        episode: prepared episode.
        step: step function of the decoder; see `StepFn`.

    Returns:
        A walk in blocks of one token, with stop margins.
    """
    episode, step = wrap_step_for_groups(episode, step)
    token_index = jnp.arange(episode.image_mask.shape[1])

    def advance(state, t):
        query, cache, available = state
        logits, cache = step(params, config, episode.context, query, cache, t)
        margin = stop_margin(config, logits, available, t, episode.stop_bias)[2]
        # All tokens of a group are chosen by the same noisy logits.
        group_start = t - t % episode.group
        choice = best_token(perturbed_logits(config, episode, logits, group_start), available)
        available = available & (token_index != choice[:, None])
        state = (hard_feedback(episode.slots, None, choice), cache, available)
        return state, choice[None], margin[None]

    return Walk((episode.query, episode.cache, episode.image_mask), advance, 1)


def can_use_tables(config: PolicyConfig, episode: Episode, decoder: DecoderFns) -> bool:
    """Returns whether an episode can read precomputed tables over pairs of slots (`Tables`).

    The tables exist for the built-in decoder only. The part that grows with the square of the
    number of slots must fit into `MAX_TABLE_BYTES`; episodes of few steps have no such part.
    """
    b, m, _ = episode.slots.shape
    batch_size = b if isinstance(b, int) else 1  # `jax.export` may leave the batch size symbolic
    num_bytes = 0
    if tabulates_pairs(m, episode.steps):
        num_bytes = batch_size * table_bytes(config, m, episode.slots.dtype)
    is_built_in = decoder.init is pointer_init and decoder.step is pointer_step
    return is_built_in and num_bytes <= MAX_TABLE_BYTES


def table_walk(
    params: Params, config: PolicyConfig, episode: Episode, block: int, *, has_margins: bool
) -> Walk:
    """Returns a walk of the built-in decoder that reads precomputed tables over pairs of slots.

    Args:
        params: policy weights.
        config: policy configuration.
        episode: prepared episode of the built-in decoder.
        block: number of tokens per call of `advance`, rounded up to complete groups. The tokens of
            a group are chosen by the logits of one step.
        has_margins: whether to compute the stop margins: stop logit minus the best token's logit.

    Returns:
        The walk. Its state is a tuple: state of the tables, and KV cache of the hazard layer.
    """
    group, n = episode.group, episode.image_mask.shape[1]
    groups_per_block = -(-block // group)
    block = groups_per_block * group
    padded_steps = -(-episode.steps // block) * block
    context = episode.context
    tables = build_tables(
        params, config, context, episode.slots, episode.query, steps=episode.steps
    )
    has_hazard = has_margins and config.stop == "hazard"
    needs_max_logit = has_margins and not has_hazard
    num_tokens = jnp.sum(episode.image_mask, axis=1, dtype=jnp.int32)

    def choose_group(state, group_inputs):
        """Chooses the tokens of one group by the logits after the previous group."""
        group_index, noise = group_inputs
        logits, cache = table_logits(
            params, config, context, tables, state, group_index=group_index
        )
        available = episode.image_mask & ~state.visited[:, :n]
        image_logits = logits[:, :-1]
        noisy_logits = image_logits if noise is None else image_logits + noise
        choice = best_tokens(noisy_logits, available, group)
        is_chosen = jnp.any(choice[..., None] == jnp.arange(n + 1), axis=1)
        state = TableState(choice, state.visited | is_chosen, cache)
        max_logit = (
            remaining_max_logit(image_logits, available, choice) if needs_max_logit else None
        )
        return state, (choice, logits[:, -1:], max_logit)

    unroll = min(UNROLL, groups_per_block) if config.decoder_layers == 1 else 1

    def advance(state, first):
        """Chooses the next `block` tokens; see `AdvanceFn`."""
        table_state, hazard_history = state
        previous_slot = table_state.slots[:, -1:]
        group_index = first // group + jnp.arange(groups_per_block)
        noise = _block_noise(config, episode, group_index * group)
        table_state, outputs = jax.lax.scan(
            choose_group, table_state, (group_index, noise), unroll=unroll
        )
        # Scan outputs are [groups, b, g]; the choices become [b, block].
        choice, stop_logit, max_logit = jax.tree.map(lambda x: x.swapaxes(0, 1), outputs)
        choice = choice.reshape(-1, block)
        if not has_margins:
            return (table_state, hazard_history), choice.T, None
        if has_hazard:
            # The hazard layer is evaluated before each token, with the previous slot as query.
            query_slots = jnp.concatenate([previous_slot, choice[:, :-1]], axis=1)
            queries = take_rows(tables.query, query_slots)
            stop_logit, hazard_history = hazard_logits(
                params, config, context, queries, hazard_history, first
            )
            max_logit = 0.0  # the margin of a hazard is its stop logit
        else:
            # A group has one stop logit, but its best remaining token changes with each choice.
            max_logit = max_logit.reshape(-1, block)
            stop_logit = jnp.broadcast_to(stop_logit, (*stop_logit.shape[:2], group))
            stop_logit = stop_logit.reshape(-1, block)
        step, bias = first + jnp.arange(block), episode.stop_bias[:, None]
        stop_logit = biased_stop(config, stop_logit, step, num_tokens[:, None], bias)
        margin = stop_logit - max_logit
        return (table_state, hazard_history), choice.T, margin.T

    hazard_history = empty_history(config, episode.slots, padded_steps) if has_hazard else ()
    start = (init_state(config, tables, padded_steps, group), hazard_history)
    return Walk(start, advance, block)


def _block_noise(
    config: PolicyConfig, episode: Episode, steps: Int[Array, "s"]
) -> Float[Array, "s b n"] | None:
    """Samples the Gumbel noise of several steps at once.

    Args:
        config: policy configuration; `temperature` is used.
        episode: the episode, with its sampling temperature and keys.
        steps: [s] numbers of the steps.

    Returns:
        [s, b, n] noise to add to the logits of the image tokens; None if tokens are not sampled.
    """
    if episode.key is None:
        return None
    dtype = layers.score_dtype(episode.slots.dtype)
    scale, num_tokens = episode.draw * config.temperature, episode.image_mask.shape[1]
    return jax.vmap(gumbel, (None, None, 0, None, None))(
        scale, episode.key, steps, num_tokens, dtype
    )


def choose_tokens(
    params: Params, config: PolicyConfig, episode: Episode, decoder: DecoderFns = POINTER
) -> Picks:
    """Decides which tokens of an episode are kept; not differentiable.

    Runs a `lax.while_loop` on the device that ends when all rows have stopped, not at T_max.

    The built-in decoder reads precomputed tables over pairs of slots (`pointer_cache.py`) and
    checks the stop after every `BLOCK` tokens, or never if the budget is exact. A custom decoder,
    or the built-in decoder with tables above `MAX_TABLE_BYTES`, is called once per token, for at
    most max_b K_b + 1 steps. With 16 heads, an image of 7,900 tokens has tables of that size,
    unless the episode has fewer steps than a quarter of the tokens.

    Args:
        params: policy weights.
        config: policy configuration.
        episode: prepared episode.
        decoder: functions of the decoder.

    Returns:
        The kept tokens of each row, in order of choice.
    """
    (b, n), steps = episode.image_mask.shape, episode.steps
    if can_use_tables(config, episode, decoder):
        has_margins = not episode.exact
        walk = table_walk(params, config, episode, min(BLOCK, steps), has_margins=has_margins)
    else:
        walk = step_walk(params, config, episode, decoder.step)
    min_tokens, max_tokens = episode.limits
    max_tokens = jnp.minimum(max_tokens, steps)

    def is_running(carry):
        first, is_alive, *_ = carry
        return (first < steps) & jnp.any(is_alive)

    def run_block(carry):
        """Chooses the next `walk.block` tokens and decides which rows stop before them."""
        first, is_alive, state, choice, is_stop = carry
        state, block_choice, margin = walk.advance(state, first)
        step = first + jnp.arange(walk.block)[:, None]
        is_block_stop = step >= max_tokens
        if not episode.exact:
            assert margin is not None  # the walk has margins
            is_block_stop = is_block_stop | ((step >= min_tokens) & (margin > 0))
        choice = jax.lax.dynamic_update_slice_in_dim(choice, block_choice, first, axis=0)
        is_stop = jax.lax.dynamic_update_slice_in_dim(is_stop, is_block_stop, first, axis=0)
        # A row that reaches `max_tokens` within this block needs no further block.
        is_full = first + walk.block >= max_tokens
        is_alive = is_alive & ~jnp.any(is_block_stop, axis=0) & ~is_full
        return first + walk.block, is_alive, state, choice, is_stop

    padded_steps = -(-steps // walk.block) * walk.block
    carry = (
        jnp.int32(0),  # first step of the next block
        jnp.ones(b, bool),  # whether each row continues
        walk.start,
        jnp.full((padded_steps, b), n, jnp.int32),  # chosen tokens
        # Whether each row stops before a step; True at steps that no block computes.
        jnp.ones((padded_steps, b), bool),
    )
    *_, choice, is_stop = jax.lax.while_loop(is_running, run_block, carry)
    return first_picks(choice[:steps].T, first_true(is_stop.T), n)


def first_picks(order: Int[AnyArray, "b t"], count: Int[AnyArray, "b"], num_tokens: int) -> Picks:
    """Returns the picks that keep the first `count` tokens of each row's order.

    Args:
        order: [b, t] indices of tokens in order of choice.
        count: [b] number of tokens to keep.
        num_tokens: n, the number of image tokens.

    Returns:
        The picks, with `num_tokens` as the action after a row's last token.
    """
    b, steps = order.shape
    action = jnp.where(jnp.arange(steps) < count[:, None], order, num_tokens)
    # The last column is the stop. Without it `checkify` would report an index out of bounds.
    is_kept = jnp.zeros((b, num_tokens + 1), bool)
    is_kept = is_kept.at[jnp.arange(b)[:, None], action].set(True)
    return Picks(action, jnp.asarray(count), is_kept[:, :num_tokens])


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
    """Chooses the tokens that are kept, with static shapes; not differentiable.

    The decisions equal the decisions of `select`. Within a jitted function, gather the tokens with
    `gather(picks, image, capacity)`; `prune` does both outside of one.

    Args:
        params: policy weights.
        config: policy configuration.
        inputs: image and question, and the statistics that the policy was trained with.
        limits: bounds on the counts.
        stop_bias: added to the stop logits; see `calibrate_stop_bias`.
        decoder: functions of the decoder.
        key: PRNG key of the sampled tokens, as in `select`.

    Returns:
        The kept tokens of each row, in order of choice.

    Raises:
        ValueError: inputs or limits do not fit the policy. Traced counts are not checked.
    """
    episode = encode_episode(
        params, config, inputs, limits, stop_bias=stop_bias, decoder=decoder, key=key
    )
    return choose_tokens(params, config, episode, decoder)


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
    """Orders tokens as `select` does, and records the margins of the stop; not differentiable.

    The order does not depend on the stop, and probabilities are not computed. `choose` with a
    budget keeps the first tokens of the order. From the margins, `calibrate_stop_bias` computes the
    stop bias at which a policy keeps a given number of tokens on average.

    Args:
        params: policy weights.
        config: policy configuration.
        inputs: image and question.
        limits: only `max_steps`, `group` and `draw` are used.
        stop_bias: added to the stop logits, a number or one per row.
        decoder: functions of the decoder.
        key: PRNG key of the sampled tokens, as in `select`.

    Returns:
        Order and margins; undefined at steps beyond the number of a row's tokens.

    Raises:
        ValueError: inputs or limits do not fit the policy. Traced counts are not checked.
    """
    episode = encode_episode(
        params, config, inputs, limits, stop_bias=stop_bias, decoder=decoder, key=key
    )
    return rank_tokens(params, config, episode, decoder)


def rank_tokens(
    params: Params, config: PolicyConfig, episode: Episode, decoder: DecoderFns = POINTER
) -> Ranked:
    """Orders the tokens of an episode to T_max and computes the stop margin before each step.

    Args:
        params: policy weights.
        config: policy configuration.
        episode: prepared episode.
        decoder: functions of the decoder.

    Returns:
        [b, t] order and margins. A margin is the stop logit minus the best token's logit.
    """
    if can_use_tables(config, episode, decoder):
        walk = table_walk(params, config, episode, episode.steps, has_margins=True)
        _, choice, margin = walk.advance(walk.start, jnp.int32(0))
        assert margin is not None  # the walk has margins
    else:
        walk = step_walk(params, config, episode, decoder.step)

        def run_step(state, t):
            state, choice, margin = walk.advance(state, t)
            assert margin is not None  # `step_walk` always computes margins
            return state, (choice[0], margin[0])

        _, (choice, margin) = jax.lax.scan(run_step, walk.start, jnp.arange(episode.steps))
    return Ranked(choice[: episode.steps].T, margin[: episode.steps].T)
