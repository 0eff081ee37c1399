"""Selection functions: counts, biases, early exit, buckets and numbers of compilations."""

import dataclasses
import functools

import cases
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax import policy
from stepprune_jax.policy import (
    POINTER,
    DecoderFns,
    Inputs,
    Limits,
    Progress,
    buckets,
    budget,
    gathering,
)
from stepprune_jax.policy.noise import denoise
from stepprune_jax.policy.scores import expected_count, polarisation_temperature
from stepprune_jax.policy.trajectory import count_at_bias

CONFIG = cases.plain_config(feature_width=16, text_width=12, num_heads=4, stop="aligned")
B, N, L = 4, 24, 5
select = jax.jit(policy.select)
choose = jax.jit(policy.choose)


@pytest.fixture(scope="module")
def params():
    # A larger query kernel spreads the margins and avoids ties.
    weights = policy.init_policy(jax.random.key(0), CONFIG)
    weights["decoder"]["pointer"]["query"]["kernel"] *= 4
    return weights


@pytest.fixture(scope="module")
def inputs():
    normal = jax.random.normal
    return Inputs(normal(jax.random.key(1), (B, N, 16)), normal(jax.random.key(2), (B, L, 12)))


def test_budgets_are_met_exactly_and_nest(params, inputs):
    counts = jnp.array([1, 3, 7, 12])
    exact = select(params, CONFIG, inputs, Limits(budget=counts))
    np.testing.assert_array_equal(exact.count, counts)
    natural = select(params, CONFIG, inputs)
    # The order does not depend on the stop, so every budget keeps a prefix of the same order.
    np.testing.assert_array_equal(exact.choice, natural.choice)
    # Certain before the budget, certain to stop after it: the expected count is the budget.
    np.testing.assert_allclose(expected_count(exact.stop_prob), counts, rtol=1e-6)


def test_choose_ends_with_the_last_running_row(params, inputs):
    """A decoder that records its calls counts the steps that run."""
    calls = []

    def step(params, config, context, query, cache, t):
        jax.debug.callback(lambda t: calls.append(int(t)), t)
        return POINTER.step(params, config, context, query, cache, t)

    limits = Limits(budget=jnp.array([1, 4, 2, 3]))
    choose(params, CONFIG, inputs, limits, decoder=DecoderFns(POINTER.init, step))
    jax.effects_barrier()
    assert sorted(calls) == [0, 1, 2, 3]


def test_margins_give_the_count_at_any_bias_without_a_rerun(params, inputs):
    limits = Limits(max_steps=N)
    margin = select(params, CONFIG, inputs, limits).margin
    for bias in (-3.0, 0.0, 1.0, 2.5, 30.0):
        rerun = select(params, CONFIG, inputs, limits, stop_bias=bias)
        np.testing.assert_array_equal(count_at_bias(margin, bias), rerun.count)


def test_calibrated_bias_meets_the_target_mean(params):
    inputs = Inputs(jax.random.normal(jax.random.key(9), (64, N, 16)))
    limits = Limits(max_steps=N)
    margin = jax.jit(policy.rank)(params, CONFIG, inputs, limits).margin
    for target in (3.0, 8.0, 15.0):
        bias = policy.calibrate_stop_bias(margin, target)
        count = choose(params, CONFIG, inputs, limits, stop_bias=bias).count
        assert abs(np.mean(count) - target) < 0.5
    assert float(policy.calibrate_stop_bias(margin, N + 5.0)) == pytest.approx(-100, abs=1e-3)
    # One row can have counts 2 and 10 only: the bias gives the count that is nearer to the target.
    for edge in (1.0, 1.0000001, 0.7, 0.3):
        margin = jnp.full((1, 10), -50.0).at[0, 2].set(-edge)
        for target, near in ((9.9, 10), (2.1, 2)):
            bias = policy.calibrate_stop_bias(margin, target, max_bias=40.0)
            assert count_at_bias(margin, bias).tolist() == [near]


def test_padding_does_not_change_t_max_of_an_image(params):
    image = jax.random.normal(jax.random.key(3), (1, 40, 16))
    padded, unpadded = Inputs(image, image_mask=jnp.arange(40)[None] < 10), Inputs(image[:, :10])
    for inputs in (padded, unpadded):
        for prune in (policy.prune, choose, select):
            assert prune(params, CONFIG, inputs, stop_bias=-99.0).count.tolist() == [5]


def test_ladder_bounds_padding_and_ends_at_the_cap():
    bucket_sizes = buckets.bucket_ladder(288)
    assert bucket_sizes == (16, 24, 32, 48, 64, 96, 128, 192, 256, 288)
    assert buckets.choose_bucket(jnp.array([3, 64]), bucket_sizes) == 64
    assert buckets.choose_bucket(jnp.array([65]), bucket_sizes) == 96
    assert buckets.bucket_ladder(10) == (10,)


def test_prune_compiles_once_for_selection_and_once_per_bucket(params, inputs, monkeypatch):
    monkeypatch.setattr(gathering, "bucket_ladder", lambda steps: (4, 8, 12))
    before = gathering._choose._cache_size(), gathering.run_gather._cache_size()
    sizes = []
    for count in (1, 2, 3, 4, 5, 8, 9, 12):
        pruned = policy.prune(params, CONFIG, inputs, Limits(budget=count))
        sizes.append(pruned.tokens.shape[1])
        np.testing.assert_array_equal(pruned.count, [count] * B)
    assert sizes == [4, 4, 4, 4, 8, 8, 12, 12]
    after = gathering._choose._cache_size(), gathering.run_gather._cache_size()
    assert (after[0] - before[0], after[1] - before[1]) == (1, 3)


def test_training_step_traces_once_over_steps_and_budgets(params, inputs):
    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, key, length_weight, progress):
        options = {"progress": progress, "length_weight": length_weight}

        def loss(params):
            arguments = (params, CONFIG, key, inputs, lambda x: jnp.mean(x**2))
            return policy.train_loss(*arguments, **options)

        grads, aux = jax.grad(loss, has_aux=True)(params)
        updated = jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)
        return updated, aux.gated.state, policy.policy_metrics(aux)

    state = ()
    for i in range(4):
        progress = Progress(*map(jnp.float32, (i / 4, i / 4)), state)
        params, state, metrics = step(params, jax.random.key(i), jnp.float32(0.1 * i), progress)
        chex.assert_tree_all_finite(metrics)


def test_budgets_are_log_uniform_and_at_most_t_max():
    key_and_counts = jax.random.key(0), jnp.full(1000, 1000)
    budgets = np.asarray(budget.draw_budgets(*key_and_counts, 400, (0.1, 0.3)))
    assert budgets.min() >= 100 and budgets.max() <= 300
    # Log-uniform: half the draws lie below sqrt(100 * 300) = 173.2.
    assert abs((budgets <= 173).mean() - 0.5) < 4 * 0.5 / 1000**0.5
    capped = budget.draw_budgets(*key_and_counts, 50, (0.1, 0.3))
    np.testing.assert_array_equal(capped, 50)


def test_the_smallest_budget_falls_geometrically():
    """From .3 to .03 in half of the training; within a range that is narrower, from its end."""
    for progress, expected in ((0, 0.3), (0.25, 0.3 / 10**0.5), (0.5, 0.03), (1, 0.03)):
        low, high = budget.budget_range((0.03, 0.5), 0.5, progress)
        np.testing.assert_allclose((low, high), (expected, 0.5), rtol=1e-5)
    assert budget.budget_range((0.03, 0.5), 0, 0) == (0.03, 0.5)
    for shares, expected in (((0.4, 0.5), 0.4), ((0.01, 0.1), 0.1)):
        np.testing.assert_allclose(budget.budget_range(shares, 0.5, 0)[0], expected, rtol=1e-5)


def test_prices_are_log_uniform():
    config = cases.plain_config(feature_width=16, text_width=0, num_heads=4, price_range=2.0)
    log_prices = np.asarray(budget.draw_log_prices(jax.random.key(0), config, 500))
    assert log_prices.min() >= -2 and log_prices.max() <= 2
    # Uniform over a width of 4: standard deviation 4 / sqrt(12) = 1.155, of the mean .052.
    assert abs(log_prices.mean()) < 4 * 0.052 and abs(log_prices.std() - 1.155) < 0.1


def test_the_gradient_of_the_straight_through_count_is_bounded(params, inputs):
    """10 nats per 12 tokens, in a mean over 4 rows, are a bound of 10 / 12 / 4."""
    gain, gain_bound = jnp.array([-0.1, 9.0, -9.0, 9.0]), 10 / 12 / 4
    limits = Limits(None, jnp.array([1, 1, 1, 4]), jnp.array([9, 9, 9, 4]))
    tokens = jnp.full(B, 12)

    @jax.jit
    def slope(params, inputs):
        def budget_and_count(bias):
            t = policy.select(params, CONFIG, inputs, limits, stop_bias=bias)
            k = budget.soft_budget(CONFIG, t, 0.0, tokens)
            return (gain * k, budget.differentiable_count(CONFIG, t)), (k, t)

        jacobians, k_slope = jax.jacrev(budget_and_count, has_aux=True)(jnp.zeros(B))
        return *map(jnp.diag, jacobians), *k_slope

    k_slope, count_slope, k, t = slope(params, inputs)
    np.testing.assert_array_equal(k, t.count)
    np.testing.assert_allclose(
        k_slope, np.clip(gain, -gain_bound, gain_bound) * count_slope, rtol=1e-5
    )
    # A higher stop bias means fewer tokens, except at an exact budget.
    assert (count_slope[:3] < 0).all() and count_slope[3] == 0
    printed = dataclasses.replace(CONFIG, soft_budget="batch_mean")
    np.testing.assert_array_equal(budget.soft_budget(printed, t, 6.5, tokens), np.full(B, 6.5))


def test_a_probe_uses_the_decisions_of_the_last_quarter_of_the_budget(params, inputs):
    config = dataclasses.replace(CONFIG, batch_budget="probe", stop_temperature=0.5)
    limits = jnp.array([1, 3, 5, 12])
    # Steps from three quarters of the budget to the budget, after the first and within the twelve.
    probed_steps = [[1], [3], [4, 5], [9, 10, 11]]

    @jax.jit
    @functools.partial(jax.jacrev, has_aux=True)
    def slope_of(bias, params, inputs):
        t = policy.select(params, config, inputs, Limits(None, limits, limits), stop_bias=bias)
        count = budget.differentiable_count(config, t)
        return count, (count, t)

    slope, (surrogate, t) = slope_of(0.0, params, inputs)
    np.testing.assert_array_equal(t.count, limits)
    assert t.margin.shape[1] == 12
    continue_probs = [
        1 / (1 + np.exp(np.asarray(t.margin)[row, steps] / 0.5))
        for row, steps in enumerate(probed_steps)
    ]
    np.testing.assert_allclose(surrogate, [10 * p.mean() for p in continue_probs], rtol=1e-5)
    # A stop bias of db lowers each probability of continuing by p (1 - p) db / temperature.
    np.testing.assert_allclose(
        slope, [-20 * (p * (1 - p)).mean() for p in continue_probs], rtol=1e-4
    )


def test_the_polarisation_anneals_by_a_cosine():
    config = cases.plain_config(
        feature_width=16,
        text_width=0,
        num_heads=4,
        polarisation_temperature=0.2,
        polarisation_share=0.5,
    )
    for progress, tau in ((0.0, 2.0), (0.25, 1.1), (0.5, 0.2), (0.9, 0.2)):
        temperature = polarisation_temperature(config, progress)
        np.testing.assert_allclose(temperature, tau, rtol=1e-6)
    constant = dataclasses.replace(config, polarisation_share=0.0)
    assert polarisation_temperature(constant, 0.1) == 0.2


@pytest.mark.parametrize(
    ("feature_dtype", "compute_dtype"), [(jnp.bfloat16, jnp.float32), (float, None)]
)
def test_compute_dtype_follows_the_features(params, inputs, feature_dtype, compute_dtype):
    with jax.enable_x64(feature_dtype is float):
        cast_params = jax.tree.map(
            lambda leaf: jnp.asarray(leaf, jnp.promote_types(feature_dtype, leaf.dtype)), params
        )
        inputs = jax.tree.map(lambda leaf: jnp.asarray(leaf, feature_dtype), inputs)

        def run(params):
            encoded = policy.encode(params, CONFIG, inputs)
            denoised = denoise(params, CONFIG, inputs.image)
            prob = policy.select(params, CONFIG, inputs).prob
            return encoded, denoised, prob

        encoded, denoised, prob = jax.eval_shape(run, cast_params)
        assert encoded.dtype == prob.dtype == (compute_dtype or jnp.float64)
        assert denoised.dtype == inputs.image.dtype
