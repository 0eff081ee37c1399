"""A stored trajectory and a stored loss curve catch drift that no other test names.

After a deliberate change, `python tests/policy/test_golden.py` writes golden.json anew; the diff
belongs in the commit that explains it.
"""

import json
import pathlib

import cases
import jax
import jax.numpy as jnp
import marker_world
import numpy as np
import pytest

from stepprune_jax import policy
from stepprune_jax.policy import PolicyConfig

GOLDEN = pathlib.Path(__file__).with_name("golden.json")
CONFIGS = {
    "default": cases.plain_config(feature_width=16, text_width=12, num_heads=4, decoder_layers=2),
    "literal": PolicyConfig.literal(
        feature_width=16, text_width=12, num_heads=4, polarisation_temperature=1.0
    ),
}


def trajectory(name):
    config = CONFIGS[name]
    params = policy.init_policy(jax.random.key(0), config)
    params["decoder"]["pointer"]["query"]["kernel"] *= 4  # margins well above rounding
    image = jax.random.normal(jax.random.key(1), (3, 20, 16))
    text = jax.random.normal(jax.random.key(2), (3, 4, 12))

    @jax.jit
    def run(params, image, text):
        slots = policy.memory(params, policy.encode(params, config, image, text))
        t = policy.select(params, config, slots, stop_bias=1.5)
        return t, policy.trajectory_scores(config, t)

    t, scores = run(params, image, text)
    return {
        "action": t.action.tolist(),
        "count": t.count.tolist(),
        "stop_prob": t.stop_prob.tolist(),
        "scores": scores.tolist(),
    }


def loss_curve(name):
    config = (
        cases.plain_config(feature_width=32, text_width=32, num_heads=4, decoder_layers=1)
        if name == "default"
        else PolicyConfig.literal(
            feature_width=32,
            text_width=32,
            num_heads=4,
            decoder_layers=1,
            polarisation_temperature=1.0,
        )
    )
    world, params = marker_world.make_world(32), policy.init_policy(jax.random.key(0), config)
    everything = jnp.ones((16, 24), bool)

    @jax.jit
    def step(params, key):
        draw_key, gate_key = jax.random.split(key)
        batch = marker_world.draw_batch(draw_key, world, 16, 24)

        def loss(params):
            return policy.train_loss(
                params,
                config,
                gate_key,
                batch.image,
                batch.text,
                lambda tokens: marker_world.reader_loss(world, tokens, everything, batch),
                running_count=8.0,
            )[0]

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 3e-3 * g, params, grads), value

    losses = []
    for i in range(20):
        params, value = step(params, jax.random.key(i))
        losses.append(float(value))
    return losses


@pytest.mark.parametrize("name", CONFIGS)
def test_trajectory_is_the_stored_one(name):
    stored, found = json.loads(GOLDEN.read_text())["trajectory"][name], trajectory(name)
    assert found["action"] == stored["action"] and found["count"] == stored["count"]
    for field in ("stop_prob", "scores"):
        np.testing.assert_allclose(found[field], stored[field], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_curve_is_the_stored_one(name):
    stored = json.loads(GOLDEN.read_text())["loss"][name]
    np.testing.assert_allclose(loss_curve(name), stored, rtol=2e-3)


if __name__ == "__main__":
    golden = {
        "trajectory": {name: trajectory(name) for name in CONFIGS},
        "loss": {name: loss_curve(name) for name in CONFIGS},
    }
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
