"""Tables over pairs of slots give the choices of the step-by-step loop, in float32."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import quick_or_slow

from stepprune_jax.policy import POINTER, DecoderFns, layers, selection
from stepprune_jax.policy.rollout import hard_feedback
from stepprune_jax.policy.selection import BLOCK

B, N, STEPS = 2, 19, BLOCK + 2  # not a multiple of the block
PROGRAMS = [  # decoder layers, stop, group, sampling temperature
    (1, "hazard", 1, 1.0),
    (1, "aligned", 1, 0.0),
    (1, "softmax", 4, 0.0),
    (2, "hazard", 3, 1.0),
    (2, "softmax", 1, 1.0),
    (3, "aligned", 1, 1.0),
    (1, "hazard", 1, 0.0),
]


def reference_step(*arguments):
    """Equals the pointer's step, but is another function, so that no tables are built."""
    return POINTER.step(*arguments)


@functools.cache
def compiled(layers, stop, group, draw):
    """A program that chooses tokens with tables and step by step, and ranks them."""
    config = cases.small_config(
        dtype="float32",
        text_width=0,
        decoder_layers=layers,
        stop=stop,
        group=group,
        draw=draw,
        price_growth=float(layers == 1),
    )

    @jax.jit
    def run(params, slots, mask, min_tokens, max_tokens, bias):
        options = dict(mask=mask, max_steps=STEPS)
        bounds = dict(min_tokens=min_tokens, max_tokens=max_tokens, stop_bias=bias)

        def choose_both_ways(**limits):
            decoders = (POINTER, DecoderFns(POINTER.init, reference_step))
            arguments = options | limits
            return [
                cases.pick(params, config, slots, decoder=decoder, **arguments)
                for decoder in decoders
            ]

        budget = jnp.clip(max_tokens, 1, STEPS)
        loop = {"feedback": hard_feedback}
        trajectory = cases.select(params, config, slots, **options, loop=loop, budget=STEPS)
        ranked = cases.rank(params, config, slots, **options)
        return choose_both_ways(**bounds), choose_both_ways(budget=budget), (ranked, trajectory)

    return config, run


@pytest.mark.parametrize("program", quick_or_slow(PROGRAMS, PROGRAMS[2:4]), ids=str)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    tied=st.booleans(),
    share=st.sampled_from([0.0, 0.2, 0.8, 1.0]),
    bounds=st.lists(
        st.tuples(st.integers(0, STEPS), st.integers(0, STEPS)).map(sorted), min_size=B, max_size=B
    ),
    bias=st.lists(st.floats(-6, 6, width=32), min_size=B, max_size=B),
)
def test_tables_choose_what_the_loop_chooses(program, seed, tied, share, bounds, bias):
    config, run = compiled(*program)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(np.float32, cases.random_weights(rng, config))
    slots = np.float32(rng.normal(size=(B, N + 1, 8)))
    mask = cases.random_mask(rng, B, N, share)
    # Equal slots tie. Rounding in the matrix product decides between them, so any is accepted.
    source = rng.integers(0, N // 2, N) if tied else np.arange(N)
    source = np.append(source, N)
    slots, mask = slots[:, source], mask[:, source[:N]]
    min_tokens, max_tokens = np.array(bounds, np.int32).T
    real = np.pad(mask, ((0, 0), (0, 1)), constant_values=True)
    poisoned = np.float32(cases.poison(rng, slots, real))
    results = run(params, poisoned, mask, min_tokens, max_tokens, np.array(bias, np.float32))
    *picks, (ranked, trajectory) = jax.tree.map(np.asarray, results)
    for table_picks, step_picks in picks:
        np.testing.assert_array_equal(source[table_picks.action], source[step_picks.action])
        np.testing.assert_array_equal(table_picks.count, step_picks.count)
        for row in range(B):
            action = table_picks.action[row, : table_picks.count[row]]
            assert len(set(action)) == len(action) and mask[row, action].all()
            np.testing.assert_array_equal(
                np.flatnonzero(table_picks.selected[row]), np.sort(action)
            )
    has_token = np.arange(STEPS) < mask.sum(1)[:, None]  # steps that can point at a token
    np.testing.assert_array_equal(
        source[ranked.choice[has_token]], source[trajectory.choice[has_token]]
    )
    np.testing.assert_allclose(
        ranked.margin[has_token], trajectory.margin[has_token], rtol=1e-3, atol=1e-3
    )


def test_ties_go_to_the_lowest_index():
    config, run = compiled(1, "softmax", 4, 0.0)
    params, slots = float32_case(config)
    mask, max_tokens = np.arange(N) != 3, np.full(B, STEPS, np.int32)
    bounds = (np.array([mask] * B), max_tokens, max_tokens)
    (_, _), budget_picks, (ranked, _) = run(params, 0 * slots, *bounds, np.zeros(B, np.float32))
    for picks in budget_picks:
        np.testing.assert_array_equal(picks.action, [np.flatnonzero(mask)] * B)
    np.testing.assert_array_equal(ranked.choice, [np.flatnonzero(mask)] * B)


def float32_case(config):
    """Returns random float32 weights, and the slots of `B` images."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(jnp.float32, cases.random_weights(rng, config))
    return params, jnp.float32(rng.normal(size=(B, N + 1, 8)))


def test_large_tables_are_not_built(monkeypatch):
    config = cases.small_config(dtype="float32", text_width=0, stop="hazard", group=3)
    params, slots = float32_case(config)

    def run():
        return cases.pick(params, config, slots, max_steps=STEPS)

    table_picks = jax.jit(run)()
    monkeypatch.setattr(selection, "MAX_TABLE_BYTES", 0)
    monkeypatch.setattr(selection, "table_walk", None)
    step_picks = jax.jit(lambda: run())()
    np.testing.assert_array_equal(step_picks.action, table_picks.action)


@pytest.mark.parametrize("layers_of_decoder", [1, 2])
def test_few_steps_among_many_slots_need_no_table_of_pairs(layers_of_decoder, monkeypatch):
    config = cases.small_config(
        dtype="float32", text_width=0, decoder_layers=layers_of_decoder, stop="hazard"
    )
    params, slots = float32_case(config)
    built_tables, build_tables = [], selection.build_tables

    def recorded(*arguments, **options):
        built_tables.append(build_tables(*arguments, **options))
        return built_tables[-1]

    monkeypatch.setattr(selection, "build_tables", recorded)

    def run(steps):
        return jax.jit(lambda: cases.pick(params, config, slots, max_steps=steps))()

    few_steps = (N + 1) // 4
    expected = [run(few_steps).action, run(few_steps + 1).action]
    assert all(tables.score is not None for tables in built_tables)
    monkeypatch.setattr(layers, "MANY_QUERIES", N)
    actual = [run(few_steps).action, run(few_steps + 1).action]
    assert [tables.score is None for tables in built_tables[2:]] == [True, False]
    has_no_logits = [tables.row_logit is None for tables in built_tables[2:]]
    assert has_no_logits == [True, layers_of_decoder > 1]
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("by_query", [True, False])
def test_attention_in_chunks_equals_attention_at_once(by_query, monkeypatch):
    rng = np.random.default_rng(0)
    query, key, value = (jnp.array(rng.normal(size=(B, 2, t, 4))) for t in (9, 11, 11))
    mask = jnp.array(rng.random((B, 1, 9 if by_query else 1, 11)) < 0.7)

    def value_and_gradient():
        def loss(*arguments):
            return (layers.attention(*arguments, mask) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(query, key, value)

    unchunked = value_and_gradient()
    monkeypatch.setattr(layers, "MANY_QUERIES", 8)
    monkeypatch.setattr(layers, "QUERIES", {"default": 4})
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-4), value_and_gradient(), unchunked
    )
