"""No NaN at the edges, equivariance, and what holds of every trajectory."""

import dataclasses
import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import quick_or_slow

from stepprune_jax.policy import Inputs, Limits, Progress, select

CONFIGS = {
    "parallel, aligned": cases.small_config(dtype="float32", min_tokens=0, batch_budget="own"),
    "straight through, softmax": cases.small_config(
        dtype="float32",
        min_tokens=0,
        batch_budget="own",
        estimator="straight_through",
        stop="softmax",
        decoder_layers=1,
    ),
    "hazard": cases.small_config(
        dtype="float32", min_tokens=0, batch_budget="own", stop="hazard", decoder_layers=1
    ),
    "literal": cases.small_literal(dtype="float32", decoder_layers=1),
}


@pytest.mark.parametrize("n", quick_or_slow([1, 4], [4]))
@pytest.mark.parametrize("name", quick_or_slow(CONFIGS, ["hazard", "literal"]))
def test_training_loss_and_gradient_are_finite_at_every_edge_with_t_max_n(name, n):
    config = dataclasses.replace(CONFIGS[name], max_steps=n, encoder_layers=1)
    rng = np.random.default_rng(60)
    params = jax.tree.map(np.float32, cases.random_weights(rng, config))
    image = np.float32(rng.normal(size=(2, n, 8)))
    text = np.float32(rng.normal(size=(2, 2, 5)))
    weigh = cases.weighted_sum(rng, image)

    @jax.jit
    def run(params, image, image_mask, stop_bias, text_gate):
        def loss(params, stop_bias):
            given = Inputs(image, text, image_mask)
            progress = Progress(text_gate=text_gate)
            key, read = jax.random.key(0), lambda x: weigh(jnp.tanh(x))
            return cases.train_loss(params, config, key, given, read, progress, stop_bias)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, stop_bias)

    every = np.ones((2, n), bool)
    masked = every & np.array([[True], [False]])
    tied = np.broadcast_to(image[:1, :1], image.shape)
    zero, none, all_tokens = np.zeros_like(image), [0, 0], [n, n]
    edges = [  # image, mask, stop bias, text gate, counts where they are certain
        (image, every, 0.0, 1.0, None),
        (tied, every, 0.0, 1.0, None),
        (zero, every, 0.0, 0.0, None),
        (image, every, 100.0, 1.0, none),  # Stop at the first step: alpha is 0.
        (image, every, -100.0, 1.0, all_tokens),  # Never stop: alpha is 1.
        (tied, every, 100.0, 0.0, none),
        (tied, every, -100.0, 0.0, all_tokens),
        (image, masked, 0.0, 1.0, None),  # A row without any token.
        (image, masked, -100.0, 1.0, [n, 0]),
        (image, ~every, 0.0, 1.0, none),  # A batch without any token.
    ]
    for image, mask, bias, text_gate, counts in edges:
        (loss, gated), gradients = run(params, image, mask, np.float32(bias), np.float32(text_gate))
        leaves = jax.tree.leaves((loss, gated.tokens, gated.alpha, gradients))
        assert all(np.isfinite(leaf).all() for leaf in leaves)
        if counts is not None:
            np.testing.assert_array_equal(gated.trajectory.count, counts)
        if counts is not None and config.soft_budget == "straight_through":
            np.testing.assert_array_equal(gated.alpha, mask * (np.array(counts) > 0)[:, None])


@pytest.mark.parametrize("estimator", ["straight_through", "parallel"])
def test_permuting_the_image_tokens_permutes_the_selection(estimator):
    rng, config = np.random.default_rng(61), cases.small_config(estimator=estimator)
    params = cases.random_weights(rng, config)
    image, text = rng.normal(size=(3, 7, 8)), rng.normal(size=(3, 2, 5))
    image_mask = cases.random_mask(rng, 3, 7, 0.8)
    order = rng.permutation(7)  # New position p holds old token order[p].

    @jax.jit
    def run(image, image_mask):
        return select(params, config, Inputs(image, text, image_mask), Limits(max_steps=5))

    with jax.enable_x64(True):
        before, after = run(image, image_mask), run(image[:, order], image_mask[:, order])
    np.testing.assert_array_equal(after.count, before.count)
    np.testing.assert_array_equal(after.selected, np.asarray(before.selected)[:, order])
    kept = np.asarray(before.action) < 7
    renamed = np.append(order, 7)[np.asarray(after.action)]
    np.testing.assert_array_equal(renamed[kept], np.asarray(before.action)[kept])
    np.testing.assert_allclose(after.prob, np.asarray(before.prob)[..., order], atol=1e-10)
    np.testing.assert_allclose(after.stop_prob, before.stop_prob, atol=1e-10)


@functools.cache
def compiled(stop):
    config = cases.small_config(dtype="float32", width=4, text_width=0, stop=stop)

    @jax.jit
    def run(params, slots, mask, least, most, bias):
        arguments = dict(mask=mask, max_steps=5, min_tokens=least, max_tokens=most, stop_bias=bias)
        both = (
            cases.select(params, config, slots, **arguments),
            cases.pick(params, config, slots, **arguments),
        )
        return both

    return config, run


@pytest.mark.parametrize("stop", quick_or_slow(["aligned", "softmax", "hazard"], ["hazard"]))
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    bounds=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted), min_size=2, max_size=2
    ),
    mask=st.lists(st.booleans(), min_size=12, max_size=12),
    bias=st.floats(-30, 30, width=32),
    scale=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
)
def test_what_holds_of_every_trajectory(stop, seed, bounds, mask, bias, scale):
    """No token twice, none of the padding; probabilities sum to one while tokens are left."""
    config, run = compiled(stop)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(np.float32, cases.random_weights(rng, config))
    slots = np.float32(scale * rng.normal(size=(2, 7, 4)))
    mask = np.array(mask).reshape(2, 6)
    least, most = np.array(bounds, np.int32).T
    trajectory, picks = jax.tree.map(np.asarray, run(params, slots, mask, least, most, bias))
    for name in ("action", "count", "selected"):
        np.testing.assert_array_equal(getattr(picks, name), getattr(trajectory, name))
    for row in range(2):
        kept = trajectory.action[row][trajectory.action[row] < 6]
        assert (
            len(set(kept)) == len(kept) == trajectory.count[row] == trajectory.selected[row].sum()
        )
        assert mask[row][kept].all()
        assert set(kept) == set(np.flatnonzero(trajectory.selected[row]))
        real = mask[row].sum()
        assert min(least[row], real) <= trajectory.count[row] <= min(most[row], real)
        pointed = trajectory.choice[row][: min(5, real)]
        assert len(set(pointed)) == len(pointed)
        total = trajectory.prob[row].sum(-1) + trajectory.stop_prob[row]
        np.testing.assert_allclose(total, 1, rtol=1e-5)
        assert (trajectory.prob[row][:, ~mask[row]] == 0).all()
        for t in range(1, min(5, real)):
            assert (trajectory.prob[row][t][trajectory.choice[row][:t]] == 0).all()
    assert np.isfinite(trajectory.log_prob).all() and np.isfinite(trajectory.log_continue).all()
