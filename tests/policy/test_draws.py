"""Drawn tokens: their distribution, what their noise depends on, and what it does not."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax import policy
from stepprune_jax.policy import DecoderFns, Inputs, Limits, PolicyConfig

rank, choose, gate = map(jax.jit, (policy.rank, policy.choose, policy.gate))
select = jax.jit(policy.select, static_argnames="decoder")
N = 4
CONFIG = PolicyConfig(
    feature_width=8, text_width=0, num_heads=2, encoder_layers=1, temperature=2.0, draw=1.0
)
FIRST = jnp.array([0.0, 1.0, 2.0, -1.0, 0.0])  # the last slot is the stop
SECOND = jnp.array([3.0, 0.0, 1.0, 2.0, 0.0])


def logits_by_step(params, config, context, query, cache, step):
    rows = jnp.broadcast_to(jnp.where(step == 0, FIRST, SECOND), (query.shape[0], N + 1))
    return rows, cache


def start(params, config, memory, memory_mask, steps):
    return memory[:, 0], (), ()


GIVEN = DecoderFns(start, logits_by_step)


def test_tokens_are_drawn_from_the_pointers_distribution_without_replacement():
    rows = 40_000
    params = policy.init_policy(jax.random.key(0), CONFIG)
    inputs = Inputs(jnp.zeros((rows, N, 8)))
    keys = jax.random.split(jax.random.key(1), rows)
    how = {"decoder": GIVEN, "key": keys}
    found = select(params, CONFIG, inputs, Limits(budget=2), **how)
    first, second = np.asarray(found.action).T
    np.testing.assert_allclose(found.prob[0, 0], jax.nn.softmax(FIRST[:N] / 2), rtol=1e-5)
    share = np.bincount(first, minlength=N) / rows
    np.testing.assert_allclose(share, found.prob[0, 0], atol=0.01)
    for token in range(N):  # the second, given the first
        after = np.flatnonzero(first == token)
        share = np.bincount(second[after], minlength=N) / len(after)
        np.testing.assert_allclose(share, found.prob[after[0], 1], atol=0.025)
        assert share[token] == 0
    # Half the temperature: twice the logits.
    cold = dataclasses.replace(CONFIG, draw=0.5)
    found = select(params, cold, inputs, Limits(budget=1), **how)
    share = np.bincount(found.action[:, 0], minlength=N) / rows
    np.testing.assert_allclose(share, jax.nn.softmax(FIRST[:N]), atol=0.01)


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
    one = Inputs(inputs.image[2:3], inputs.text[2:3])
    np.testing.assert_array_equal(rank(params, config, one, key=keys[2]).choice[0], order[2])
    # Padding draws nothing.
    wide = jnp.pad(inputs.image, ((0, 0), (0, 9), (0, 0)), constant_values=np.nan)
    real = jnp.broadcast_to(jnp.arange(21) < 12, (5, 21))
    padded = Inputs(wide, inputs.text, real)
    found = rank(params, config, padded, Limits(max_steps=6), key=keys).choice
    np.testing.assert_array_equal(found, order)
    # Without a key, equal questions have equal tokens, wherever they stand in a batch.
    twins = jax.tree.map(lambda x: x[jnp.array([1, 3, 1])], inputs)
    choice = rank(params, config, twins).choice
    np.testing.assert_array_equal(choice[0], choice[2])
    np.testing.assert_array_equal(choice[0], rank(params, config, inputs).choice[1])


def test_a_budget_is_a_prefix_and_a_temperature_of_zero_takes_the_best(world):
    config, params, inputs = world
    key = jax.random.key(9)
    order = rank(params, config, inputs, key=key)
    for budget in (1, 4):
        picks = choose(params, config, inputs, Limits(budget=budget), key=key)
        np.testing.assert_array_equal(picks.action[:, :budget], order.choice[:, :budget])
        assert (picks.action[:, budget:] == 12).all()
    still = dataclasses.replace(config, draw=0.0)
    best = rank(params, still, inputs, key=key).choice
    np.testing.assert_array_equal(best, rank(params, still, inputs).choice)
    barely = dataclasses.replace(config, draw=1e-6)
    np.testing.assert_array_equal(best, rank(params, barely, inputs, key=key).choice)
    assert (best != order.choice).any()


def test_a_learned_stop_ends_drawn_histories(world):
    config, params, inputs = world
    drawn = select(params, config, inputs, key=jax.random.key(2))
    picks = choose(params, config, inputs, key=jax.random.key(2))
    np.testing.assert_array_equal(picks.action, drawn.action)
    np.testing.assert_array_equal(picks.count, drawn.count)


def test_the_gate_follows_the_best_tokens(world):
    config, params, inputs = world
    gated = gate(params, config, jax.random.key(0), inputs)
    still = dataclasses.replace(config, draw=0.0)
    most = rank(params, still, inputs, Limits(max_steps=6)).choice
    np.testing.assert_array_equal(gated.trajectory.choice, most)


@pytest.mark.parametrize("key", [jnp.zeros(2, jnp.uint32), jax.random.split(jax.random.key(0))])
def test_other_keys_are_named(world, key):
    config, params, inputs = world
    with pytest.raises(ValueError, match=r"(?s)key is .*, expected a jax.random.key"):
        rank(params, config, inputs, key=key)
