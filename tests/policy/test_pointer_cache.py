"""Tables over slots make the choices of the step-by-step loop, in float32."""

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

B, N, STEPS = 2, 19, BLOCK + 2  # more than a block, and no whole number of them
PROGRAMS = [  # decoder layers, stop, group, temperature of the draw
    (1, "hazard", 1, 1.0),
    (1, "aligned", 1, 0.0),
    (1, "softmax", 4, 0.0),
    (2, "hazard", 3, 1.0),
    (2, "softmax", 1, 1.0),
    (3, "aligned", 1, 1.0),
    (1, "hazard", 1, 0.0),
]


def reference_step(*arguments):
    """Another function than the pointer's, so that no tables are made."""
    return POINTER.step(*arguments)


@functools.cache
def compiled(layers, stop, group, draw):
    """Both ways to pick, within limits and at a budget, and both orders with their margins."""
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
    def run(params, slots, mask, least, most, bias):
        options = dict(mask=mask, max_steps=STEPS)
        bounds = dict(min_tokens=least, max_tokens=most, stop_bias=bias)

        def both(**more):
            ways = (POINTER, DecoderFns(POINTER.init, reference_step))
            given = options | more
            return [cases.pick(params, config, slots, decoder=way, **given) for way in ways]

        budget = jnp.clip(most, 1, STEPS)
        loop = {"feedback": hard_feedback}
        whole = cases.select(params, config, slots, **options, loop=loop, budget=STEPS)
        ranked = cases.rank(params, config, slots, **options)
        return both(**bounds), both(budget=budget), (ranked, whole)

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
    # Twins tie, and which of them a product rounds up may depend on its column: any will do.
    source = rng.integers(0, N // 2, N) if tied else np.arange(N)
    source = np.append(source, N)
    slots, mask = slots[:, source], mask[:, source[:N]]
    least, most = np.array(bounds, np.int32).T
    real = np.pad(mask, ((0, 0), (0, 1)), constant_values=True)
    given = np.float32(cases.poison(rng, slots, real))
    found = run(params, given, mask, least, most, np.array(bias, np.float32))
    *picks, (ranked, whole) = jax.tree.map(np.asarray, found)
    for table_rollout, by_steps in picks:
        np.testing.assert_array_equal(source[table_rollout.action], source[by_steps.action])
        np.testing.assert_array_equal(table_rollout.count, by_steps.count)
        for row in range(B):
            action = table_rollout.action[row, : table_rollout.count[row]]
            assert len(set(action)) == len(action) and mask[row, action].all()
            np.testing.assert_array_equal(
                np.flatnonzero(table_rollout.selected[row]), np.sort(action)
            )
    left = np.arange(STEPS) < mask.sum(1)[:, None]  # steps with a token to point at
    np.testing.assert_array_equal(source[ranked.choice[left]], source[whole.choice[left]])
    np.testing.assert_allclose(ranked.margin[left], whole.margin[left], rtol=1e-3, atol=1e-3)


def test_ties_go_to_the_lowest_index():
    config, run = compiled(1, "softmax", 4, 0.0)
    params = jax.tree.map(np.float32, cases.random_weights(np.random.default_rng(0), config))
    zero = np.zeros((B, N + 1, 8), np.float32)
    mask = np.arange(N) != 3
    most = np.full(B, STEPS, np.int32)
    none = np.zeros(B, np.float32)
    (_, _), exact, (ranked, _) = run(params, zero, np.array([mask] * B), most, most, none)
    for picks in exact:
        np.testing.assert_array_equal(picks.action, [np.flatnonzero(mask)] * B)
    np.testing.assert_array_equal(ranked.choice, [np.flatnonzero(mask)] * B)


def test_large_tables_are_not_made(monkeypatch):
    config = cases.small_config(dtype="float32", text_width=0, stop="hazard", group=3)
    rng = np.random.default_rng(0)
    params = jax.tree.map(jnp.float32, cases.random_weights(rng, config))
    slots = jnp.float32(rng.normal(size=(B, N + 1, 8)))

    def run():
        return cases.pick(params, config, slots, max_steps=STEPS)

    tables = jax.jit(run)()
    monkeypatch.setattr(selection, "MOST_TABLE_BYTES", 0)
    monkeypatch.setattr(selection, "table_rollout", None)
    steps = jax.jit(lambda: run())()
    np.testing.assert_array_equal(steps.action, tables.action)


@pytest.mark.parametrize("layers_of_decoder", [1, 2])
def test_few_steps_among_many_slots_need_no_table_of_pairs(layers_of_decoder, monkeypatch):
    config = cases.small_config(
        dtype="float32", text_width=0, decoder_layers=layers_of_decoder, stop="hazard"
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(jnp.float32, cases.random_weights(rng, config))
    slots = jnp.float32(rng.normal(size=(B, N + 1, 8)))
    made, tabulate = [], selection.tabulate

    def watched(*given):
        made.append(tabulate(*given))
        return made[-1]

    monkeypatch.setattr(selection, "tabulate", watched)

    def run(steps):
        return cases.pick(params, config, slots, max_steps=steps)

    few = (N + 1) // 4
    expected = [run(steps).action for steps in (few, few + 1)]
    assert all(tables.score is not None for tables in made)
    monkeypatch.setattr(layers, "MANY_QUERIES", N)
    found = [run(steps).action for steps in (few, few + 1)]
    assert [tables.score is None for tables in made[2:]] == [True, False]
    assert [tables.row_logit is None for tables in made[2:]] == [True, layers_of_decoder > 1]
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("by_query", [True, False])
def test_attention_is_the_same_a_few_queries_at_a_time(by_query, monkeypatch):
    rng = np.random.default_rng(0)
    query, key, value = (jnp.array(rng.normal(size=(B, 2, t, 4))) for t in (9, 11, 11))
    mask = jnp.array(rng.random((B, 1, 9 if by_query else 1, 11)) < 0.7)

    def both():
        def run(*given):
            return (layers.attention(*given, mask) ** 2).sum()

        return jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2)))(query, key, value)

    whole = both()
    monkeypatch.setattr(layers, "MANY_QUERIES", 8)
    monkeypatch.setattr(layers, "QUERIES", {"default": 4})
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), both(), whole)
