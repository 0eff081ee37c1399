"""StepPrune as a pruner: a pointer decoder picks tokens one by one and stops by itself."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from stepprune_jax import policy
from stepprune_jax.policy import (
    Inputs,
    Limits,
    OwnStop,
    Picks,
    PolicyConfig,
    Progress,
    SampledSubsets,
)
from stepprune_jax.policy.budget import draw_log_prices
from stepprune_jax.policy.gathering import as_arrays
from stepprune_jax.policy.jax_settings import AnyKey
from stepprune_jax.policy.objective import pointer_entropy
from stepprune_jax.policy.params import param_specs
from stepprune_jax.policy.rollout import longest
from stepprune_jax.policy.trajectory import count_at_bias
from stepprune_jax.pruning.base import Kept, PrunerInputs, Ranking, from_picks, take_first
from stepprune_jax.pruning.budget import EXACT
from stepprune_jax.selectors.base import Aux, Weights, zeros_last
from stepprune_jax.selectors.policy import Policy


@dataclasses.dataclass(frozen=True)
class StepPrune(Policy):
    """Keeps the tokens that a trained policy picks.

    Attributes:
        budget: exact count or share, mean count by its calibration, or "own": its learned stop.
        config: configuration of the policy.
        group: tokens taken from one pointer distribution; None for the policy's own.
        seed: seed of the draws, of a policy that draws its tokens.
        draw: temperature of the draws, 0 for none; None for the policy's own.
    """

    config: PolicyConfig = dataclasses.field(default_factory=PolicyConfig, kw_only=True)
    group: int | None = None
    seed: int = 0
    draw: float | None = None

    name = "stepprune"
    label = "StepPrune"
    budgets: ClassVar[tuple[str, ...]] = (*EXACT, "mean", "own")
    has_stop: ClassVar[bool] = True
    samples_subsets: ClassVar[bool] = True
    config_type: ClassVar[type | None] = PolicyConfig
    version: ClassVar[int] = 3
    choice_options: ClassVar[tuple[str, ...]] = ("key", "decoder")
    loss_options: ClassVar[tuple[str, ...]] = ("length_weight", "decoder")

    def __post_init__(self):
        super().__post_init__()
        self.expect("group", self.group is None or self.group >= 1, "an integer from 1")

    # Training.

    def specs(self) -> Weights:
        """Returns the table of `policy.init_policy`."""
        return param_specs(self.config)

    def init_state(self) -> Any:
        """Returns the running mean of K if a reading of the paper asks for it."""
        return jnp.zeros(()) if self.config.soft_budget == "batch_mean" else ()

    def loss(
        self,
        key: Array,
        inputs: Inputs,
        lm_loss_fn: Callable[[Float[Array, "b n d"]], Float[Array, ""]],
        progress: Progress,
        **options: Any,
    ) -> tuple[Float[Array, ""], Aux]:
        """Computes `policy.train_loss`, which also has the options, and `policy.policy_metrics`."""
        loss, aux = policy.train_loss(
            self.params, self.config, key, inputs, lm_loss_fn, progress=progress, **options
        )
        return loss, Aux(policy.policy_metrics(aux), aux.gated.state)

    def sample_subsets(
        self, inputs: Inputs, limits: Limits, keys: AnyKey, progress: Progress
    ) -> SampledSubsets:
        """Draws as `policy.sample`, at a token price of each row's own; see `price_range`."""
        # Not 1, which may give the same key as the second part of a split, by which draws stop. A
        # clone, because jax's check of key reuse counts a key that is indexed as used.
        price_key = jax.random.fold_in(jax.random.clone(keys)[0], 2)
        rows = inputs.image.shape[0]
        return policy.sample(
            self.params,
            self.config,
            inputs,
            limits,
            keys,
            text_gate=progress.text_gate,
            stop_bias=draw_log_prices(price_key, self.config, rows),
        )

    def price_stop(self, inputs: Inputs, key: Array, progress: Progress) -> OwnStop:
        """Computes `policy.price_stop`."""
        return policy.price_stop(
            self.params, self.config, inputs, key, text_gate=progress.text_gate
        )

    def is_stop(self, path: str) -> bool:
        """Returns True for the stop slot and a hazard's layer."""
        return "stop" in path or "hazard" in path

    @property
    def min_tokens(self) -> int:
        """The configuration's minimum."""
        return self.config.min_tokens

    @property
    def clips_stop_apart(self) -> bool:
        """A hazard's gradients reach only its own weights; their size must not affect the rest."""
        return self.config.stop == "hazard"

    @property
    def encoder_config(self) -> PolicyConfig:
        """The configuration itself."""
        return self.config

    @property
    def pointer_group(self) -> int:
        """The method's own group, or the configuration's."""
        return self.group or self.config.group

    # Selection.

    def longest(self, num_tokens: int) -> int:
        """Returns T_max."""
        return self.config.steps(num_tokens)

    def prepare(self) -> "StepPrune":
        """Also casts the weights to the compute dtype."""
        params = policy.cast_weights(self.params, self.config.dtype)
        return super().prepare().replace(params=params)

    def order(
        self, inputs: Inputs, steps: int, key: Array | None = None, **options: Any
    ) -> Ranking:
        """Rolls the policy out past its stop, recording margins without the bias."""
        limits = Limits(max_steps=steps, group=self.group, draw=self.draw)
        ranked = policy.rank(self.params, self.config, inputs, limits, key=key, **options)
        return Ranking(ranked.choice, ranked.margin)

    def as_arrays(self, inputs: Inputs, limits: Limits) -> Limits:
        """Returns limits whose counts are arrays, so that all of them share a program."""
        return as_arrays(self._own(limits), self.config, *inputs.image.shape[:2])

    def choose(
        self, inputs: Inputs, limits: Limits, key: Array | None = None, **options: Any
    ) -> Picks:
        """Picks tokens until every row has stopped; see `policy.choose`, which has the options."""
        limits, bias = self._own(limits), self.bias if limits.budget is None else 0.0
        return policy.choose(
            self.params, self.config, inputs, limits, stop_bias=bias, key=key, **options
        )

    def _own(self, limits: Limits) -> Limits:
        """Returns limits with the method's own group and temperature, where they have none."""
        group, draw = limits.group, limits.draw
        return dataclasses.replace(
            limits,
            group=self.group if group is None else group,
            draw=self.draw if draw is None else draw,
        )

    def open_scores(
        self, inputs: Inputs, budget: int
    ) -> tuple[Float[Array, "b n"], Float[Array, ""]]:
        """Returns the soft scores of the gate's episode, and the mean entropy of its pointer."""
        limits = Limits(budget=budget, draw=0.0)  # as `gate` rolls out
        trajectory = policy.select(self.params, self.config, inputs, limits)
        return policy.trajectory_scores(self.config, trajectory), pointer_entropy(trajectory)

    def rank(self, view: PrunerInputs, steps: int) -> Ranking:
        """Also makes margins infinite from each row's T_max on, where every row stops."""
        order, margin = super().rank(view, steps)
        assert margin is not None  # `order` records margins
        token_limit = longest(self.config, jnp.sum(self.inputs(view).real, axis=1))
        before_end = jnp.arange(order.shape[1]) < token_limit[:, None]
        return Ranking(order, jnp.where(before_end, margin, jnp.inf))

    def counts(self, ranking: Ranking, exact: Int[ArrayLike, "r"]) -> Int[ArrayLike, "r"]:
        """Returns the exact count, or the count at which the policy stops."""
        if self.budget.is_exact:
            return exact
        least = min(self.min_tokens, ranking.order.shape[1])
        return count_at_bias(jnp.asarray(ranking.margin), self.bias, least)

    def keep(self, view: PrunerInputs, capacity: int) -> Kept:
        """Chooses the tokens of a view; an exact budget keeps vectors of zeros after all others."""
        exact, inputs = self.budget.is_exact, self.inputs(view)
        steps = min(self.config.steps(view.tokens.shape[1]), capacity)  # none is kept past these
        limits = Limits(max_steps=steps, budget=view.count) if exact else Limits()
        picks = self.choose(inputs, limits, view.keys(self.seed))
        if not exact:
            return from_picks(view.whole, picks, capacity)
        order = zeros_last(picks.action, inputs.image_mask)
        return take_first(view.whole, order, view.count, capacity)
