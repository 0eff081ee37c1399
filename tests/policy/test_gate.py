"""Properties of SoftTopK and of the noise gate."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stepprune_jax.policy import noise_gate, soft_topk

alpha_of = jax.jit(soft_topk)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    scale=st.floats(-2, 3),
    temperature=st.floats(-3, 1),
    share=st.floats(0.001, 0.999),
    ties=st.booleans(),
)
def test_mass_is_k_and_order_is_kept(seed, scale, temperature, share, ties):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=100)
    scores = (np.round(scores) if ties else scores) * 10**scale
    where = rng.random(100) < 0.8
    k = np.float32(share * where.sum())
    alpha = np.asarray(
        alpha_of(scores.astype(np.float32), k, np.float32(10**temperature), where=where)
    )
    np.testing.assert_allclose(alpha.sum(), k, rtol=1e-4, atol=1e-4)
    assert (alpha >= 0).all() and (alpha <= 1).all()
    assert (alpha[~where] == 0).all()
    real = np.flatnonzero(where)
    ordered = alpha[real[np.argsort(scores.astype(np.float32)[real], kind="stable")]]
    assert (np.diff(ordered) >= -1e-5).all()


def test_gradients_are_finite_for_ties_and_masked_scores():
    scores = jnp.array([2.0, 2.0, 2.0, -1e9, -1e9, 0.0])
    where = jnp.array([True, True, True, True, False, False])

    def loss(scores, k, temperature):
        alpha = alpha_of(scores, k, temperature, where=where)
        return jnp.sum(alpha * jnp.arange(6))

    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(scores, 2.0, 1e-3)
    assert all(bool(jnp.isfinite(g).all()) for g in grads)
    # d alpha / d k sums to one over the tokens that can move: here three tied ones, mean index 1.
    np.testing.assert_allclose(grads[1], 1.0, rtol=1e-5)


def test_second_moment_is_kept():
    x = jax.random.normal(jax.random.key(0), (8, 10, 500))
    alpha = jnp.tile(jnp.linspace(0, 1, 10), (8, 1))
    gated = noise_gate(jax.random.key(1), x, alpha)
    moment = jnp.mean(gated**2, axis=(0, 2))
    # 4,000 samples of a chi-square with one degree of freedom: sd sqrt(2 / 4000) = .022.
    np.testing.assert_allclose(moment, jnp.ones(10), atol=4 * 0.0224)


def test_gradient_is_finite_where_alpha_is_exactly_zero_or_one():
    x = jnp.ones((1, 4, 3))
    noise = jnp.full((1, 4, 3), 0.5)

    def loss(u):
        alpha = jnp.stack([jax.nn.sigmoid(u[0]), jax.nn.sigmoid(u[1]), u[2], u[3]])[None]
        return jnp.sum(noise_gate(None, x, alpha, noise=noise) ** 2)

    u = jnp.array([40.0, -200.0, 0.0, 1.0])  # both sigmoids saturate in float32
    value = jax.jit(jax.grad(loss))(u)
    assert bool(jnp.isfinite(value).all())
    assert abs(value[2]) > 0 and abs(value[3]) > 0
