"""A selector as a module of Flax Linen; `stepprune_jax.nnx` has the same for NNX."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import unfreeze
from jaxtyping import Array, Float

from stepprune_jax.policy import FeatureStats, Pruned
from stepprune_jax.policy.params import draw_params
from stepprune_jax.pruning import Policy, TrainedConfig, method_of


class Selector(nn.Module):
    """Prunes image tokens by a policy, within a module of Linen.

    The collection "params" is the tree `Policy.params`, each weight with the names of its logical
    axes "embed", "heads" and "hidden"; "stats" has the statistics of the features and the stop
    bias, which change in no step of training. Those of a trained policy are `variables(policy)`.

    Attributes:
        config: configuration of the policy.
    """

    config: TrainedConfig

    def setup(self):
        """Defines the variables."""

        def draw(key: Array, specs: Any) -> Any:
            def named(value: Array, spec: Any) -> nn.LogicallyPartitioned:
                return nn.LogicallyPartitioned(value, spec.axes)

            return jax.tree.map(named, draw_params(key, specs, method.param_dtype), specs)

        method, width = method_of(self.config), self.config.feature_width
        specs = method.specs()
        self.weights = {name: self.param(name, draw, part) for name, part in specs.items()}
        self.stats = self.variable("stats", "features", FeatureStats.start, width)
        self.stop_bias = self.variable("stats", "stop_bias", jnp.zeros, ())

    @property
    def policy(self) -> Policy:
        """The policy with the weights as they are; of a bound module."""
        # Linen freezes the dicts of its attributes.
        return Policy(unfreeze(self.weights), self.config, self.stats.value, self.stop_bias.value)

    def __call__(
        self,
        image: Float[Array, "b n d"],
        text: Float[Array, "b l e"] | None = None,
        *,
        capacity: int,
        budget: int | None = None,
        order: str = "raster",
        **inputs: Any,
    ) -> Pruned:
        """Chooses and gathers tokens with static shapes; see `Policy.select_fn`.

        Args:
            image: image tokens X.
            text: word embeddings of the question.
            capacity: size of the result.
            budget: exact count of each row. Without one the policy stops by itself.
            order: order of the kept tokens.
            **inputs: image_mask, text_mask and key.
        """
        policy = self.policy
        select = policy.select_fn(capacity, budget=budget, order=order)
        return select(policy, image, text, **inputs)

    def train_loss(self, *args: Any, **keywords: Any) -> tuple[Float[Array, ""], Any]:
        """Computes the training objective, as `apply(..., method="train_loss")`; see `Policy`."""
        return self.policy.train_loss(*args, **keywords)


def variables(policy: Policy) -> dict[str, Any]:
    """Returns the variables of a `Selector` with the weights of a policy."""
    stats = policy.stats or FeatureStats.start(policy.config.feature_width)
    fixed = {"features": stats, "stop_bias": jnp.float32(policy.stop_bias)}
    return {"params": policy.params, "stats": fixed}
