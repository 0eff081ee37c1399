"""A decoder of one's own goes through train_loss, select, prune and rank."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax import policy
from stepprune_jax.policy import DecoderFns, Inputs, Limits, PolicyConfig

CONFIG = PolicyConfig(
    feature_width=32, text_width=32, num_heads=2, mlp_ratio=2, encoder_layers=1, max_steps=8
)


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
def inputs():
    draw = jax.random.normal
    return Inputs(draw(jax.random.key(1), (8, 24, 32)), draw(jax.random.key(2), (8, 1, 32)))


def gradient(config, params, inputs, decoder=OWN):
    def loss(params, inputs):
        def read(tokens):
            return jnp.mean(jnp.tanh(tokens) @ jnp.cos(jnp.arange(32)))

        given = (params, config, jax.random.key(2), inputs, read)
        return policy.train_loss(*given, decoder=decoder)[0]

    return jax.jit(jax.grad(loss))(params, inputs)


def test_the_parallel_estimator_has_one_gradient_with_and_without_a_sequence(params, inputs):
    config = dataclasses.replace(CONFIG, estimator="parallel")
    loop = gradient(config, params, inputs)
    pass_ = gradient(config, params, inputs, DecoderFns(init, step, sequence))
    for name in ("key", "start"):
        found = loop["decoder"][name]
        assert float(jnp.abs(found).max()) > 1e-4
        np.testing.assert_allclose(found, pass_["decoder"][name], rtol=2e-3, atol=1e-6)


def test_the_feedback_carries_the_gradient_that_it_is_given_with(params, inputs):
    def soft(memory, prob, choice):
        return jnp.einsum("bm,bmd->bd", prob, memory)

    config = dataclasses.replace(CONFIG, estimator="parallel")
    hard = gradient(config, params, inputs)
    own = gradient(config, params, inputs, DecoderFns(init, step, sequence, soft))
    through = gradient(dataclasses.replace(CONFIG, estimator="straight_through"), params, inputs)
    starts = [tree["decoder"]["key"] for tree in (hard, own, through)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert float(jnp.abs(starts[one] - starts[other]).max()) > 1e-5


def test_prune_keeps_what_select_chooses(params, inputs):
    given = (params, CONFIG, inputs, Limits(budget=5))
    chosen = jax.jit(policy.select)(*given, decoder=OWN)
    pruned = policy.prune(*given, order="pick", decoder=OWN)
    np.testing.assert_array_equal(pruned.index[:, :5], chosen.action[:, :5])
    ranked = jax.jit(policy.rank)(*given, decoder=OWN)
    np.testing.assert_array_equal(ranked.choice, chosen.choice)
    np.testing.assert_allclose(ranked.margin, chosen.margin, rtol=1e-5, atol=1e-5)
