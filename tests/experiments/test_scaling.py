import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies.scaling import ScaledGate
from stepprune_jax import load_policy
from stepprune_jax.checkpoints.policy import save_policy
from stepprune_jax.policy import Inputs, PolicyConfig, Progress, gate, init_policy
from stepprune_jax.trained import StepPrune

CONFIG = PolicyConfig(feature_width=4, text_width=0, num_heads=2)


@pytest.mark.slow
def test_tokens_are_scaled_by_their_gate_in_training():
    key, image = jax.random.key(0), jax.random.normal(jax.random.key(1), (2, 6, 4))
    mask = jnp.arange(6) < jnp.array([[6], [4]])
    inputs, params = Inputs(image, image_mask=mask), init_policy(key, CONFIG)
    policy, seen = ScaledGate(params=params, config=CONFIG), []

    def lm_loss(tokens):
        seen.append(tokens)
        return jnp.sum(tokens**2)

    loss, aux = policy.loss(key, inputs, lm_loss, Progress())
    alpha = gate(params, CONFIG, key, inputs).alpha
    # The denoiser starts as the identity.
    np.testing.assert_allclose(seen[0], jnp.where(mask, alpha, 0)[..., None] * image, rtol=1e-6)
    assert alpha[0].min() > 0 and alpha[0].max() < 1
    np.testing.assert_allclose(aux.metrics["lm_loss"], jnp.sum(seen[0] ** 2), rtol=1e-6)
    assert loss > aux.metrics["lm_loss"]  # tokens have a price


def test_what_it_has_learned_is_a_policy_like_any_other(tmp_path):
    learned = ScaledGate(params=init_policy(jax.random.key(0), CONFIG), config=CONFIG)
    path = save_policy(learned, tmp_path / "policy.safetensors")
    assert type(load_policy(path)) is StepPrune
