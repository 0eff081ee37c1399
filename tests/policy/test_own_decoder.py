"""A decoder of one's own goes through gate, train_loss and prune, and is trained."""

import dataclasses

import jax
import jax.numpy as jnp
import marker_world
import numpy as np
import optax
import pytest

from stepprune_jax import policy
from stepprune_jax.policy import DecoderFns, Inputs, Limits, PolicyConfig

CONFIG = PolicyConfig(
    feature_width=32, text_width=32, num_heads=2, mlp_ratio=2, encoder_layers=1, max_steps=8
)
ROWS, TOKENS = 16, 24


def init(params, config, memory, memory_mask, steps):
    start = jnp.broadcast_to(params["decoder"]["start"], memory[:, 0].shape)
    return start, memory @ params["decoder"]["key"], ()


def step(params, config, context, query, cache, step):
    return jnp.einsum("bmd,bd->bm", context, query) / 6, cache


def sequence(params, config, context, queries, cache):
    return jnp.einsum("bmd,btd->btm", context, queries) / 6


OWN = DecoderFns(init, step)


@pytest.fixture(scope="module")
def params():
    key, start = jax.random.split(jax.random.key(5))
    drawn = policy.init_policy(jax.random.key(0), CONFIG)
    decoder = {"key": jnp.eye(32) + 0.1 * jax.random.normal(key, (32, 32))}
    return drawn | {"decoder": decoder | {"start": jax.random.normal(start, (32,))}}


@pytest.fixture(scope="module")
def batch():
    world = marker_world.make_world(32)
    return world, marker_world.draw_batch(jax.random.key(1), world, ROWS, TOKENS)


def objective(params, config, key, world, batch, decoder=OWN):
    def reader(tokens):
        return marker_world.reader_loss(world, tokens, jnp.ones(tokens.shape[:2], bool), batch)

    inputs = Inputs(batch.image, batch.text)
    return policy.train_loss(params, config, key, inputs, reader, decoder=decoder)[0]


def gradient(config, params, batch, decoder=OWN):
    def loss(params, batch):
        return objective(params, config, jax.random.key(2), *batch, decoder)

    return jax.jit(jax.grad(loss))(params, batch)


def test_the_parallel_estimator_has_one_gradient_with_and_without_a_sequence(params, batch):
    config = dataclasses.replace(CONFIG, estimator="parallel")
    loop = gradient(config, params, batch)
    pass_ = gradient(config, params, batch, DecoderFns(init, step, sequence))
    for name in ("key", "start"):
        found = loop["decoder"][name]
        assert float(jnp.abs(found).max()) > 1e-4
        np.testing.assert_allclose(found, pass_["decoder"][name], rtol=2e-3, atol=1e-6)


def test_the_feedback_carries_the_gradient_that_it_is_given_with(params, batch):
    def soft(memory, prob, choice):
        return jnp.einsum("bm,bmd->bd", prob, memory)

    config = dataclasses.replace(CONFIG, estimator="parallel")
    hard = gradient(config, params, batch)
    own = gradient(config, params, batch, DecoderFns(init, step, sequence, soft))
    through = gradient(dataclasses.replace(CONFIG, estimator="straight_through"), params, batch)
    starts = [tree["decoder"]["key"] for tree in (hard, own, through)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert float(jnp.abs(starts[one] - starts[other]).max()) > 1e-5


def test_a_few_steps_lower_the_loss(params, batch):
    world, _ = batch
    optimiser = optax.adam(3e-3)

    @jax.jit
    def step(params, state, key):
        draw, gate = jax.random.split(key)
        drawn = marker_world.draw_batch(draw, world, ROWS, TOKENS)
        value, grads = jax.value_and_grad(objective)(params, CONFIG, gate, world, drawn)
        updates, state = optimiser.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    keys, losses, state = jax.random.split(jax.random.key(3), 60), [], optimiser.init(params)
    before = params
    for key in keys:
        params, state, value = step(params, state, key)
        losses.append(float(value))
    assert np.mean(losses[-15:]) < 0.9 * np.mean(losses[:15])
    moved = jnp.abs(params["decoder"]["key"] - before["decoder"]["key"]).max()
    assert float(moved) > 1e-3


def test_prune_keeps_what_select_chooses(params, batch):
    given = (params, CONFIG, Inputs(batch[1].image, batch[1].text), Limits(budget=5))
    chosen = policy.select(*given, decoder=OWN)
    pruned = policy.prune(*given, order="pick", decoder=OWN)
    np.testing.assert_array_equal(pruned.index[:, :5], chosen.action[:, :5])
    ranked = policy.rank(*given, decoder=OWN)
    np.testing.assert_array_equal(ranked.choice, chosen.choice)
    np.testing.assert_allclose(ranked.margin, chosen.margin, rtol=1e-5, atol=1e-5)
