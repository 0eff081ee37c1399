"""Selection as users meet it: counts, biases, early exit, buckets, compile counts."""

import dataclasses

import cases
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax import policy
from stepprune_jax.policy import budget, objective

CONFIG = cases.plain_config(feature_width=16, text_width=12, num_heads=4, stop="aligned")
B, N, L = 4, 24, 5
encode = jax.jit(policy.encode, static_argnames="config")
select = jax.jit(policy.select, static_argnames=("config", "max_steps"))
pick = jax.jit(policy.pick, static_argnames=("config", "max_steps"))


@pytest.fixture(scope="module")
def params():
    # Sharper than at initialisation, so that margins spread and ties do not occur.
    drawn = policy.init_policy(jax.random.key(0), CONFIG)
    drawn["decoder"]["pointer"]["query"]["kernel"] *= 4
    return drawn


@pytest.fixture(scope="module")
def image():
    return jax.random.normal(jax.random.key(1), (B, N, 16))


@pytest.fixture(scope="module")
def text():
    return jax.random.normal(jax.random.key(2), (B, L, 12))


@pytest.fixture(scope="module")
def slots(params, image, text):
    return policy.memory(params, encode(params, CONFIG, image, text))


def test_counts_spread_and_actions_end_with_the_stop(params, slots):
    t = select(params, CONFIG, slots, max_steps=N, stop_bias=2.0)
    assert len(set(np.asarray(t.count).tolist())) > 1
    for row in range(B):
        k = int(t.count[row])
        actions = np.asarray(t.action[row])
        assert (actions[:k] < N).all() and (actions[k:] == N).all()
        assert len(set(actions[:k].tolist())) == k
        np.testing.assert_array_equal(np.flatnonzero(t.selected[row]), np.sort(actions[:k]))
        np.testing.assert_array_equal(t.alive[row], np.arange(N) <= k)


def test_budget_is_met_exactly_and_nests(params, slots):
    budget = jnp.array([1, 3, 7, 12])
    exact = select(params, CONFIG, slots, budget=budget)
    np.testing.assert_array_equal(exact.count, budget)
    natural = select(params, CONFIG, slots)
    # The order does not depend on the stop: every budget is a prefix of one and the same order.
    np.testing.assert_array_equal(exact.choice, natural.choice)
    # Certain before the budget, certain to stop after it: the expected count is the budget.
    np.testing.assert_allclose(policy.expected_count(exact.stop_prob), budget, rtol=1e-6)


def test_pick_equals_select_for_every_batch_mix(params, slots):
    mixes = [  # min_tokens, max_tokens, stop_bias
        ([1] * 4, [12] * 4, [0.0] * 4),
        ([5] * 4, [5] * 4, [0.0] * 4),
        ([1, 12, 2, 7], [1, 12, 2, 7], [0.0] * 4),
        ([0] * 4, [12] * 4, [50.0] * 4),
        ([1] * 4, [9] * 4, [-50.0, 0.0, 2.0, 50.0]),
        ([1] * 4, [0, 3, 12, 24], [-50.0] * 4),
    ]
    for least, most, bias in mixes:
        option = {
            "min_tokens": np.array(least),
            "max_tokens": np.array(most),
            "stop_bias": np.array(bias, np.float32),
        }
        full = select(params, CONFIG, slots, **option)
        early = pick(params, CONFIG, slots, **option)
        np.testing.assert_array_equal(early.action, full.action)
        np.testing.assert_array_equal(early.count, full.count)
        np.testing.assert_array_equal(early.selected, full.selected)


def test_pick_stops_with_its_last_row(params, slots):
    """Counts the steps that run: a decoder that keeps count of its own calls."""
    calls = []

    def step_fn(params, config, context, query, cache, step):
        jax.debug.callback(lambda t: calls.append(int(t)), step)
        return policy.pointer_step(params, config, context, query, cache, step)

    policy.pick(params, CONFIG, slots, budget=jnp.array([1, 4, 2, 3]), step_fn=step_fn)
    jax.effects_barrier()
    assert sorted(calls) == [0, 1, 2, 3]


def test_margins_give_the_count_at_any_bias_without_a_rerun(params, slots):
    margin = select(params, CONFIG, slots, max_steps=N, stop_bias=0.0).margin
    for bias in (-3.0, 0.0, 1.0, 2.5, 30.0):
        rerun = select(params, CONFIG, slots, max_steps=N, stop_bias=bias)
        np.testing.assert_array_equal(policy.count_at_bias(margin, bias), rerun.count)


def test_calibrated_bias_meets_the_target_mean(params):
    features = jax.random.normal(jax.random.key(9), (64, N, 16))
    slots = policy.memory(params, encode(params, CONFIG, features, None))
    margin = select(params, CONFIG, slots, max_steps=N).margin
    for target in (3.0, 8.0, 15.0):
        bias = policy.calibrate_stop_bias(margin, target)
        count = pick(params, CONFIG, slots, max_steps=N, stop_bias=bias).count
        assert abs(np.mean(count) - target) < 0.5
    assert float(policy.calibrate_stop_bias(margin, N + 5.0)) == pytest.approx(-100, abs=1e-3)


def test_gather_orders_pads_and_leaves_tokens_alone(params, slots, image):
    t = select(params, CONFIG, slots, budget=jnp.array([1, 3, 7, 12]))
    gather = jax.jit(policy.gather, static_argnames=("capacity", "order"))
    raster = gather(t, image, 16)
    assert raster.tokens.shape == (B, 16, 16)
    np.testing.assert_array_equal(raster.count, t.count)
    picked = gather(t, image, 16, order="pick")
    for row in range(B):
        k = int(t.count[row])
        chosen = np.asarray(t.action[row, :k])
        np.testing.assert_array_equal(picked.index[row, :k], chosen)
        np.testing.assert_array_equal(raster.index[row, :k], np.sort(chosen))
        assert (np.asarray(raster.index[row, k:]) == -1).all()
        np.testing.assert_array_equal(raster.valid[row], np.arange(16) < k)
        np.testing.assert_array_equal(raster.tokens[row, :k], image[row, np.sort(chosen)])
        assert (np.asarray(raster.tokens[row, k:]) == 0).all()


def test_gather_under_jit_keeps_the_first_picks_of_a_row_that_is_too_long(params, slots, image):
    t = select(params, CONFIG, slots, budget=jnp.full(B, 12))
    cut = jax.jit(policy.gather, static_argnames="capacity")(t, image, capacity=4)
    np.testing.assert_array_equal(cut.index, np.sort(np.asarray(t.action[:, :4]), axis=1))
    np.testing.assert_array_equal(cut.count, [4] * B)


def test_ladder_bounds_padding_and_ends_at_the_cap():
    ladder = policy.bucket_ladder(288)
    assert ladder == (16, 24, 32, 48, 64, 96, 128, 192, 256, 288)
    assert policy.choose_bucket(jnp.array([3, 64]), ladder) == 64
    assert policy.choose_bucket(jnp.array([65]), ladder) == 96
    assert policy.bucket_ladder(10) == (10,)
    with pytest.raises(ValueError, match="count is 300"):
        policy.choose_bucket(300, ladder)


def test_prune_compiles_once_for_selection_and_once_per_bucket(params, image, text):
    before = objective._choose._cache_size(), objective._gather._cache_size()
    ladder = (4, 8, 12)
    sizes = []
    for count in (1, 2, 3, 4, 5, 8, 9, 12):
        pruned = policy.prune(params, CONFIG, image, text, budget=count, ladder=ladder)
        sizes.append(pruned.tokens.shape[1])
        np.testing.assert_array_equal(pruned.count, [count] * B)
    assert sizes == [4, 4, 4, 4, 8, 8, 12, 12]
    after = objective._choose._cache_size(), objective._gather._cache_size()
    assert (after[0] - before[0], after[1] - before[1]) == (1, 3)


def test_training_step_traces_once_over_steps_and_budgets(params, image, text):
    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, key, text_gate, length_weight, running):
        def loss(params):
            return policy.train_loss(
                params,
                CONFIG,
                key,
                image,
                text,
                lambda x: jnp.mean(x**2),
                length_weight=length_weight,
                text_gate=text_gate,
                running_count=running,
            )

        grads, gated = jax.grad(loss, has_aux=True)(params)
        new = jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)
        return new, gated.running_count, policy.policy_metrics(gated)

    running = jnp.zeros(())
    for i in range(4):
        scalars = (jnp.float32(i / 4), jnp.float32(0.1 * i))
        params, running, metrics = step(params, jax.random.key(i), *scalars, running)
        chex.assert_tree_all_finite(metrics)


def test_budgets_are_log_uniform_and_at_most_t_max():
    given = jax.random.key(0), jnp.full(1000, 1000)
    drawn = np.asarray(budget.draw_budgets(*given, 400, (0.1, 0.3)))
    assert drawn.min() >= 100 and drawn.max() <= 300
    # Log-uniform: half the draws lie below sqrt(100 * 300) = 173.2.
    assert abs((drawn <= 173).mean() - 0.5) < 4 * 0.5 / 1000**0.5
    capped = budget.draw_budgets(*given, 50, (0.1, 0.3))
    np.testing.assert_array_equal(capped, 50)


def test_prices_are_log_uniform():
    config = cases.plain_config(feature_width=16, text_width=0, num_heads=4, price_range=2.0)
    drawn = np.asarray(budget.draw_log_prices(jax.random.key(0), config, 500))
    assert drawn.min() >= -2 and drawn.max() <= 2
    # Uniform over a width of 4: standard deviation 4 / sqrt(12) = 1.155, of the mean .052.
    assert abs(drawn.mean()) < 4 * 0.052 and abs(drawn.std() - 1.155) < 0.1


@pytest.mark.parametrize("mode", ["straight_through", "batch_mean"])
def test_soft_budget_reading(params, slots, mode):
    @jax.jit
    def value(bias, params, slots):
        t = policy.select(
            params,
            CONFIG,
            slots,
            stop_bias=bias,
            max_tokens=jnp.array([9, 9, 9, 4]),
            min_tokens=jnp.array([1, 1, 1, 4]),
        )
        config = dataclasses.replace(CONFIG, soft_budget=mode)
        return budget.soft_budget(config, t, jnp.array(6.5), jnp.full(B, 12)), t

    found, t = value(0.0, params, slots)
    expected = np.full(B, 6.5) if mode == "batch_mean" else np.asarray(t.count, np.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    grads = jax.jit(jax.jacrev(lambda *x: value(*x)[0]))(0.0, params, slots)
    if mode == "straight_through":
        # A higher stop bias means fewer tokens, except at an exact budget.
        assert (np.asarray(grads[:3]) < 0).all() and grads[3] == 0
    else:
        np.testing.assert_array_equal(grads, np.zeros(B))


def test_what_a_token_is_worth_is_heard_up_to_a_bound(params, slots):
    """Of a mean over four rows of twelve tokens, 10 nats per twelve tokens are 10 / 12 / 4."""
    config = dataclasses.replace(CONFIG, soft_budget="straight_through")
    worth, bound = jnp.array([-0.1, 0.1, -9.0, 9.0]), 10 / 12 / 4

    @jax.jit
    def slope(worth, params, slots):
        def of(bias):
            t = policy.select(params, CONFIG, slots, stop_bias=bias)
            k = budget.soft_budget(config, t, 0.0, jnp.full(B, 12))
            return jnp.sum(worth * k), budget.differentiable_count(CONFIG, t)

        counts = jax.jacrev(lambda bias: of(bias)[1])(jnp.zeros(B))
        return jax.grad(lambda bias: of(bias)[0])(jnp.zeros(B)), jnp.diag(counts)

    found, of_count = slope(worth, params, slots)
    np.testing.assert_allclose(found, np.array([-0.1, 0.1, -bound, bound]) * of_count, rtol=1e-5)


def test_a_probe_decides_in_the_last_quarter_of_its_budget(params, slots):
    config = dataclasses.replace(CONFIG, batch_budget="probe", stop_temperature=0.5)
    limits = jnp.array([1, 3, 5, 12])
    # Steps from three quarters of the budget to the budget, after the first and within the twelve.
    asked = [[1], [3], [4, 5], [9, 10, 11]]

    @jax.jit
    def count(bias, params, slots):
        t = policy.select(
            params, config, slots, stop_bias=bias, min_tokens=limits, max_tokens=limits
        )
        return budget.differentiable_count(config, t), t

    found, t = count(0.0, params, slots)
    np.testing.assert_array_equal(t.count, limits)
    assert t.margin.shape[1] == 12
    go_on = [1 / (1 + np.exp(np.asarray(t.margin)[row, at] / 0.5)) for row, at in enumerate(asked)]
    np.testing.assert_allclose(found, [10 * p.mean() for p in go_on], rtol=1e-5)
    # A stop bias of db lowers each probability to go on by p (1 - p) db / temperature.
    slope = jax.jit(jax.jacrev(lambda *x: count(*x)[0]))(0.0, params, slots)
    np.testing.assert_allclose(slope, [-20 * (p * (1 - p)).mean() for p in go_on], rtol=1e-4)


def test_the_polarisation_anneals_by_a_cosine():
    config = cases.plain_config(
        feature_width=16,
        text_width=0,
        num_heads=4,
        polarisation_temperature=0.2,
        polarisation_share=0.5,
    )
    for progress, tau in ((0.0, 2.0), (0.25, 1.1), (0.5, 0.2), (0.9, 0.2)):
        found = policy.polarisation_temperature(config, progress)
        np.testing.assert_allclose(found, tau, rtol=1e-6)
    constant = dataclasses.replace(config, polarisation_share=0.0)
    assert policy.polarisation_temperature(constant, 0.1) == 0.2


@pytest.mark.parametrize(("given", "computed"), [(jnp.bfloat16, jnp.float32), (float, None)])
def test_compute_dtype_follows_the_features(params, image, text, given, computed):
    with jax.enable_x64(given is float):
        wide = jax.tree.map(
            lambda leaf: jnp.asarray(leaf, jnp.promote_types(given, leaf.dtype)), params
        )
        image, text = jnp.asarray(image, given), jnp.asarray(text, given)

        def run(params):
            encoded = policy.encode(params, CONFIG, image, text)
            denoised = policy.denoise(params, CONFIG, image)
            prob = policy.select(params, CONFIG, policy.memory(params, encoded)).prob
            return encoded, denoised, prob

        encoded, denoised, prob = jax.eval_shape(run, wide)
        assert encoded.dtype == prob.dtype == (computed or jnp.float64)
        assert denoised.dtype == image.dtype


def test_numpy_features_of_double_precision_are_taken_as_they_are(params, image, text):
    pruned = policy.prune(
        params, CONFIG, np.asarray(image, np.float64), np.asarray(text, np.float64), budget=3
    )
    expected = policy.prune(params, CONFIG, image, text, budget=3)
    np.testing.assert_array_equal(pruned.index, expected.index)
