"""Sampled subsets: their frequencies, and the gradient of RLOO."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import plain_config

from stepprune_jax.policy import Inputs, Limits, PolicyConfig, Progress, leave_one_out
from stepprune_jax.policy.budget import draw_log_prices, expected_price
from stepprune_jax.policy.params import param_paths
from stepprune_jax.registry import selector_of
from stepprune_jax.selectors import AutoSelectConfig, RlooSettings

N, STEPS, DRAWS = 4, 3, 4096


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    mask = np.array([[True] * N, [True, True, False, True]])
    return Inputs(rng.standard_normal((2, N, 8)), rng.standard_normal((2, 3, 5)), mask)


SHAPE = {"feature_width": 8, "text_width": 5, "num_heads": 2, "mlp_ratio": 2}
SCORER = AutoSelectConfig(**SHAPE)
HAZARD = plain_config(**SHAPE, stop="hazard", stop_bias=0.0, temperature=0.7)


def randomised(config, seed=1):
    policy = type(selector_of(config)).init(jax.random.key(seed), config, None)
    rng = np.random.default_rng(seed)
    noisy = jax.tree.map(lambda x: x + 0.5 * rng.standard_normal(x.shape), policy.params)
    return policy.replace(params=jax.tree.map(jnp.float32, noisy))


sample_subsets = jax.jit(lambda policy, *given: policy.sample_subsets(*given))


@pytest.mark.parametrize("config", [HAZARD, SCORER])
def test_the_frequency_of_each_outcome_equals_its_probability(config, inputs):
    policy = randomised(config)
    has_stop = policy.has_stop
    limits = Limits(min_tokens=1 if has_stop else STEPS, max_tokens=STEPS, max_steps=STEPS)
    keys = jax.random.split(jax.random.key(2), DRAWS)
    subsets = sample_subsets(policy, inputs, limits, keys, Progress())
    action, log_prob = np.asarray(subsets.picks.action[..., :STEPS]), np.asarray(subsets.log_prob)
    for row, real in enumerate(inputs.image_mask):
        outcomes = {}
        for outcome, probability in zip(
            map(tuple, action[:, row]), np.exp(log_prob[:, row]), strict=True
        ):
            num_times, _ = outcomes.get(outcome, (0, 0))
            outcomes[outcome] = num_times + 1, probability
        counts = range(1 if has_stop else min(STEPS, real.sum()), min(STEPS, real.sum()) + 1)
        possible = {
            order + (N,) * (STEPS - count)
            for count in counts
            for order in itertools.permutations(np.flatnonzero(real), count)
        }
        assert {*outcomes} <= possible
        num_times, probability = np.array([*outcomes.values()]).T
        # The probabilities of the sampled outcomes sum to almost 1.
        assert 0.98 < probability.sum() < 1 + 1e-5
        error = np.sqrt(probability * (1 - probability) / DRAWS)
        assert (np.abs(num_times / DRAWS - probability) < 5 * error + 1e-3).all()


@pytest.mark.parametrize("config", [HAZARD, SCORER])
def test_advantages_give_the_gradient_of_the_mean_reward(config, inputs):
    """The reward is a sum over tokens; the exact gradient is a sum over all outcomes."""
    policy = randomised(config)
    token_value = jnp.array([0.1, 0.9, 0.4, 0.0])
    limits = Limits(min_tokens=2, max_tokens=2, max_steps=2)
    keys = jax.random.split(jax.random.key(3), DRAWS)
    arguments = (inputs, limits, keys, Progress())

    def estimate(subsets):
        advantage = leave_one_out(subsets.picks.selected @ token_value)
        return jnp.mean(jax.lax.stop_gradient(advantage) * subsets.log_prob)

    def exact(subsets):
        """Sums the rewards of distinct outcomes, weighted by their probabilities."""
        action = subsets.picks.action[..., :2]
        is_equal = jnp.all(action[:, None] == action[None], axis=-1)
        is_first = jnp.argmax(is_equal, axis=1) == jnp.arange(DRAWS)[:, None]
        reward = subsets.picks.selected @ token_value
        return jnp.mean(jnp.sum(jnp.where(is_first, jnp.exp(subsets.log_prob) * reward, 0), axis=0))

    def both(params):
        subsets = policy.replace(params=params).sample_subsets(*arguments)
        return jnp.stack([estimate(subsets), exact(subsets)])

    jacobians = jax.tree.leaves(jax.jit(jax.jacrev(both))(policy.params))
    estimated, expected = jnp.concatenate([x.reshape(2, -1) for x in jacobians], axis=1)
    assert jnp.linalg.norm(estimated - expected) < 0.1 * jnp.linalg.norm(expected)


def test_an_advantage_is_the_distance_from_the_mean_of_the_other_rewards():
    reward = jnp.array([[1.0, 0.5], [0.0, 0.5], [0.5, 0.5]])
    expected = [[0.75, 0.0], [-0.75, 0.0], [0.0, 0.0]]
    np.testing.assert_allclose(leave_one_out(reward), expected, atol=1e-7)


def test_a_row_with_a_higher_price_stops_earlier(inputs):
    limits, keys = Limits(min_tokens=0, max_tokens=3), jax.random.split(jax.random.key(0), 512)
    config = dataclasses.replace(HAZARD, length_weight=0.15)
    mean_count = {}
    for price_range in (0.0, 2.0):
        policy = randomised(dataclasses.replace(config, price_range=price_range), seed=2)
        subsets = sample_subsets(policy, inputs, limits, keys, Progress())
        mean_count[price_range] = jnp.mean(subsets.picks.count, axis=0)
    log_price = draw_log_prices(jax.random.fold_in(keys[0], 2), policy.config, 2)
    assert (jnp.abs(log_price) > 0.1).all()
    np.testing.assert_array_equal(mean_count[2.0] < mean_count[0.0], log_price > 0)


def test_the_expected_price_of_a_stop_sums_the_prices_of_kept_tokens():
    """Of four tokens and a price that is lambda at .4 of them, and linear: .15 * 2.5 K^2 / 8."""
    config = PolicyConfig(length_weight=0.15, price_growth=1)
    stop_prob = jnp.array([[0.0, 0.5, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    log_price = jnp.array([0.0, np.log(2.0), 0.0])
    price = expected_price(config, stop_prob, jnp.array([4, 4, 3]), log_price)
    first, second, third = (0.15 * 2.5 * k**2 / 8 for k in (1, 2, 3))
    expected = [first + 0.5 * (second - first), 2 * third, 0.0]
    np.testing.assert_allclose(price, expected, rtol=1e-6)


def test_the_stop_is_priced_beyond_the_largest_subset(inputs):
    """Only the hazard's weights have a gradient; subsets have one token of four."""
    policy = randomised(dataclasses.replace(HAZARD, length_weight=0.15, max_steps=3))
    settings = RlooSettings(samples=2, longest=0.25)

    def loss(params):
        def answers(kept):
            return jnp.zeros(kept.count.shape)

        arguments = (jax.random.key(5), inputs.image, inputs.text, answers, settings)
        trained = policy.replace(params=params)
        return trained.rloo_loss(*arguments, image_mask=inputs.image_mask)

    (value, (metrics, _)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(policy.params)
    assert value > 0 and 1 <= metrics["k_mean"] <= 3
    changed_paths = {
        path
        for path, grad in zip(param_paths(grads), jax.tree.leaves(grads), strict=True)
        if jnp.any(grad != 0)
    }
    assert changed_paths and all(policy.is_stop(path) for path in changed_paths)
    # At this stop bias, every row stops after its first token.
    stopping = policy.replace(config=dataclasses.replace(policy.config, stop_bias=99.0))
    price_stop = jax.jit(lambda policy, *arguments: policy.price_stop(*arguments))
    stop = price_stop(stopping, inputs, jax.random.key(0), Progress())
    assert stop.count.tolist() == stop.shortest.tolist() and (stop.longest == 3).all()


@pytest.mark.parametrize("config", [HAZARD, SCORER])
def test_the_loss_of_a_row_without_tokens_is_finite(config, inputs):
    policy = randomised(config)
    mask = np.concatenate([inputs.image_mask, np.zeros((1, N), bool)])
    image, text = (np.concatenate([x, x[:1]]) for x in (inputs.image, inputs.text))

    def loss(params):
        def answers(kept):
            return jnp.sum(kept.valid, axis=-1, dtype=jnp.float32)

        arguments = (jax.random.key(5), image, text, answers)
        return policy.replace(params=params).rloo_loss(*arguments, image_mask=mask)[0]

    value, grads = jax.jit(jax.value_and_grad(loss))(policy.params)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
