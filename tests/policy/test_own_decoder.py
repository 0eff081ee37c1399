"""Custom decoders and custom feedback."""

import dataclasses
import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax import policy
from stepprune_jax.policy import DecoderFns, Inputs, Limits
from stepprune_jax.policy.rollout import hard_feedback

pytestmark = pytest.mark.usefixtures("x64")

CONFIG = cases.small_config(width=4, feature_width=4, text_width=0, max_steps=5)


def init(params, config, memory, memory_mask, steps):
    """Returns a cache that is a dict: a running sum, a count, and a constant entry."""
    weights, b = params["decoder"], memory.shape[0]
    first = jnp.tanh(jnp.mean(memory, axis=1))[:, :3]
    start = jnp.broadcast_to(weights["start"], (b, memory.shape[-1]))
    cache = {"sum": jnp.zeros((b, 3), memory.dtype), "first": first, "count": jnp.int32(0)}
    return start, {"keys": memory @ weights["key"], "clock": jnp.arange(1.0, steps + 1)}, cache


def step(params, config, context, query, cache, step):
    """Points with the sum of the chosen queries; returns NaN after the last step."""
    clock = jnp.take(context["clock"], step) / (cache["count"] + 1)  # 1, as long as it counts steps
    total = cache["sum"] + clock * jnp.tanh(query @ params["decoder"]["query"])
    logits = jnp.einsum("bmc,bc->bm", context["keys"], total + cache["first"])
    return logits, cache | {"sum": total, "count": cache["count"] + 1}


def mixture(memory, prob, choice):
    """Returns the mean of the expected slot and the chosen slot."""
    return 0.5 * jnp.einsum("bmd,bm->bd", memory, prob) + 0.5 * hard_feedback(memory, prob, choice)


CUSTOM = DecoderFns(init, step)


@pytest.fixture
def params(rng):
    shapes = {"start": (4,), "query": (4, 3), "key": (4, 3)}
    decoder = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return cases.random_weights(rng, CONFIG) | {"decoder": decoder}


@pytest.fixture
def inputs(rng):
    return Inputs(rng.normal(size=(3, 8, 4)))


def test_the_loop_is_differentiated_through_decoder_and_feedback(rng, params):
    mask = np.array([[True] * 6, [True, False, True, True, False, True], [False] * 6])
    x = dict(decoder=params["decoder"], memory=rng.normal(size=(3, 7, 4)), bias=rng.normal(size=3))
    functional = cases.weighted_sum(rng, [np.zeros((3, 5, 6)), np.zeros((3, 5))])

    def loss(x):
        options = dict(decoder=CUSTOM, loop={"feedback": mixture}, mask=mask, max_steps=5)
        trajectory = cases.select(
            x, CONFIG, x["memory"], stop_bias=x["bias"], min_tokens=0, **options
        )
        return functional([trajectory.prob, trajectory.stop_prob])

    cases.assert_finite_differences(loss, x, rng)


def test_estimators_and_custom_feedback_have_different_gradients(rng, params, inputs):
    functional = cases.weighted_sum(rng, np.zeros((3, 5, 8)))

    def gradient(estimator, *functions):
        config, decoder = dataclasses.replace(CONFIG, estimator=estimator), DecoderFns(*functions)

        def loss(params):
            return functional(policy.select(params, config, inputs, decoder=decoder).prob)

        return jax.jit(jax.grad(loss))(params)["decoder"]["query"]

    hard, straight = (gradient(name, init, step) for name in ("parallel", "straight_through"))
    custom = gradient(
        "parallel", init, step, pytest.fail, mixture
    )  # no pass over the whole sequence
    for first, second in ((hard, custom), (hard, straight), (custom, straight)):
        assert float(jnp.abs(first - second).max()) > 1e-5


def test_all_selection_functions_accept_a_decoder(params, inputs):
    arguments = (params, CONFIG, inputs, Limits(budget=3))
    selected = jax.jit(policy.select)(*arguments, decoder=CUSTOM)
    pruned = policy.prune(*arguments, order="pick", decoder=CUSTOM)
    np.testing.assert_array_equal(pruned.index[:, :3], selected.action[:, :3])
    ranked = jax.jit(policy.rank)(*arguments, decoder=CUSTOM)
    np.testing.assert_array_equal(ranked.choice, selected.choice)
    np.testing.assert_allclose(ranked.margin, selected.margin, rtol=1e-9)
    train_loss = functools.partial(policy.train_loss, lm_loss_fn=jnp.sum, decoder=CUSTOM)
    loss, _ = jax.eval_shape(
        lambda params: train_loss(params, CONFIG, jax.random.key(0), inputs), params
    )
    assert loss.shape == ()
