"""StepPrune as a pruner: a pointer decoder picks tokens one by one and stops by itself."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from stepprune_jax import policy
from stepprune_jax.policy import Inputs, Limits, PolicyConfig
from stepprune_jax.policy.trajectory import count_at_bias
from stepprune_jax.pruning.base import Kept, Pruner, Ranker, Ranking, Trained, View
from stepprune_jax.pruning.budget import EXACT, Budget


@dataclasses.dataclass(frozen=True)
class StepPrune(Ranker):
    """Keeps the tokens that a trained policy picks.

    Attributes:
        config: configuration of the policy.
        group: tokens taken from one pointer distribution; None for the policy's own.
    """

    config: PolicyConfig = dataclasses.field(default_factory=PolicyConfig)
    group: int | None = None

    name = "stepprune"
    label = "StepPrune"
    budgets: ClassVar[tuple[str, ...]] = (*EXACT, "mean", "own")
    reads_text: ClassVar[bool] = True
    config_type: ClassVar[type | None] = PolicyConfig

    def __post_init__(self):
        self.require("group", self.group is None or self.group >= 1, "an integer from 1")

    def most(self, num_tokens: int) -> int:
        """Returns T_max."""
        return self.config.steps(num_tokens)

    def program(self) -> Pruner:
        """Removes the budget: exact counts are read from the view, a learned stop from the bias."""
        kind = "all" if self.budget.is_exact else "own"
        return dataclasses.replace(self, budget=Budget(kind))

    def prepare(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Casts the weights to the compute dtype."""
        return policy.cast_weights(weights, self.config.dtype)

    def rank(self, params: Trained, view: View, steps: int) -> Ranking:
        """Rolls the policy out past its stop, recording margins without the bias."""
        limits = Limits(max_steps=steps, group=self.group)
        ranked = policy.rank(params.weights, self.config, self.inputs(params, view), limits)
        return Ranking(ranked.choice, ranked.margin)

    def counts(
        self, params: Trained, ranking: Ranking, exact: Int[ArrayLike, "r"]
    ) -> Int[ArrayLike, "r"]:
        """Returns the exact count, or the count at which the policy stops."""
        if self.budget.is_exact:
            return exact
        least = min(self.config.min_tokens, ranking.order.shape[1])
        count = count_at_bias(jnp.asarray(ranking.margin), params.stop_bias, least)
        return jnp.minimum(count, self._longest(exact, int(np.max(exact))))

    def select(self, params: Trained, view: View, capacity: int) -> Kept:
        """Runs the loop until every row has stopped."""
        r, n = view.tokens.shape[:2]
        if self.budget.is_exact:
            limits, bias = Limits(budget=view.count, group=self.group), 0.0
        else:
            sizes = jnp.full(r, n) if view.valid is None else view.valid.sum(1)
            limits = Limits(max_tokens=self._longest(sizes, n), group=self.group)
            bias = params.stop_bias
        inputs = self.inputs(params, view)
        picks = policy.choose(params.weights, self.config, inputs, limits, stop_bias=bias)
        pruned = policy.gather(picks, view.tokens, capacity)
        order = jnp.where(picks.action < n, picks.action, -1)[:, :capacity]
        index, tokens, valid, count = pruned
        return Kept(index, jnp.maximum(index, 0), tokens, valid, count, order)

    def _longest(self, sizes: Int[ArrayLike, "r"], n: int) -> Int[Array, "r"]:
        """Returns T_max of each row's image, at most n."""
        table = [min(self.most(size), size) for size in range(n + 1)]
        return jnp.asarray(table, jnp.int32)[sizes]

    def inputs(self, params: Trained, view: View) -> Inputs:
        """Returns what the policy sees."""
        return Inputs(view.tokens, view.text, view.valid, view.text_valid, params.stats)
