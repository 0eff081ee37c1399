"""Scores, SoftTopK, noise gate, denoiser and gather against `oracle.py`; precision of `select`."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from stepprune_jax.policy import Inputs, Picks, choose, gather, noise_gate, soft_topk
from stepprune_jax.policy.base import Limits
from stepprune_jax.policy.noise import denoise
from stepprune_jax.policy.scores import alive_probability, expected_count, soft_scores


def close(actual, expected, rtol=1e-9, **options):
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=1e-9, **options)


def random_rows(rng, b, t, n):
    """Returns random probabilities, with some impossible and some certain stops."""
    logits = rng.normal(0, 2, (b, t, n + 1))
    prob = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    stop = prob[..., -1] * (rng.random((b, t)) > 0.3)
    stop = np.where(rng.random((b, t)) < 0.1, 1.0, stop)
    conditional = prob[..., :-1] / prob[..., :-1].sum(-1, keepdims=True)
    return (1 - stop)[..., None] * conditional, stop


def test_alive_probability_equals_the_product_and_expected_count_the_enumeration(rng, x64):
    _, stop_prob = random_rows(rng, 6, 5, 3)
    alive, count = alive_probability(stop_prob), expected_count(stop_prob)
    for row in range(6):
        close(alive[row], oracle.alive_probability(stop_prob[row]))
        close(count[row], oracle.expected_count(stop_prob[row]))


@pytest.mark.parametrize("aggregation", ["discounted", "alive", "uniform", "last"])
def test_soft_scores_and_their_logarithms_equal_the_loops(rng, x64, aggregation):
    prob, stop_prob = random_rows(rng, 4, 6, 5)
    prob[..., 2] = 0.0  # No step points at this token.
    prob[1, 4:], stop_prob[1, 4:] = 0.0, 1.0  # beyond its bound
    prob[:, 3], stop_prob[:, 3] = 0.1, 0.5  # certain stops elsewhere
    arguments = dict(decay=0.8, aggregation=aggregation)

    @jax.jit
    def both(prob, stop_prob):
        logs = cases.log_scores(prob, stop_prob, **arguments)
        return soft_scores(prob, stop_prob, **arguments), logs

    linear, logs = map(np.asarray, both(prob, stop_prob))
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
    alpha_column = alpha[..., None]
    close(gated, np.sqrt(alpha_column) * x + np.sqrt(1 - alpha_column) * noise)
    for row in range(3):
        close(denoised[row], oracle.denoise(params, x[row]))


@pytest.mark.parametrize("order", ["raster", "pick"])
def test_gather_equals_the_loop(rng, order):
    b, n, steps = 6, 7, 5
    count = np.array([0, 1, 2, 3, 4, 5], np.int32)
    action = np.stack([rng.permutation(n)[:steps] for _ in range(b)]).astype(np.int32)
    action = np.where(np.arange(steps) < count[:, None], action, n)
    selected = (action[:, :, None] == np.arange(n)).any(1)
    features = rng.standard_normal((b, n, 3)).astype(np.float32)
    picks = Picks(*map(jnp.asarray, (action, count, selected)))
    for capacity in (2, n):
        # Traced, a row over capacity keeps its first picks.
        pruned = jax.jit(gather, static_argnames=("capacity", "order"))(
            picks, features, capacity=capacity, order=order
        )
        for row in range(b):
            expected_arrays = oracle.gather_row(action[row], features[row], capacity, order)
            for actual, expected_array in zip(pruned[:3], expected_arrays, strict=True):
                np.testing.assert_array_equal(actual[row], expected_array)
        np.testing.assert_array_equal(pruned.count, np.minimum(count, capacity))


def _gap(row, config):
    """Returns the smallest logit difference that would change a choice or the stop."""
    gaps = []
    for t in range(len(row.action)):
        log_probs = np.sort(row.log_prob[t][row.prob[t] > 0])
        gaps += [config.temperature * (log_probs[-1] - log_probs[-2])] if len(log_probs) > 1 else []
        gaps += [abs(row.margin[t])]
    return min(gaps)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "separation"), [("float32", 1e-3), ("bfloat16", 0.25)])
def test_lower_precision_makes_the_choices_of_float64_on_separated_scores(rng, dtype, separation):
    config = cases.small_config(text_width=0, decoder_layers=2, dtype=dtype)
    limits, compiled, num_checked = Limits(max_steps=4, min_tokens=0), jax.jit(choose), 0
    for _ in range(60):
        params = cases.random_weights(rng, config, scale=0.3)
        params["decoder"]["pointer"]["query"]["kernel"] *= 6.0
        image = jnp.asarray(rng.standard_normal((1, 7, 8)), dtype)
        bias, real = np.float32(rng.normal(0.0, 2.0)), [True] * 7
        image_float64 = np.asarray(image[0], np.float64)
        encoded = oracle.encode_row(params, config, image_float64, None, real, None, 1.0)
        bounds = dict(steps=4, min_tokens=0, max_tokens=4, stop_bias=bias)
        slots = oracle.memory_row(params, encoded)
        expected = oracle.select_row(params, config, slots, real, **bounds)
        if _gap(expected, config) < separation:
            continue
        num_checked += 1
        params_float32 = jax.tree.map(jnp.float32, params)
        picks = compiled(params_float32, config, Inputs(image), limits, stop_bias=bias)
        np.testing.assert_array_equal(picks.action[0], expected.action)
    assert num_checked >= 10
