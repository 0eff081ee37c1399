"""Sampled tokens and their keys; `test_sampled_subsets.py` tests their distribution."""

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


def test_the_sample_of_a_row_depends_only_on_its_key(world):
    config, params, inputs = world
    keys = jax.random.split(jax.random.key(7), 5)
    order = rank(params, config, inputs, key=keys).choice
    # Other rows and padding do not change the sample.
    padded_image = jnp.pad(inputs.image[2:3], ((0, 0), (0, 9), (0, 0)), constant_values=np.nan)
    single_row = Inputs(padded_image, inputs.text[2:3], jnp.arange(21)[None] < 12)
    single_order = rank(params, config, single_row, Limits(max_steps=6), key=keys[2]).choice
    np.testing.assert_array_equal(single_order[0], order[2])
    # Without a key, equal questions get equal tokens at any position of a batch.
    repeated = jax.tree.map(lambda x: x[jnp.array([1, 3, 1])], inputs)
    choice = rank(params, config, repeated).choice
    np.testing.assert_array_equal(choice[0], choice[2])


def test_the_sampling_temperature_is_a_factor_on_the_temperature(world):
    config, params, inputs = world
    equivalent = dataclasses.replace(config, temperature=2.0, draw=0.5)
    actual, expected = (
        rank(params, c, inputs, key=jax.random.key(3)) for c in (equivalent, config)
    )
    np.testing.assert_array_equal(actual.choice, expected.choice)


def test_a_budget_keeps_a_prefix_of_the_order(world):
    config, params, inputs = world
    key = jax.random.key(9)
    order = rank(params, config, inputs, key=key)
    for budget in (1, 4):
        picks = choose(params, config, inputs, Limits(budget=budget), key=key)
        np.testing.assert_array_equal(picks.action[:, :budget], order.choice[:, :budget])
        assert (picks.action[:, budget:] == 12).all()


def test_a_learned_stop_ends_sampled_episodes(world):
    config, params, inputs = world
    trajectory = jax.jit(policy.select)(params, config, inputs, key=jax.random.key(2))
    picks = choose(params, config, inputs, key=jax.random.key(2))
    np.testing.assert_array_equal(picks.action, trajectory.action)
    np.testing.assert_array_equal(picks.count, trajectory.count)


def test_the_training_gate_follows_the_most_probable_tokens(world):
    config, params, inputs = world
    gated = gate(params, config, jax.random.key(0), inputs)
    greedy_config = dataclasses.replace(config, draw=0.0)
    best = rank(params, greedy_config, inputs, key=jax.random.key(9)).choice
    np.testing.assert_array_equal(gated.trajectory.choice, best)
    assert (rank(params, config, inputs, key=jax.random.key(9)).choice != best).any()


def test_keys_of_any_implementation_are_used_by_their_first_words(world):
    config, params, inputs = world
    key = jax.random.key(7, impl="threefry2x32")
    row_keys, subset_keys = jax.random.split(key, 5), jax.random.split(key, 2)
    raw_keys, rbg_data = map(
        jax.random.key_data, (row_keys, jax.random.split(jax.random.key(1, impl="rbg"), 5))
    )
    key_forms = (
        raw_keys,
        np.asarray(raw_keys),
        jax.random.wrap_key_data(rbg_data, impl="rbg"),
        rbg_data,
    )
    as_threefry = jax.random.wrap_key_data(rbg_data[:, :2], impl="threefry2x32")
    for keys, equivalent in zip(
        key_forms, (row_keys, row_keys, as_threefry, as_threefry), strict=True
    ):
        actual, expected = (rank(params, config, inputs, key=k).choice for k in (keys, equivalent))
        np.testing.assert_array_equal(actual, expected)
    sample = jax.jit(policy.sample)
    for keys, equivalent in (
        (jax.random.key_data(subset_keys), subset_keys),
        (key_forms[2][:2], as_threefry[:2]),
    ):
        actual, expected = (
            sample(params, config, inputs, Limits(budget=4), k) for k in (keys, equivalent)
        )
        np.testing.assert_array_equal(actual.picks.action, expected.picks.action)


@pytest.mark.parametrize("key", [jnp.zeros(3, jnp.uint32), jnp.zeros(2)])
def test_a_value_that_is_no_key_is_named(world, key):
    config, params, inputs = world
    message = r"(?s)key is .*, expected a jax.random.key or a jax.rando"
    with pytest.raises(ValueError, match=message):
        rank(params, config, inputs, key=key)


def test_keys_are_one_or_one_for_each_row(world):
    config, params, inputs = world
    for key in (jax.random.split(jax.random.key(0)), jnp.zeros((4, 2), jnp.uint32)):
        message = r"(?s)key is .*, expected one PRNG key, or one for ea"
        with pytest.raises(ValueError, match=message):
            rank(params, config, inputs, key=key)
