"""A selector as a module of Flax NNX: a policy whose weights are parameters of the host's model."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from stepprune_jax.policy import Pruned
from stepprune_jax.selectors.policy import Policy


class NNXPolicy(nnx.Module):
    """Prunes image tokens by a policy, within a module of NNX.

    It is made of a policy, whose weights are drawn, or loaded, as always::

        selector = NNXPolicy(StepPrune.init(rngs.params(), config, stats))
        selector = NNXPolicy(load_policy("policy.safetensors"))

    Each weight is an `nnx.Param` whose `out_sharding` names its logical axes "embed", "heads" and
    "hidden", as in `partition_rules`. Statistics and stop bias are an `nnx.BatchStat`: they change
    in no step of training. So `nnx.grad`, `nnx.split` and checkpoints treat it as any module.
    """

    def __init__(self, policy: Policy):
        def param(value: Array, spec: Any) -> nnx.Param:
            # Sharded by the host: there need not be a mesh yet.
            return nnx.Param(value, out_sharding=spec.axes, eager_sharding=False)

        self.params = nnx.data(jax.tree.map(param, policy.params, policy.specs()))
        fixed = (policy.stats, jnp.float32(policy.stop_bias))
        self.fixed = nnx.data(jax.tree.map(nnx.BatchStat, fixed))
        self.method = policy.replace(params=None, stats=None, stop_bias=0.0)

    @property
    def policy(self) -> Policy:
        """The policy with the weights as they are: to be saved, diagnosed, calibrated."""
        parts = (self.params, self.fixed)
        params, (stats, stop_bias) = jax.tree.map(
            lambda leaf: leaf[...], parts, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
        )
        return self.method.replace(params=params, stats=stats, stop_bias=stop_bias)

    def __call__(self, *args: Any, **keywords: Any) -> Pruned:
        """Chooses and gathers tokens with static shapes; see `Policy.select`."""
        return self.policy.select(*args, **keywords)

    def train_loss(self, *args: Any, **keywords: Any) -> tuple[Float[Array, ""], Any]:
        """Computes the training objective, to be differentiated by `nnx.grad`; see `Policy`."""
        return self.policy.train_loss(*args, **keywords)
