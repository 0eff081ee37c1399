"""Initial values, abstract shapes and sharding rules agree with the parameter specifications."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from stepprune_jax import policy
from stepprune_jax.policy import Inputs, PolicyConfig
from stepprune_jax.policy import params as policy_params

CONFIGS = [
    PolicyConfig(feature_width=16, text_width=12, num_heads=4),
    PolicyConfig(feature_width=16, text_width=0, num_heads=4, width=8, decoder_layers=1),
    PolicyConfig.literal(feature_width=8, text_width=4, num_heads=2, decoder_layers=3),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_init_has_the_abstract_shapes_and_each_weight_exactly_one_rule(config):
    params = policy.init_policy(jax.random.key(0), config)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, policy.abstract_policy(config))
    assert all(leaf.dtype == jnp.float32 and not leaf.weak_type for leaf in jax.tree.leaves(params))
    rules = policy.partition_rules(config, {"embed": "fsdp", "hidden": "tensor"})
    for path in policy_params.param_paths(params):
        assert sum(bool(re.search(pattern, path)) for pattern, _ in rules) == 1


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_each_weight_is_a_scaled_normal_sample_of_a_separate_key(make_key, caplog):
    """Published results depend on the initial values of a seed."""
    config, key = PolicyConfig(feature_width=20, text_width=0, num_heads=4, width=8), make_key(5)
    with jax.log_compiles():
        params = policy.init_policy(key, config)
    compiled = [text for text in caplog.messages if "Finished XLA compilation" in text]
    assert len(compiled) == 1, compiled
    leaves = jax.tree.leaves(policy_params.param_specs(config), is_leaf=policy_params._is_spec)
    keys = jax.random.split(key, len(leaves))
    for key, spec, weight in zip(keys, leaves, jax.tree.leaves(params), strict=True):
        std = {"fan_in": spec.shape[0] ** -0.5, "token": 0.02}.get(spec.init, 0.0)
        expected = std * jax.random.normal(key, spec.shape) + (spec.init == "ones")
        np.testing.assert_array_equal(weight, expected)


@pytest.mark.slow
def test_sharded_weights_give_the_same_loss():
    config = CONFIGS[0]
    params = policy.init_policy(jax.random.key(0), config)
    image = jax.random.normal(jax.random.key(1), (4, 10, 16))
    text = jax.random.normal(jax.random.key(2), (4, 3, 12))

    @jax.jit
    def loss(params, image, text):
        return policy.train_loss(
            params, config, jax.random.key(3), Inputs(image, text), lambda x: jnp.mean(x**2)
        )[0]

    expected = loss(params, image, text)
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    axes = {"embed": "fsdp", "hidden": "tensor", "heads": "tensor"}
    specs = [spec for _, spec in policy.partition_rules(config, axes)]
    leaves, treedef = jax.tree.flatten(params)
    sharded_params = treedef.unflatten(
        jax.device_put(leaf, NamedSharding(mesh, spec))
        for leaf, spec in zip(leaves, specs, strict=True)
    )
    assert not sharded_params["decoder"]["pointer"]["key"]["kernel"].is_fully_replicated
    sharded = loss(sharded_params, jax.device_put(image, rows), jax.device_put(text, rows))
    np.testing.assert_allclose(sharded, expected, rtol=1e-5)


def test_weights_that_are_cast_once_give_bitwise_equal_results():
    config = PolicyConfig(
        feature_width=16, text_width=12, width=8, num_heads=2, decoder_layers=2, dtype="bfloat16"
    )
    params = policy.init_policy(jax.random.key(0), config)
    cast = policy.cast_weights(params, config.dtype)
    leaves = zip(policy_params.param_paths(cast), jax.tree.leaves(cast), strict=True)
    cast_paths = {path for path, leaf in leaves if leaf.dtype == jnp.bfloat16}
    # Dense layers are cast. Norms, the clock and single tokens keep their precision.
    assert {"kernel", "bias"} == {path.rpartition("/")[2] for path in cast_paths}
    assert not any("norm" in path or "read" in path for path in cast_paths)
    assert "encoder/text_projection/kernel" in cast_paths and "denoiser/value/kernel" in cast_paths
    kernels = {path for path in policy_params.param_paths(params) if path.endswith("kernel")}
    assert kernels <= cast_paths

    normal, rank = jax.random.normal, jax.jit(policy.rank)
    inputs = Inputs(normal(jax.random.key(1), (2, 6, 16)), normal(jax.random.key(2), (2, 3, 12)))
    actual, expected = (rank(weights, config, inputs) for weights in (cast, params))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert policy.cast_weights(params, None) is params
