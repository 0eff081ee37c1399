"""Scores, SoftTopK, noise gate, denoiser and gather against `oracle.py`; precision of `select`."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from stepprune_jax.policy import Inputs, Picks, choose, gather, noise_gate, select, soft_topk
from stepprune_jax.policy.base import Limits
from stepprune_jax.policy.noise import denoise
from stepprune_jax.policy.scores import (
    alive_probability,
    expected_count,
    soft_scores,
)


def close(actual, expected, rtol=1e-9, **arguments):
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=1e-9, **arguments)


@pytest.fixture
def rng():
    return np.random.default_rng(20)


def random_rows(rng, b, t, n):
    """Probabilities of random pointer rows, some stops impossible and some certain."""
    logits = rng.normal(0, 2, (b, t, n + 1))
    full = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    stop = full[..., -1] * (rng.random((b, t)) > 0.3)
    stop = np.where(rng.random((b, t)) < 0.1, 1.0, stop)
    share = full[..., :-1] / full[..., :-1].sum(-1, keepdims=True)
    return (1 - stop)[..., None] * share, stop


def test_alive_probability_equals_the_product_and_expected_count_the_enumeration(rng, x64):
    _, stop_prob = random_rows(rng, 6, 5, 3)
    alive, count = alive_probability(stop_prob), expected_count(stop_prob)
    for row in range(6):
        close(alive[row], oracle.alive_probability(stop_prob[row]))
        close(count[row], oracle.expected_count(stop_prob[row]))


@pytest.mark.parametrize("aggregation", ["discounted", "alive", "uniform", "last"])
def test_soft_scores_and_their_logarithms_equal_the_loops(rng, x64, aggregation):
    prob, stop_prob = random_rows(rng, 4, 6, 5)
    prob[..., 2] = 0.0  # Never pointed at.
    prob[1, 4:], stop_prob[1, 4:] = 0.0, 1.0  # behind its bound
    prob[:, 3], stop_prob[:, 3] = 0.1, 0.5  # certain stops elsewhere
    arguments = dict(decay=0.8, aggregation=aggregation)
    linear = soft_scores(prob, stop_prob, **arguments)
    logs = np.asarray(cases.log_scores(prob, stop_prob, **arguments))
    for row in range(4):
        close(linear[row], oracle.soft_scores(prob[row], stop_prob[row], 0.8, aggregation))
        # An impossible event scores -1e9, near enough.
        expected = oracle.log_scores(prob[row], stop_prob[row], 0.8, aggregation)
        close(logs[row], expected, rtol=1e-8)


def test_soft_topk_equals_bisection_on_ties_padding_and_any_scale(rng, x64):
    b, n = 150, 9
    scores = rng.normal(size=(b, n)) * 10.0 ** rng.uniform(-2, 2, (b, 1))
    scores[:50] = np.round(scores[:50])  # Ties.
    where = cases.random_mask(rng, b, n, 0.8)
    where[0] = False
    count = where.sum(1)
    k = rng.uniform(0, count)
    k[::7], k[1::7], k[2::7] = 0, count[1::7], np.round(k[2::7])
    temperature = 10.0 ** rng.uniform(-1, 1, b)
    alpha = jax.jit(soft_topk)(scores, k, temperature, where=where)
    for row in range(b):
        expected = oracle.soft_topk(scores[row], k[row], temperature[row], where[row])
        close(alpha[row], expected, err_msg=f"row {row}")
    close(np.sum(alpha, axis=1), k)


def test_noise_gate_and_denoiser_equal_the_loops(rng, x64):
    config = cases.small_config()
    params = cases.random_weights(rng, config)
    x, noise = rng.standard_normal((2, 3, 5, 8))
    alpha = rng.random((3, 5))
    alpha[0, :2] = 0, 1
    gated = noise_gate(None, x, alpha, noise=noise)
    denoised = denoise(params, config, x)
    for row in range(3):
        close(gated[row], oracle.noise_gate(x[row], alpha[row], noise[row]))
        close(denoised[row], oracle.denoise(params, x[row]))
    np.testing.assert_array_equal(gated[0, 1], x[0, 1])
    np.testing.assert_array_equal(gated[0, 0], noise[0, 0])


@pytest.mark.parametrize("order", ["raster", "pick"])
def test_gather_equals_the_loop_for_every_capacity_that_fits_and_one_that_does_not(rng, order):
    b, n, steps = 6, 7, 5
    count = np.array([0, 1, 2, 3, 4, 5], np.int32)
    action = np.stack([rng.permutation(n)[:steps] for _ in range(b)]).astype(np.int32)
    action = np.where(np.arange(steps) < count[:, None], action, n)
    selected = (action[:, :, None] == np.arange(n)).any(1)
    features = rng.standard_normal((b, n, 3)).astype(np.float32)
    picks = Picks(*map(jnp.asarray, (action, count, selected)))
    for capacity in range(2, n + 1):
        # Traced, a row over capacity keeps its first picks; eagerly it is an error.
        pruned = jax.jit(gather, static_argnames=("capacity", "order"))(
            picks, features, capacity=capacity, order=order
        )
        for row in range(b):
            expected = oracle.gather_row(action[row], features[row], capacity, order)
            for mine, theirs in zip(pruned[:3], expected, strict=True):
                np.testing.assert_array_equal(mine[row], theirs)
        np.testing.assert_array_equal(pruned.count, np.minimum(count, capacity))
    with pytest.raises(ValueError, match="capacity"):
        gather(picks, features, 4)


def _gap(row, config):
    """How far a row is from choosing otherwise: the least lead of a choice, or of the stop."""
    lead = []
    for t in range(len(row.action)):
        left = np.sort(row.log_prob[t][row.prob[t] > 0])
        lead += [config.temperature * (left[-1] - left[-2])] if len(left) > 1 else []
        lead += [abs(row.margin[t])]
    return min(lead)


@functools.partial(jax.jit, static_argnames="config")
def _choose(params, config, image, stop_bias):
    given = (params, config, Inputs(image), Limits(max_steps=4, min_tokens=0))
    return select(*given, stop_bias=stop_bias), choose(*given, stop_bias=stop_bias)


@pytest.mark.parametrize(
    ("dtype", "feature_dtype", "separation"),
    [
        ("float32", jnp.float32, 1e-3),
        ("float32", jnp.bfloat16, 1e-3),
        ("bfloat16", jnp.bfloat16, 0.25),
    ],
)
@pytest.mark.slow
def test_lower_precision_makes_the_choices_of_float64_on_separated_scores(
    rng, dtype, feature_dtype, separation
):
    config = cases.small_config(text_width=0, decoder_layers=2, dtype=dtype)
    checked = 0
    for _ in range(60):
        params = cases.random_weights(rng, config, scale=0.3)
        params["decoder"]["pointer"]["query"]["kernel"] *= 6.0
        image = jnp.asarray(rng.standard_normal((1, 7, 8)), feature_dtype)
        stop_bias = rng.normal(0.0, 2.0)
        exact = oracle.encode_row(
            params, config, np.asarray(image[0], np.float64), None, [True] * 7, None, 1.0
        )
        expected = oracle.select_row(
            params,
            config,
            oracle.memory_row(params, exact),
            [True] * 7,
            steps=4,
            min_tokens=0,
            max_tokens=4,
            stop_bias=stop_bias,
        )
        if _gap(expected, config) < separation:
            continue
        checked += 1
        narrow = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
        run, picks = _choose(narrow, config, image, np.float32(stop_bias))
        assert run.prob.dtype == run.stop_prob.dtype == jnp.float32
        for result in (run, picks):
            np.testing.assert_array_equal(result.action[0], expected.action)
            np.testing.assert_array_equal(result.selected[0], expected.selected)
        np.testing.assert_array_equal(run.choice[0], expected.choice)
    assert checked >= 10


def test_bfloat16_features_choose_exactly_what_their_float32_copies_choose(rng):
    config = cases.small_config(text_width=0, dtype="float32")
    params = jax.tree.map(np.float32, cases.random_weights(rng, config))
    image = jnp.asarray(rng.standard_normal((4, 7, 8)), jnp.bfloat16)
    low, _ = _choose(params, config, image, 0.0)
    high, _ = _choose(params, config, image.astype(jnp.float32), 0.0)
    jax.tree.map(np.testing.assert_array_equal, low, high)
