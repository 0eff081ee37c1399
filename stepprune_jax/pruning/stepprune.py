"""StepPrune as a pruner: a pointer decoder picks tokens one by one and stops by itself."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from stepprune_jax import policy
from stepprune_jax.policy import Draw, Inputs, Limits, Picks, PolicyConfig, Progress, Pruned
from stepprune_jax.policy.budget import draw_log_prices
from stepprune_jax.policy.host import AnyKey
from stepprune_jax.policy.objective import pointer_entropy
from stepprune_jax.policy.params import param_specs
from stepprune_jax.policy.rollout import longest
from stepprune_jax.policy.trajectory import count_at_bias, log_price_growth
from stepprune_jax.pruning.base import Kept, Pruner, Ranking, Trained, View, from_picks
from stepprune_jax.pruning.budget import EXACT, Budget
from stepprune_jax.pruning.trained import TrainedMethod, Weights


@dataclasses.dataclass(frozen=True)
class StepPrune(TrainedMethod):
    """Keeps the tokens that a trained policy picks.

    Attributes:
        config: configuration of the policy.
        group: tokens taken from one pointer distribution; None for the policy's own.
        seed: seed of the draws, of a policy that draws its tokens.
        draw: temperature of the draws, 0 for none; None for the policy's own.
    """

    config: PolicyConfig = dataclasses.field(default_factory=PolicyConfig)
    group: int | None = None
    seed: int = 0
    draw: float | None = None

    name = "stepprune"
    label = "StepPrune"
    budgets: ClassVar[tuple[str, ...]] = (*EXACT, "mean", "own")
    has_stop: ClassVar[bool] = True
    config_type: ClassVar[type | None] = PolicyConfig
    version: ClassVar[int] = 2

    def __post_init__(self):
        super().__post_init__()
        self.require("group", self.group is None or self.group >= 1, "an integer from 1")

    # Training.

    def specs(self) -> Weights:
        """The table of `policy.init_policy`."""
        return param_specs(self.config)

    def train_loss(
        self,
        weights: Weights,
        key: Array,
        inputs: Inputs,
        lm_loss_fn: Callable[[Float[Array, "b n d"]], Float[Array, ""]],
        progress: Progress,
        **options: Any,
    ) -> tuple[Float[Array, ""], tuple[dict[str, Float[Array, ""]], Float[Array, ""]]]:
        """As `policy.train_loss`, which also has the options, and `policy.policy_metrics`."""
        given = (weights, self.config, key, inputs, lm_loss_fn)
        loss, aux = policy.train_loss(*given, progress=progress, **options)
        return loss, (policy.policy_metrics(aux), aux.gated.running_count)

    def sample(
        self,
        weights: Weights,
        inputs: Inputs,
        limits: Limits,
        keys: AnyKey,
        progress: Progress,
    ) -> tuple[Draw, Float[Array, "g b"]]:
        """As `policy.sample`, at a token price of each row's own; see `price_range`."""
        # Not 1, which may give the same key as the second part of a split, by which draws stop.
        price_key, size = jax.random.fold_in(keys[0], 2), jnp.sum(inputs.real, axis=1)
        log_price = draw_log_prices(price_key, self.config, len(size))
        how = {"text_gate": progress.text_gate, "stop_bias": log_price}
        draw = policy.sample(weights, self.config, inputs, limits, keys, **how)
        count, growth = draw.picks.count, self.config.price_growth
        # The integral of a price that grows to that of the last token.
        last = jnp.exp(log_price + log_price_growth(self.config, count, size))
        scale = jnp.maximum(size, 1) * (growth + 1)
        return draw, self.config.length_weight * last * count / scale

    def is_stop(self, path: str) -> bool:
        """The stop slot, and a hazard's layer."""
        return "stop" in path or "hazard" in path

    @property
    def least(self) -> int:
        """The configuration's minimum."""
        return self.config.min_tokens

    @property
    def clips_stop_apart(self) -> bool:
        """A hazard's gradients reach only its own weights; their size must not affect the rest."""
        return self.config.stop == "hazard"

    @property
    def shape(self) -> PolicyConfig:
        """The configuration itself."""
        return self.config

    def pointer_steps(self, count: int) -> int:
        """One for each group of tokens."""
        return -(-count // (self.group or self.config.group))

    # Selection.

    def most(self, num_tokens: int) -> int:
        """Returns T_max."""
        return self.config.steps(num_tokens)

    def program(self) -> Pruner:
        """Removes the budget: exact counts are read from the view, a learned stop from the bias."""
        kind = "all" if self.budget.is_exact else "own"
        return dataclasses.replace(self, budget=Budget(kind))

    def prepare(self, weights: Weights) -> Weights:
        """Casts the weights to the compute dtype."""
        return policy.cast_weights(weights, self.config.dtype)

    def order(
        self,
        weights: Weights,
        inputs: Inputs,
        steps: int,
        key: Array | None = None,
        **options: Any,
    ) -> Ranking:
        """Rolls the policy out past its stop, recording margins without the bias."""
        limits = Limits(max_steps=steps, group=self.group)
        ranked = policy.rank(weights, self.config, inputs, limits, key=key, **options)
        return Ranking(ranked.choice, ranked.margin)

    def choose(
        self,
        weights: Weights,
        inputs: Inputs,
        limits: Limits,
        stop_bias: ArrayLike = 0.0,
        key: Array | None = None,
        **options: Any,
    ) -> Picks:
        """As `policy.choose`: runs the loop until every row has stopped."""
        options |= {"stop_bias": stop_bias, "key": key}
        return policy.choose(weights, self.config, inputs, limits, **options)

    def prune(self, weights: Weights, inputs: Inputs, limits: Limits, **options: Any) -> Pruned:
        """As `policy.prune`."""
        return policy.prune(weights, self.config, inputs, limits, **options)

    def opened(
        self, weights: Weights, inputs: Inputs, budget: int
    ) -> tuple[Float[Array, "b n"], Float[Array, ""]]:
        """The soft scores of the gate's episode, and the mean entropy of its pointer."""
        best = dataclasses.replace(self.config, draw=0.0)  # as `gate` rolls out
        trajectory = policy.select(weights, best, inputs, Limits(budget=budget))
        return policy.trajectory_scores(self.config, trajectory), pointer_entropy(trajectory)

    def counts(
        self, params: Trained, ranking: Ranking, exact: Int[ArrayLike, "r"]
    ) -> Int[ArrayLike, "r"]:
        """Returns the exact count, or the count at which the policy stops."""
        if self.budget.is_exact:
            return exact
        least = min(self.least, ranking.order.shape[1])
        count = count_at_bias(jnp.asarray(ranking.margin), params.stop_bias, least)
        return jnp.minimum(count, longest(self.config, jnp.asarray(exact)))

    def select(self, params: Trained, view: View, capacity: int) -> Kept:
        """Chooses the tokens of a view."""
        exact = self.budget.is_exact
        limits = Limits(budget=view.count if exact else None, group=self.group)
        how = (limits, 0.0 if exact else params.stop_bias, view.keys(self.seed))
        picks = self.choose(params.weights, self.inputs(params, view), *how)
        return from_picks(view.tokens, picks, capacity)
