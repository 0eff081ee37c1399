"""A policy as a Flax NNX module, whose weights are parameters of the surrounding model."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from stepprune_jax.policy import Pruned
from stepprune_jax.selectors.policy import Policy


class NNXPolicy(nnx.Module):
    """Prunes image tokens with a policy, as a submodule of an NNX model.

    It is created from a policy with randomly initialized or loaded weights::

        selector = NNXPolicy(StepPrune.init(rngs.params(), config, stats))
        selector = NNXPolicy(load_policy("policy.safetensors"))

    Each weight is an `nnx.Param` whose `out_sharding` names its logical axes "embed", "heads" and
    "hidden", as in `partition_rules`. Statistics and stop bias are `nnx.BatchStat`s, because
    training does not change them. `nnx.grad`, `nnx.split` and checkpoints treat the module like any
    other module.
    """

    def __init__(self, policy: Policy):
        def make_param(value: Array, spec: Any) -> nnx.Param:
            # The surrounding model shards the weights, possibly before there is a mesh.
            return nnx.Param(value, out_sharding=spec.axes, eager_sharding=False)

        self.params = nnx.data(jax.tree.map(make_param, policy.params, policy.specs()))
        constants = (policy.stats, jnp.float32(policy.stop_bias))
        self.fixed = nnx.data(jax.tree.map(nnx.BatchStat, constants))
        self.method = policy.replace(params=None, stats=None, stop_bias=0.0)

    @property
    def policy(self) -> Policy:
        """The policy with the current weights, to save, diagnose or calibrate."""
        params, (stats, stop_bias) = jax.tree.map(
            lambda leaf: leaf[...],
            (self.params, self.fixed),
            is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
        )
        return self.method.replace(params=params, stats=stats, stop_bias=stop_bias)

    def __call__(self, *args: Any, **keywords: Any) -> Pruned:
        """Chooses and gathers tokens with static shapes; see `Policy.select`."""
        return self.policy.select(*args, **keywords)

    def train_loss(self, *args: Any, **keywords: Any) -> tuple[Float[Array, ""], Any]:
        """Computes `Policy.train_loss`, which `nnx.grad` can differentiate."""
        return self.policy.train_loss(*args, **keywords)
