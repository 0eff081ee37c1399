"""A policy as a Flax Linen module; see `stepprune_jax.selectors.nnx` for Flax NNX."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import unfreeze
from jaxtyping import Array, Float

from stepprune_jax.policy import FeatureStats, Pruned
from stepprune_jax.policy.params import init_params
from stepprune_jax.selectors.policy import Policy


class LinenPolicy(nn.Module):
    """Prunes image tokens with a policy, as a submodule of a Linen model.

    The collection "params" is the tree `Policy.params`; each weight names its logical axes "embed",
    "heads" and "hidden". The collection "stats" holds the statistics of the features and the stop
    bias, which training does not change. `variables(policy)` returns the collections of a trained
    policy.

    Attributes:
        method: the policy without weights, such as `policy.without_weights` or
            `StepPrune(config=config)`.
    """

    method: Policy

    def setup(self):
        """Defines the weights, and the constants of the collection "stats"."""

        def init_part(key: Array, specs: Any) -> Any:
            def with_axes(value: Array, spec: Any) -> nn.LogicallyPartitioned:
                return nn.LogicallyPartitioned(value, spec.axes)

            return jax.tree.map(with_axes, init_params(key, specs, method.param_dtype), specs)

        method, width = self.method, self.method.config.feature_width
        specs = method.specs()
        self.weights = {name: self.param(name, init_part, part) for name, part in specs.items()}
        self.stats = self.variable("stats", "features", FeatureStats.start, width)
        self.stop_bias = self.variable("stats", "stop_bias", jnp.zeros, ())

    @property
    def policy(self) -> Policy:
        """The policy with the current weights; needs a bound module."""
        # `unfreeze`, because Linen freezes dicts that are attributes.
        return self.method.replace(
            params=unfreeze(self.weights),
            stats=self.stats.value,
            stop_bias=self.stop_bias.value,
        )

    def __call__(self, *args: Any, **keywords: Any) -> Pruned:
        """Chooses and gathers tokens with static shapes; see `Policy.select`."""
        return self.policy.select(*args, **keywords)

    def train_loss(self, *args: Any, **keywords: Any) -> tuple[Float[Array, ""], Any]:
        """Computes `Policy.train_loss`; call it with `apply(..., method="train_loss")`."""
        return self.policy.train_loss(*args, **keywords)


def variables(policy: Policy) -> dict[str, Any]:
    """Returns the variables of a `LinenPolicy`, with the weights of a policy."""
    features = policy.stats or FeatureStats.start(policy.config.feature_width)
    stats = {"features": features, "stop_bias": jnp.float32(policy.stop_bias)}
    return {"params": policy.params, "stats": stats}
