"""The warm start: importance of tokens, and the loss that trains the pointer towards it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.example_libraries import optimizers

from stepprune_jax.policy import (
    Inputs,
    Limits,
    PolicyConfig,
    init_policy,
    rank,
    select,
    token_importance,
    warm_start_loss,
)
from stepprune_jax.policy.warm_start import normalize_importance

CONFIG = PolicyConfig(
    feature_width=8, text_width=6, width=8, num_heads=2, encoder_layers=1, mlp_ratio=2
)
NUM_ROWS, NUM_TOKENS = 4, 12
compiled_loss = jax.jit(warm_start_loss, static_argnames="steps")


@pytest.fixture(scope="module")
def params():
    return init_policy(jax.random.key(0), CONFIG)


def make_inputs(**fields):
    image = jax.random.normal(jax.random.key(1), (NUM_ROWS, NUM_TOKENS, 8))
    text = jax.random.normal(jax.random.key(2), (NUM_ROWS, 3, 6))
    return Inputs(image, text)._replace(**fields)


def test_importance_is_the_squared_derivative_by_each_gate():
    tokens = jax.random.normal(jax.random.key(0), (2, 5, 3))
    mean = jnp.array([1.0, -2.0, 0.5])
    weights = jax.random.normal(jax.random.key(1), (5, 3))

    def losses(tokens):
        return jnp.tanh(jnp.sum(tokens * weights, axis=(1, 2)))

    def gated_losses(gates):
        return jnp.sum(losses(mean + gates[..., None] * (tokens - mean)))

    expected = jax.grad(gated_losses)(jnp.ones((2, 5))) ** 2
    np.testing.assert_allclose(token_importance(losses, tokens, mean), expected, rtol=1e-5)


def test_the_mean_of_each_image_is_the_default_center():
    tokens = jax.random.normal(jax.random.key(0), (2, 5, 3))

    def losses(tokens):
        return jnp.sum(tokens**2, axis=(1, 2))

    expected = [
        token_importance(losses, row[None], row.mean(axis=0))[0] for row in np.asarray(tokens)
    ]
    np.testing.assert_allclose(token_importance(losses, tokens), expected, rtol=1e-5)


def test_importance_of_bfloat16_tokens_is_float32():
    tokens = jnp.ones((1, 3, 2), jnp.bfloat16)
    importance = token_importance(lambda x: jnp.sum(x * 2), tokens, jnp.zeros(2))
    assert importance.dtype == jnp.float32
    np.testing.assert_array_equal(importance, [[16, 16, 16]])


def test_the_first_step_is_the_cross_entropy_to_the_importance(params):
    inputs = make_inputs()
    importance = jnp.zeros((NUM_ROWS, NUM_TOKENS)).at[:, 3].set(5.0)
    result = compiled_loss(params, CONFIG, jax.random.key(3), inputs, importance, steps=1)
    # The pointer of an exact budget never stops, so token 3 has its softmax probability.
    limits = Limits(budget=NUM_TOKENS, max_steps=NUM_TOKENS)
    trajectory = jax.jit(select)(params, CONFIG, inputs, limits)
    expected = -jnp.mean(trajectory.log_prob[:, 0, 3])
    np.testing.assert_allclose(result.loss, expected, rtol=1e-5)


def test_weights_sum_to_one_without_padding():
    importance = jnp.array([[1.0, 3.0, 9.0], [0.0, 0.0, 7.0]])
    real = jnp.array([[True, True, False], [True, True, False]])
    np.testing.assert_array_equal(
        normalize_importance(importance, real), [[0.25, 0.75, 0], [0, 0, 0]]
    )


def test_rows_without_importance_train_nothing(params):
    def loss(params):
        zeros = jnp.zeros((NUM_ROWS, NUM_TOKENS))
        return warm_start_loss(params, CONFIG, jax.random.key(3), make_inputs(), zeros).loss

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    assert value == 0
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(grads))


def test_padding_does_not_change_the_loss(params):
    importance = jax.random.uniform(jax.random.key(4), (NUM_ROWS, NUM_TOKENS))
    key = jax.random.key(3)
    expected = compiled_loss(params, CONFIG, key, make_inputs(), importance, steps=1)

    def pad(x, value):
        return jnp.pad(x, ((0, 0), (0, 3), (0, 0)), constant_values=value)

    inputs = make_inputs()
    mask = jnp.arange(NUM_TOKENS + 3) < jnp.full((NUM_ROWS, 1), NUM_TOKENS)
    padded = inputs._replace(image=pad(inputs.image, 1e3), image_mask=mask)
    padded_importance = jnp.pad(importance, ((0, 0), (0, 3)), constant_values=9.0)
    result = compiled_loss(params, CONFIG, key, padded, padded_importance, steps=1)
    np.testing.assert_allclose(result.loss, expected.loss, rtol=1e-5)


def test_importance_of_another_shape_is_refused(params):
    with pytest.raises(ValueError, match=r"importance is of shape \(4, 3\), expected \(4, 12\)"):
        warm_start_loss(params, CONFIG, jax.random.key(0), make_inputs(), jnp.zeros((4, 3)))


def test_the_order_follows_the_importance_after_training(params):
    """The importance is a function of the image: a large first channel."""
    inputs = make_inputs()
    importance = jnp.exp(3 * inputs.image[..., 0])
    init, step_optimizer, read_params = optimizers.adam(1e-2)

    @jax.jit
    def update(step, state):
        def loss(params):
            key = jax.random.key(step)
            result = warm_start_loss(params, CONFIG, key, inputs, importance, steps=4)
            return result.loss, result.covered

        (_, covered), grads = jax.value_and_grad(loss, has_aux=True)(read_params(state))
        return step_optimizer(step, grads, state), covered

    state, covered = jax.jit(init)(params), []
    for step in range(150):
        state, step_covered = update(step, state)
        covered.append(float(step_covered))
    params = read_params(state)
    assert covered[-1] > 0.9 > 0.8 > covered[0]
    best_tokens = jnp.argmax(importance, axis=1)
    order = jax.jit(rank)(params, CONFIG, inputs, Limits(draw=0.0)).choice
    np.testing.assert_array_equal(order[:, 0], best_tokens)
