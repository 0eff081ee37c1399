"""The gate keeps variance, is exact at its ends, and never gives NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax import policy


def test_second_moment_is_kept():
    x = jax.random.normal(jax.random.key(0), (8, 10, 500))
    alpha = jnp.tile(jnp.linspace(0, 1, 10), (8, 1))
    gated = policy.noise_gate(jax.random.key(1), x, alpha)
    moment = jnp.mean(gated**2, axis=(0, 2))
    # 4,000 samples of a chi-square with one degree of freedom: sd sqrt(2 / 4000) = .022.
    np.testing.assert_allclose(moment, jnp.ones(10), atol=4 * 0.0224)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradient_is_finite_where_alpha_is_exactly_zero_or_one(compiled):
    x = jnp.ones((1, 4, 3))
    noise = jnp.full((1, 4, 3), 0.5)

    def loss(u):
        alpha = jnp.stack([jax.nn.sigmoid(u[0]), jax.nn.sigmoid(u[1]), u[2], u[3]])[None]
        return jnp.sum(policy.noise_gate(None, x, alpha, noise=noise) ** 2)

    grad = jax.grad(loss)
    u = jnp.array([40.0, -200.0, 0.0, 1.0])  # both sigmoids saturate in float32
    value = (jax.jit(grad) if compiled else grad)(u)
    assert bool(jnp.isfinite(value).all())
    assert abs(value[2]) > 0 and abs(value[3]) > 0


def test_soft_topk_through_the_gate_has_finite_gradients_at_any_sharpness():
    scores = jnp.array([[0.0, -1.0, -50.0, -1e9]])

    @jax.jit
    @jax.grad
    def grad(scores, temperature):
        alpha = policy.soft_topk(scores, 2.0, temperature)
        gated = policy.noise_gate(jax.random.key(0), jnp.ones((1, 4, 8)), alpha)
        return jnp.sum(gated**2)

    for temperature in (1e-3, 0.3, 10.0):
        assert bool(jnp.isfinite(grad(scores, temperature)).all())
