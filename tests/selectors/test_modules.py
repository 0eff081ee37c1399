"""NNX and Linen modules give the results of the policy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec

import stepprune_jax as sp
from stepprune_jax.registry import selector_of
from stepprune_jax.selectors import AutoSelectConfig
from stepprune_jax.selectors import linen as sp_linen
from stepprune_jax.selectors import nnx as sp_nnx

IMAGE = 3 + 2 * jax.random.normal(jax.random.key(0), (3, 12, 16))
TEXT = jax.random.normal(jax.random.key(1), (3, 4, 8))
WIDTHS = {"feature_width": 16, "text_width": 8, "width": 8, "num_heads": 2, "encoder_layers": 1}
CONFIG = sp.PolicyConfig(**WIDTHS)


def new_policy(config=CONFIG):
    stats = sp.update_stats(sp.FeatureStats.start(16), IMAGE)
    method = type(selector_of(config))
    return method.init(jax.random.key(2), config, stats).replace(stop_bias=0.5)


def mean_square(tokens):
    return jnp.mean(tokens**2)


@pytest.mark.parametrize(
    ("config", "how"),
    [(CONFIG, {"budget": 5}), (CONFIG, {}), (AutoSelectConfig(**WIDTHS), {"budget": 5})],
)
def test_modules_keep_what_the_policy_keeps(config, how):
    policy = new_policy(config)
    expected = jax.jit(lambda p: p.select(IMAGE, TEXT, capacity=6, **how))(policy)
    in_nnx = nnx.jit(lambda s: s(IMAGE, TEXT, capacity=6, **how))(sp_nnx.NNXPolicy(policy))
    module, variables = sp_linen.LinenPolicy(policy.without_weights), sp_linen.variables(policy)
    in_linen = jax.jit(lambda v: module.apply(v, IMAGE, TEXT, capacity=6, **how))(variables)
    for pruned in (in_nnx, in_linen):
        jax.tree.map(np.testing.assert_array_equal, pruned, expected)


def test_a_step_of_nnx_changes_only_weights_and_uses_the_policys_gradient():
    policy = new_policy()
    selector = sp_nnx.NNXPolicy(policy)
    optimizer = nnx.Optimizer(selector, optax.sgd(0.1), wrt=nnx.Param)

    def selector_loss(selector):
        return selector.train_loss(jax.random.key(3), IMAGE, TEXT, mean_square)[0]

    @nnx.jit
    def step(selector, optimizer):
        grads = nnx.grad(selector_loss)(selector)
        optimizer.update(selector, grads)
        return grads

    grads = nnx.to_pure_dict(step(selector, optimizer))["params"]

    expected = jax.jit(jax.grad(lambda x: selector_loss(policy.replace(params=x))))(policy.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5), grads, expected)
    after = selector.policy
    jax.tree.map(np.testing.assert_array_equal, after.stats, policy.stats)
    assert after.stop_bias == 0.5
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), after.params, policy.params)
    assert any(jax.tree.leaves(changed))


def test_nnx_splits_merges_shards_and_is_saved_by_orbax(tmp_path):
    policy = new_policy()
    graph, weights, constants = nnx.split(sp_nnx.NNXPolicy(policy), nnx.Param, ...)
    assert len(jax.tree.leaves(weights)) == len(jax.tree.leaves(policy.params))
    specs = nnx.get_partition_spec(weights)["params"]["encoder"]["block_0"]["mlp"]["up"]["kernel"]
    assert specs.get_value() == PartitionSpec("embed", "hidden")
    pure = nnx.to_pure_dict(weights)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "weights", pure)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "weights", jax.tree.map(jnp.zeros_like, pure))
    nnx.replace_by_pure_dict(weights, restored)
    merged = nnx.merge(graph, weights, constants).policy
    jax.tree.map(np.testing.assert_array_equal, merged.params, policy.params)
    path = sp.save_policy(merged, tmp_path / "policy.safetensors")
    assert sp.load_policy(path).config == policy.config


def test_a_linen_module_initialises_names_axes_and_trains():
    module = sp_linen.LinenPolicy(sp.StepPrune(config=CONFIG))
    init = jax.jit(lambda key: module.init(key, IMAGE, TEXT, capacity=6))
    variables = init(jax.random.key(4))
    axes = nn.get_partition_spec(variables)["params"]["encoder"]["block_0"]["mlp"]["up"]["kernel"]
    assert axes == PartitionSpec("embed", "hidden")
    variables = nn.meta.unbox(variables)
    expected = jax.eval_shape(lambda: new_policy().params)
    assert jax.tree.map(jnp.shape, variables["params"]) == jax.tree.map(jnp.shape, expected)

    def loss(params):
        arguments = (variables | {"params": params}, jax.random.key(5), IMAGE, TEXT, mean_square)
        return module.apply(*arguments, method="train_loss")[0]

    grads = jax.jit(jax.grad(loss))(variables["params"])
    norms = [float(jnp.linalg.norm(leaf)) for leaf in jax.tree.leaves(grads)]
    assert np.isfinite(norms).all() and max(norms) > 0


def test_weights_may_be_double_and_statistics_never_are():
    config = dataclasses.replace(CONFIG, dtype="float64")
    with jax.enable_x64(True):
        module, key = sp_linen.LinenPolicy(sp.StepPrune(config=config)), jax.random.key(4)
        variables = jax.eval_shape(lambda: module.init(key, IMAGE, TEXT, capacity=6))
        stats = jax.eval_shape(sp.update_stats, sp.FeatureStats.start(16), IMAGE)
    assert {x.dtype for x in jax.tree.leaves(variables["params"])} == {jnp.dtype("float64")}
    assert {x.dtype for x in stats} == {jnp.dtype("float32")}
