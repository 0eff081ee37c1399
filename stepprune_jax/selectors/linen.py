"""A selector as a module of Flax Linen; `stepprune_jax.selectors.nnx` has the same for NNX."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import unfreeze
from jaxtyping import Array, Float

from stepprune_jax.policy import FeatureStats, Pruned
from stepprune_jax.policy.params import draw_params
from stepprune_jax.selectors.policy import Policy


class LinenPolicy(nn.Module):
    """Prunes image tokens by a policy, within a module of Linen.

    The collection "params" is the tree `Policy.params`, each weight with the names of its logical
    axes "embed", "heads" and "hidden"; "stats" has the statistics of the features and the stop
    bias, which change in no step of training. Those of a trained policy are `variables(policy)`.

    Attributes:
        method: the policy without its weights, such as `policy.without_weights` or
            `StepPrune(config=config)`.
    """

    method: Policy

    def setup(self):
        """Defines the variables."""

        def draw(key: Array, specs: Any) -> Any:
            def named(value: Array, spec: Any) -> nn.LogicallyPartitioned:
                return nn.LogicallyPartitioned(value, spec.axes)

            return jax.tree.map(named, draw_params(key, specs, method.param_dtype), specs)

        method, width = self.method, self.method.config.feature_width
        specs = method.specs()
        self.weights = {name: self.param(name, draw, part) for name, part in specs.items()}
        self.stats = self.variable("stats", "features", FeatureStats.start, width)
        self.stop_bias = self.variable("stats", "stop_bias", jnp.zeros, ())

    @property
    def policy(self) -> Policy:
        """The policy with the weights as they are; of a bound module."""
        # Linen freezes the dicts of its attributes.
        return self.method.replace(
            params=unfreeze(self.weights),
            stats=self.stats.value,
            stop_bias=self.stop_bias.value,
        )

    def __call__(self, *args: Any, **keywords: Any) -> Pruned:
        """Chooses and gathers tokens with static shapes; see `Policy.select`."""
        return self.policy.select(*args, **keywords)

    def train_loss(self, *args: Any, **keywords: Any) -> tuple[Float[Array, ""], Any]:
        """Computes the training objective, as `apply(..., method="train_loss")`; see `Policy`."""
        return self.policy.train_loss(*args, **keywords)


def variables(policy: Policy) -> dict[str, Any]:
    """Returns the variables of a `LinenPolicy` with the weights of a policy."""
    stats = policy.stats or FeatureStats.start(policy.config.feature_width)
    fixed = {"features": stats, "stop_bias": jnp.float32(policy.stop_bias)}
    return {"params": policy.params, "stats": fixed}
