"""The training pathway as a whole: what pushes on the count, what the metrics mean, statistics."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np

from stepprune_jax import policy
from stepprune_jax.policy import Gated, Inputs, PolicyConfig, Progress, Trajectory
from stepprune_jax.policy.base import TrainAux
from stepprune_jax.policy.budget import STOP_FROM
from stepprune_jax.policy.noise import standardise

CONFIG = cases.plain_config(feature_width=32, text_width=32, num_heads=4, stop="aligned")


def test_metrics_equal_values_computed_by_hand():
    # Two rows of four tokens, three steps. Row 0 keeps {0, 1}, row 1 {0, 1, 2}.
    prob = jnp.array([[[0.5, 0.25, 0.0, 0.0]] * 3, [[1.0, 0, 0, 0]] * 3])
    log_prob = jnp.where(prob > 0, jnp.log(jnp.maximum(prob, 1e-9)), -1e9)
    stop_prob = jnp.array([[0.25] * 3, [0.0] * 3])
    trajectory = Trajectory(
        action=jnp.array([[0, 1, 4], [2, 1, 0]], jnp.int32),
        choice=jnp.array([[0, 1, 2], [2, 1, 0]], jnp.int32),
        log_prob=log_prob,
        prob=prob,
        stop_prob=stop_prob,
        log_continue=jnp.log(1 - stop_prob),
        margin=jnp.zeros((2, 3)),
        alive=jnp.ones((2, 3), bool),
        count=jnp.array([2, 3], jnp.int32),
        selected=jnp.array([[True, True, False, False], [True, True, True, False]]),
    )
    alpha = jnp.array([[0.9, 0.4, 0.6, 0.1], [1.0, 1.0, 1.0, 0.0]])
    gated = Gated(
        jnp.zeros((2, 4, 1)),
        alpha,
        jnp.array([2.0, 3.0]),
        trajectory,
        jnp.ones(2),
        trajectory.count,
        jnp.array([2, 1]),
        jnp.array([3, 3]),
        jnp.array(2.0),
        jnp.ones((2, 4), bool),
    )
    found = jax.jit(policy.policy_metrics)(TrainAux(gated, jnp.array(0.5)))
    assert found["lm_loss"] == 0.5
    np.testing.assert_allclose(found["k_mean"], 2.5)
    np.testing.assert_allclose(found["k_std"], 0.5)
    np.testing.assert_allclose(found["k_soft"], (0.75 + 0.75**2 + 0.75**3 + 3) / 2, rtol=1e-6)
    np.testing.assert_allclose([found["k_floor"], found["k_cap"]], 0.5)
    np.testing.assert_allclose(found["alpha_in"], (0.9 + 0.4 + 3.0) / 5, rtol=1e-6)
    np.testing.assert_allclose(found["alpha_out"], (0.6 + 0.1 + 0.0) / 3, rtol=1e-6)
    # Row 0: {0, 2} against {0, 1} agree on one of three; row 1 on all.
    np.testing.assert_allclose(found["iou"], (1 / 3 + 1) / 2, rtol=1e-6)
    # Row 0: two thirds and one third, ln 3 - 2/3 ln 2 = .636514; row 1: none.
    np.testing.assert_allclose(found["entropy"], 0.636514 / 2, rtol=1e-5)


def test_each_row_has_a_random_price_that_grows_with_the_count():
    """A tenth of 12 tokens is 1.2; the price goes with the square of the count over that."""
    config = dataclasses.replace(CONFIG, price_range=1.5, price_growth=2.0, length_weight=0.4)
    params = policy.init_policy(jax.random.key(0), config)
    image, key = jax.random.normal(jax.random.key(1), (6, 12, 32)), jax.random.key(2)

    @jax.jit
    def run(params, image):
        return policy.train_loss(params, config, key, Inputs(image), lambda _: jnp.zeros(()))

    loss, (gated, _) = run(params, image)
    price, count = np.asarray(gated.price), np.asarray(gated.trajectory.count)
    np.testing.assert_allclose(loss, 0.4 * np.mean(price * count / 12), rtol=1e-5)
    log_price = np.log(price / (count / 1.2) ** 2)
    assert np.ptp(log_price) > 0.5 and np.abs(log_price).max() <= 1.5
    # The log price is added to the row's stop logits.
    without_price = jax.jit(policy.select)(params, CONFIG, Inputs(image), stop_bias=log_price)
    # 2 ln(1 / 1.2), 2 ln(2 / 1.2), and so on to 2 ln(6 / 1.2).
    growth = [-0.364643, 1.021651, 1.832581, 2.407946, 2.854233, 3.218876]
    added_margin = gated.trajectory.margin - without_price.margin
    np.testing.assert_allclose(added_margin, np.tile(growth, (6, 1)), atol=1e-4)
    # Padding is not counted.
    image_mask = jnp.tile(jnp.arange(20) < 12, (6, 1))
    padded = Inputs(jnp.pad(image, ((0, 0), (0, 8), (0, 0))), image_mask=image_mask)
    padded_config = dataclasses.replace(config, max_steps=6)
    padded_gated = jax.jit(policy.gate)(params, padded_config, key, padded)
    np.testing.assert_allclose(padded_gated.trajectory.margin, gated.trajectory.margin, atol=1e-4)
    np.testing.assert_allclose(padded_gated.price, gated.price, rtol=1e-5)


def test_a_random_budget_has_gradients_to_the_order():
    """With aggregation "last", the last step is the row's last step before its budget."""
    config = cases.plain_config(
        feature_width=8, text_width=0, num_heads=2, batch_budget="probe", aggregation="last"
    )
    params = policy.init_policy(jax.random.key(0), config)
    image = jax.random.normal(jax.random.key(1), (4, 12, 8))

    @jax.jit
    def gradient(params):
        def loss(params):
            alpha = policy.gate(params, config, jax.random.key(2), Inputs(image)).alpha
            return jnp.sum(alpha * image[..., 0])

        return jax.grad(loss)(params)

    pointer = jax.tree.leaves(gradient(params)["decoder"]["pointer"])
    assert max(float(jnp.abs(x).max()) for x in pointer) > 1e-4


def test_a_probe_trains_the_stop_late_in_training():
    """Before the order is learned, more tokens help at every count: the stop would learn T_max."""
    config = PolicyConfig(feature_width=8, text_width=0, num_heads=2, encoder_layers=1)
    params = policy.init_policy(jax.random.key(0), config)
    image = jax.random.normal(jax.random.key(1), (4, 12, 8))

    @jax.jit
    def gradient(params, share):
        def loss(params):
            arguments = params, config, jax.random.key(2), Inputs(image), jnp.var
            return policy.train_loss(*arguments, progress=Progress(share))[0]

        return jax.grad(loss)(params)

    gradients = {
        share: gradient(params, share) for share in (0.0, STOP_FROM - 0.01, STOP_FROM, 1.0)
    }
    for share, grads in gradients.items():
        hazard = jax.tree.leaves((grads["decoder"]["hazard"], grads["stop"]))
        assert any(jnp.any(leaf != 0) for leaf in hazard) == (share >= STOP_FROM)
        assert jnp.any(grads["decoder"]["start"] != 0)


def test_statistics_make_results_independent_of_feature_scales():
    scale, shift = jnp.linspace(0.1, 30, 32), jnp.linspace(-5, 5, 32)
    params = policy.init_policy(jax.random.key(0), CONFIG)
    image = jax.random.normal(jax.random.key(1), (4, 20, 32))
    update_stats = jax.jit(policy.update_stats)
    plain = update_stats(policy.FeatureStats.start(32), image)
    scaled = update_stats(policy.FeatureStats.start(32), image * scale + shift)
    key = jax.random.key(2)
    both_inputs = (Inputs(image, stats=plain), Inputs(image * scale + shift, stats=scaled))
    plain_gated, scaled_gated = (
        jax.jit(policy.gate)(params, CONFIG, key, inputs) for inputs in both_inputs
    )
    np.testing.assert_array_equal(plain_gated.trajectory.action, scaled_gated.trajectory.action)
    np.testing.assert_allclose(
        standardise(plain_gated.tokens, plain), standardise(scaled_gated.tokens, scaled), atol=1e-3
    )
