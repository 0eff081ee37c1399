"""Gradients through the loop: a written-out surrogate, a plain loop, the two estimators."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import surrogate
from quick import quick_or_slow

from stepprune_jax.policy import DecoderFns, Inputs, objective
from stepprune_jax.policy.rollout import hard_feedback, straight_through

MASK = np.array([[True] * 6, [True, False, True, True, False, True], [False] * 6])
LIMITS = dict(min_tokens=np.array([1, 0, 0]), max_tokens=np.array([5, 2, 0]))


@pytest.fixture
def rng():
    return np.random.default_rng(40)


def make_inputs(rng, config, dtype=np.float64):
    tree = dict(
        params=cases.random_weights(rng, config),
        memory=rng.normal(size=(3, 7, config.policy_width)),
        stop_bias=rng.normal(size=3),
    )
    return jax.tree.map(dtype, tree)


def make_loss(rng, config, chooser, **arguments):
    """A random functional of prob, stop_prob and possible log-probabilities of an episode."""
    weigh = cases.weighted_sum(rng, [np.zeros((3, 5, 6)), np.zeros((3, 5)), np.zeros((3, 5, 6))])

    def loss(x):
        run = chooser(
            x["params"],
            config,
            x["memory"],
            mask=MASK,
            max_steps=5,
            stop_bias=x["stop_bias"],
            **LIMITS,
            **arguments,
        )
        return weigh([run.prob, run.stop_prob, jnp.where(run.prob > 0, run.log_prob, 0)])

    return loss


def value_and_gradient(loss, x):
    return jax.jit(jax.value_and_grad(loss))(x)


@pytest.mark.parametrize(
    ("fields", "feedback"),
    [
        pytest.param(dict(decoder_layers=2), straight_through, marks=pytest.mark.slow),
        (dict(decoder_layers=1, stop="softmax", temperature=0.7), straight_through),
        pytest.param(dict(decoder_layers=1), hard_feedback, marks=pytest.mark.slow),
    ],
    ids=["2-aligned-straight-through", "1-softmax-straight-through", "1-aligned-hard"],
)
def test_select_has_the_gradient_of_the_loop_written_out(rng, x64, fields, feedback):
    config = cases.small_config(width=4, **fields)
    x = make_inputs(rng, config)
    weights = [rng.normal(size=(3, 3, 6)), rng.normal(size=(3, 3))]
    least, most = np.array([1, 0, 2]), np.array([3, 1, 2])

    def by_package(x):
        run = cases.select(
            x["params"],
            config,
            x["memory"],
            max_steps=3,
            stop_bias=x["stop_bias"],
            loop={"feedback": feedback},
            min_tokens=least,
            max_tokens=most,
        )
        value = jnp.sum(weights[0] * run.prob) + jnp.sum(weights[1] * run.stop_prob)
        return value, run.choice

    (value, choice), found = jax.jit(jax.value_and_grad(by_package, has_aux=True))(x)

    def by_hand(x):
        def row(memory, stop_bias, *given):
            return surrogate.episode(
                x["params"],
                config,
                memory,
                stop_bias,
                *given,
                straight_through=feedback is straight_through,
            )

        prob, stop_prob = jax.vmap(row)(x["memory"], x["stop_bias"], choice, least, most)
        return jnp.sum(weights[0] * prob) + jnp.sum(weights[1] * stop_prob)

    expected_value, expected = value_and_gradient(by_hand, x)
    np.testing.assert_allclose(value, expected_value, rtol=1e-12)
    cases.assert_trees_close(found, expected, 1e-10)


@pytest.mark.parametrize(
    ("feedback", "dtype", "relative"),
    [
        pytest.param(straight_through, "float32", 1e-4, marks=pytest.mark.slow),
        (straight_through, "float64", 1e-10),
        pytest.param(hard_feedback, "float64", 1e-10, marks=pytest.mark.slow),
    ],
)
def test_the_loop_in_blocks_has_the_gradient_of_a_plain_loop(rng, dtype, relative, feedback):
    config = cases.small_config(decoder_layers=2, num_heads=4, dtype=dtype)
    with jax.enable_x64(dtype == "float64"):
        x = make_inputs(rng, config, np.dtype(dtype).type)
        same = np.random.default_rng
        blocks = make_loss(same(0), config, cases.select, loop={"feedback": feedback})
        plain = make_loss(same(0), config, cases.select_plainly, feedback=feedback)
        value, found = value_and_gradient(blocks, x)
        expected_value, expected = value_and_gradient(plain, x)
        np.testing.assert_allclose(value, expected_value, rtol=relative)
        cases.assert_trees_close(found, expected, relative)
        # Neither is empty: straight-through is worth comparing because all of it flows.
        assert np.abs(found["params"]["decoder"]["start"]).max() > 1e-3
        assert np.abs(found["memory"][0]).max() > 1e-3


@pytest.mark.parametrize("layers", quick_or_slow([1, 3], [1]))
def test_select_parallel_is_select_with_the_feedback_gradient_cut(rng, layers):
    config = cases.small_config(decoder_layers=layers, dtype="float32")
    x = make_inputs(rng, config, np.float32)
    parallel = make_loss(np.random.default_rng(0), config, cases.select_parallel)
    hard = {"feedback": hard_feedback}
    cut = make_loss(np.random.default_rng(0), config, cases.select, loop=hard)
    value, found = value_and_gradient(parallel, x)
    expected_value, expected = value_and_gradient(cut, x)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    cases.assert_trees_close(found, expected, 1e-5)


@pytest.mark.parametrize(
    "estimator", quick_or_slow(["straight_through", "parallel"], ["straight_through"])
)
def test_train_loss_has_the_gradient_of_the_plain_loop(rng, x64, monkeypatch, estimator):
    """Parallel is held against the plain loop with feedback cut, straight-through against it as is.

    Both through the objective, budgets and text included.
    """
    config = cases.small_config(estimator=estimator, encoder_layers=1, max_steps=4)
    inputs = Inputs(rng.normal(size=(4, 6, 8)), rng.normal(size=(4, 2, 5)))
    x = dict(params=cases.random_weights(rng, config), stop_bias=np.float64(0.2))
    weigh = cases.weighted_sum(rng, inputs.image)

    def loss(x):
        key, read = jax.random.key(0), lambda y: weigh(jnp.tanh(y))
        return cases.train_loss(x["params"], config, key, inputs, read, stop_bias=x["stop_bias"])[0]

    _, found = value_and_gradient(loss, x)
    feedback = straight_through if estimator == "straight_through" else hard_feedback

    def plain(params, config, episode, decoder):
        return cases.plain_loop(params, config, episode, decoder, feedback)

    monkeypatch.setattr(objective, "roll_out", plain)
    # A new function, or the program compiled above would be found again.
    _, expected = value_and_gradient(lambda x: loss(x), x)
    cases.assert_trees_close(found, expected, 1e-9)


def mixture(memory, prob, choice):
    """A custom feedback: the expected slot, half of it detached by the hard choice."""
    return 0.5 * jnp.einsum("bmd,bm->bd", memory, prob) + 0.5 * hard_feedback(memory, prob, choice)


def tally_init(params, config, memory, memory_mask, steps):
    """A custom decoder whose cache is a dict: a running sum, a count, and a part nobody writes."""
    b = memory.shape[0]
    first = jnp.tanh(jnp.mean(memory, axis=1))[:, :3]
    start = jnp.broadcast_to(params["start"], (b, memory.shape[-1]))
    cache = {"sum": jnp.zeros((b, 3), memory.dtype), "first": first, "count": jnp.int32(0)}
    return start, {"keys": memory @ params["key"], "clock": jnp.arange(1.0, steps + 1)}, cache


def tally_step(params, config, context, query, cache, step):
    """Sums what was chosen so far and points with the sum; NaN after the last step."""
    clock = jnp.take(context["clock"], step) / (cache["count"] + 1)  # 1, as long as it counts steps
    total = cache["sum"] + clock * jnp.tanh(query @ params["query"])
    logits = jnp.einsum("bmc,bc->bm", context["keys"], total + cache["first"])
    return logits, cache | {"sum": total, "count": cache["count"] + 1}


def test_a_custom_decoder_and_feedback_go_through_the_loop(rng, x64):
    config = cases.small_config(width=4)
    x = dict(
        params=dict(
            start=rng.normal(size=4), query=rng.normal(size=(4, 3)), key=rng.normal(size=(4, 3))
        ),
        memory=rng.normal(size=(3, 7, 4)),
        stop_bias=rng.normal(size=3),
    )
    same, decoder = np.random.default_rng, DecoderFns(tally_init, tally_step)
    loop = {"feedback": mixture}
    blocks = make_loss(same(0), config, cases.select, decoder=decoder, loop=loop)
    plain = make_loss(same(0), config, cases.select_plainly, decoder=decoder, feedback=mixture)
    _, found = value_and_gradient(blocks, x)
    _, expected = value_and_gradient(plain, x)
    cases.assert_trees_close(found, expected, 1e-10)
    # Nothing is straight-through here: the derivative is that of the function itself.
    cases.assert_finite_differences(blocks, x, rng)
