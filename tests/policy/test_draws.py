"""Drawn tokens: what their noise depends on, and what it does not.

Their distribution: `test_sampled_sets.py`.
"""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax import policy
from stepprune_jax.policy import Inputs, Limits

rank, choose, gate = map(jax.jit, (policy.rank, policy.choose, policy.gate))


@pytest.fixture(scope="module")
def world():
    rng = np.random.default_rng(3)
    config = cases.small_config(dtype="float32", stop="hazard", draw=1.0)
    params = jax.tree.map(jnp.float32, cases.random_weights(rng, config))
    image = jnp.float32(rng.normal(size=(5, 12, 8)))
    return config, params, Inputs(image, jnp.float32(rng.normal(size=(5, 3, 5))))


def test_the_draw_of_a_row_depends_on_its_key_alone(world):
    config, params, inputs = world
    keys = jax.random.split(jax.random.key(7), 5)
    order = rank(params, config, inputs, key=keys).choice
    # Neither other rows nor padding draw anything.
    wide = jnp.pad(inputs.image[2:3], ((0, 0), (0, 9), (0, 0)), constant_values=np.nan)
    alone = Inputs(wide, inputs.text[2:3], jnp.arange(21)[None] < 12)
    found = rank(params, config, alone, Limits(max_steps=6), key=keys[2]).choice
    np.testing.assert_array_equal(found[0], order[2])
    # Without a key, equal questions have equal tokens, wherever they stand in a batch.
    twins = jax.tree.map(lambda x: x[jnp.array([1, 3, 1])], inputs)
    choice = rank(params, config, twins).choice
    np.testing.assert_array_equal(choice[0], choice[2])


def test_draw_is_a_factor_on_the_temperature(world):
    config, params, inputs = world
    same = dataclasses.replace(config, temperature=2.0, draw=0.5)
    found, expected = (rank(params, c, inputs, key=jax.random.key(3)) for c in (same, config))
    np.testing.assert_array_equal(found.choice, expected.choice)


def test_a_budget_is_a_prefix(world):
    config, params, inputs = world
    key = jax.random.key(9)
    order = rank(params, config, inputs, key=key)
    for budget in (1, 4):
        picks = choose(params, config, inputs, Limits(budget=budget), key=key)
        np.testing.assert_array_equal(picks.action[:, :budget], order.choice[:, :budget])
        assert (picks.action[:, budget:] == 12).all()


def test_a_learned_stop_ends_drawn_histories(world):
    config, params, inputs = world
    drawn = jax.jit(policy.select)(params, config, inputs, key=jax.random.key(2))
    picks = choose(params, config, inputs, key=jax.random.key(2))
    np.testing.assert_array_equal(picks.action, drawn.action)
    np.testing.assert_array_equal(picks.count, drawn.count)


def test_the_gate_follows_the_best_tokens(world):
    config, params, inputs = world
    gated = gate(params, config, jax.random.key(0), inputs)
    still = dataclasses.replace(config, draw=0.0)
    best = rank(params, still, inputs, key=jax.random.key(9)).choice
    np.testing.assert_array_equal(gated.trajectory.choice, best)
    assert (rank(params, config, inputs, key=jax.random.key(9)).choice != best).any()


def test_keys_of_any_implementation_are_those_of_their_first_words(world):
    config, params, inputs = world
    key = jax.random.key(7, impl="threefry2x32")
    rows, few = jax.random.split(key, 5), jax.random.split(key, 2)
    raw, wide = map(jax.random.key_data, (rows, jax.random.split(jax.random.key(1, impl="rbg"), 5)))
    given = (raw, np.asarray(raw), jax.random.wrap_key_data(wide, impl="rbg"), wide)
    as_threefry = jax.random.wrap_key_data(wide[:, :2], impl="threefry2x32")
    for keys, same in zip(given, (rows, rows, as_threefry, as_threefry), strict=True):
        found, expected = (rank(params, config, inputs, key=k).choice for k in (keys, same))
        np.testing.assert_array_equal(found, expected)
    drawn = jax.jit(policy.sample)
    for keys, same in ((jax.random.key_data(few), few), (given[2][:2], as_threefry[:2])):
        found, expected = (drawn(params, config, inputs, Limits(budget=4), k) for k in (keys, same))
        np.testing.assert_array_equal(found.picks.action, expected.picks.action)


@pytest.mark.parametrize("key", [jnp.zeros(3, jnp.uint32), jnp.zeros(2)])
def test_what_is_no_key_is_named(world, key):
    config, params, inputs = world
    with pytest.raises(
        ValueError, match=r"(?s)key is .*, expected a jax.random.key or a jax.rando"
    ):
        rank(params, config, inputs, key=key)


def test_keys_are_one_or_one_for_each_row(world):
    config, params, inputs = world
    for key in (jax.random.split(jax.random.key(0)), jnp.zeros((4, 2), jnp.uint32)):
        with pytest.raises(
            ValueError, match=r"(?s)key is .*, expected one PRNG key, or one for ea"
        ):
            rank(params, config, inputs, key=key)
