"""Finite losses at extreme inputs, and equivariance."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import quick_or_slow

from stepprune_jax.policy import Inputs, Limits, Progress, select

SMALL = dict(dtype="float32", decoder_layers=1, min_tokens=0)
CONFIGS = {
    "parallel, aligned": cases.small_config(**SMALL),
    "straight through, softmax": cases.small_config(
        **SMALL, estimator="straight_through", stop="softmax"
    ),
    "hazard": cases.small_config(**SMALL, stop="hazard"),
    "literal": cases.small_literal(**SMALL),
}


@pytest.mark.parametrize("n", quick_or_slow([1, 4], [4]))
@pytest.mark.parametrize("name", quick_or_slow(CONFIGS, ["hazard", "literal"]))
def test_training_loss_and_gradient_are_finite_at_every_edge_with_t_max_n(name, n):
    config = dataclasses.replace(CONFIGS[name], max_steps=n)
    rng = np.random.default_rng(60)
    params = jax.tree.map(np.float32, cases.random_weights(rng, config))
    image = np.float32(rng.normal(size=(2, n, 8)))
    text = np.float32(rng.normal(size=(2, 2, 5)))
    functional = cases.weighted_sum(rng, image)

    @jax.jit
    def run(params, image, image_mask, stop_bias, text_gate):
        def loss(params, stop_bias):
            inputs = Inputs(image, text, image_mask)
            progress = Progress(text_gate=text_gate)
            key, lm_loss = jax.random.key(0), lambda x: functional(jnp.tanh(x))
            return cases.train_loss(params, config, key, inputs, lm_loss, progress, stop_bias)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, stop_bias)

    all_real = np.ones((2, n), bool)
    one_empty_row = all_real & np.array([[True], [False]])
    equal_tokens = np.broadcast_to(image[:1, :1], image.shape)
    zero_tokens, no_tokens, all_tokens = np.zeros_like(image), [0, 0], [n, n]
    edges = [  # image, mask, stop bias, text gate, expected counts or None
        (image, all_real, 0.0, 1.0, None),
        (equal_tokens, all_real, 0.0, 1.0, None),
        (zero_tokens, all_real, 0.0, 0.0, None),
        (image, all_real, 100.0, 1.0, no_tokens),  # Stop at the first step: alpha is 0.
        (image, all_real, -100.0, 1.0, all_tokens),  # Never stop: alpha is 1.
        (equal_tokens, all_real, 100.0, 0.0, no_tokens),
        (equal_tokens, all_real, -100.0, 0.0, all_tokens),
        (image, one_empty_row, 0.0, 1.0, None),  # A row without any token.
        (image, one_empty_row, -100.0, 1.0, [n, 0]),
        (image, ~all_real, 0.0, 1.0, no_tokens),  # A batch without any token.
    ]
    for image, mask, bias, text_gate, counts in edges:
        (loss, gated), gradients = run(params, image, mask, np.float32(bias), np.float32(text_gate))
        leaves = jax.tree.leaves((loss, gated.tokens, gated.alpha, gradients))
        assert all(np.isfinite(leaf).all() for leaf in leaves)
        if counts is not None:
            np.testing.assert_array_equal(gated.trajectory.count, counts)
        if counts is not None and config.soft_budget == "straight_through":
            np.testing.assert_array_equal(gated.alpha, mask * (np.array(counts) > 0)[:, None])


def test_permuting_the_image_tokens_permutes_the_selection():
    rng, config = np.random.default_rng(61), cases.small_config()
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
    is_kept = np.asarray(before.action) < 7
    original_index = np.append(order, 7)[np.asarray(after.action)]
    np.testing.assert_array_equal(original_index[is_kept], np.asarray(before.action)[is_kept])
    np.testing.assert_allclose(after.prob, np.asarray(before.prob)[..., order], atol=1e-10)
    np.testing.assert_allclose(after.stop_prob, before.stop_prob, atol=1e-10)
