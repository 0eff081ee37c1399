"""Values worked out by hand (or in float64 outside this project) for single equations."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax import policy
from stepprune_jax.policy import DecoderFns, budget, noise, scores

SCORES = jnp.array([2.0, 1.0, 0.5, 0.0, -1.0])
soft_topk = jax.jit(policy.soft_topk)

SOFT_TOPK = [
    (2.0, 2.0, [0.683008, 0.478348, 0.372538, 0.290133, 0.175974]),
    (1.0, 2.0, [0.834323, 0.549642, 0.336694, 0.204215, 0.075127]),
    (0.5, 2.0, [0.954137, 0.661119, 0.271392, 0.099840, 0.013512]),
    (0.1, 2.0, [0.999998, 0.958820, 0.040906, 0.000276, 0.000000]),
    (1.0, 1.7, [0.787387, 0.432570, 0.262367, 0.159134, 0.058542]),
]


@pytest.mark.parametrize(("temperature", "k", "alpha"), SOFT_TOPK)
def test_soft_topk_values(temperature, k, alpha):
    np.testing.assert_allclose(soft_topk(SCORES, k, temperature), alpha, atol=2e-6)


@functools.partial(jax.jit, static_argnames=("config", "max_steps"))
def _select(config, memory, max_steps):
    """Selects with PtrAttn(q, M) = M q / sqrt(2), from q_1 = [1, .5], without any weights."""

    def init(params, config, memory, memory_mask, steps):
        return jnp.array([[1.0, 0.5]]), memory, ()

    def step(params, config, context, query, cache, t):
        return jnp.einsum("bmd,bd->bm", context, query) / jnp.sqrt(2.0), cache

    decoder = DecoderFns(init, step)
    return cases.select({}, config, memory, max_steps=max_steps, decoder=decoder)


def test_pointer_loop():
    memory = jnp.array([[[1, 0], [0.9, 0.3], [0, 1], [-0.5, 0.2], [-0.2, -0.4]]])
    config = cases.plain_config(
        feature_width=2, text_width=0, num_heads=1, stop="softmax", stop_bias=0.0, min_tokens=0
    )
    t = _select(config, memory, max_steps=4)
    np.testing.assert_array_equal(t.action, [[1, 0, 2, 3]])
    np.testing.assert_array_equal(t.count, [4])
    rows = [
        [0.287243, 0.297581, 0.201699, 0.106738],
        [0.402585, 0, 0.263392, 0.161699],
        [0, 0, 0.389058, 0.273192],
        [0, 0, 0, 0.604503],
    ]
    np.testing.assert_allclose(t.prob[0], rows, atol=1e-6)
    np.testing.assert_allclose(t.stop_prob[0], [0.106738, 0.172324, 0.337750, 0.395497], atol=1e-6)
    alive = scores.alive_probability(t.stop_prob)[0]
    np.testing.assert_allclose(alive, [1, 0.893262, 0.739331, 0.489622], atol=1e-6)
    found = scores.soft_scores(t.prob, t.stop_prob, decay=0.9)[0]
    np.testing.assert_allclose(found, [0.549806, 0.267823, 0.581795, 0.554495], atol=1e-6)
    np.testing.assert_allclose(scores.expected_count(t.stop_prob), [2.418192], atol=1e-6)


def test_aligned_stop_is_half_where_stop_and_best_token_tie():
    # One step, logits [.6, .2 | stop .6] / sqrt(2): margin 0, sigmoid 1/2; a tie keeps the token.
    memory = jnp.array([[[0.6, 0], [0.2, 0], [0.6, 0]]])
    config = cases.plain_config(
        feature_width=2, text_width=0, num_heads=1, stop="aligned", stop_bias=0.0, min_tokens=0
    )
    t = _select(config, memory, max_steps=1)
    np.testing.assert_allclose(t.stop_prob, [[0.5]])
    np.testing.assert_array_equal(t.action, [[0]])
    # p(i) = (1 - p_stop) softmax_i: gap .4 / sqrt(2) gives odds e^.282843, halves .285121 + .214879
    np.testing.assert_allclose(t.prob[0, 0], [0.285121, 0.214879], atol=2e-6)


def test_running_count_starts_at_the_first_batch():
    first = budget.update_running_count(jnp.array(0.0), jnp.array([4, 8]))
    np.testing.assert_allclose(first, 6.0)
    second = budget.update_running_count(first, jnp.array([10, 12]))
    np.testing.assert_allclose(second, 6.5, rtol=1e-6)  # .9 * 6 + .1 * 11


def test_feature_statistics_merge_exactly():
    x = jax.random.normal(jax.random.key(0), (6, 5, 3)) * jnp.array([1.0, 20, 0.1]) + 4
    mask = jax.random.bernoulli(jax.random.key(1), 0.7, (6, 5))
    stats = policy.FeatureStats.start(3)
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        stats = policy.update_stats(stats, x[rows], mask[rows])
    real = np.asarray(x)[np.asarray(mask)]
    np.testing.assert_allclose(stats.mean, real.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats.var, real.var(0), rtol=1e-4)
    assert int(stats.count) == len(real)
    z = noise.standardise(x, stats)
    np.testing.assert_allclose(noise.restore(z, stats), x, rtol=1e-4, atol=1e-4)
