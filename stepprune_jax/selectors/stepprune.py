"""StepPrune as a pruner: a pointer decoder chooses tokens one by one, with a learned stop."""

from __future__ import annotations

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
    Picks,
    PolicyConfig,
    Progress,
    SampledSubsets,
    StopPrice,
    WarmStart,
)
from stepprune_jax.policy.budget import draw_log_prices
from stepprune_jax.policy.gathering import as_arrays
from stepprune_jax.policy.jax_settings import AnyKey
from stepprune_jax.policy.objective import pointer_entropy
from stepprune_jax.policy.params import param_specs
from stepprune_jax.policy.rollout import max_steps_per_row
from stepprune_jax.policy.trajectory import count_at_bias
from stepprune_jax.pruning.base import Kept, PrunerInputs, Ranking
from stepprune_jax.pruning.budget import EXACT
from stepprune_jax.pruning.packing import from_picks, take_first
from stepprune_jax.selectors.base import Aux, Weights, zeros_last
from stepprune_jax.selectors.policy import Policy


@dataclasses.dataclass(frozen=True)
class StepPrune(Policy):
    """Keeps the tokens that a trained pointer policy chooses, one by one, up to a learned stop.

    From random weights to a file and back, with `import stepprune_jax as sp`::

        policy = sp.StepPrune.init(key, config, stats)  # randomly initialized weights
        pruned = policy.prune(image, text)  # the kept tokens; inside jit: policy.select
        loss, aux = policy.train_loss(key, image, text, lm_loss_fn)  # or policy.rloo_loss
        sp.save_policy(policy, "policy.safetensors")
        policy = sp.load_policy("policy.safetensors")

    `Policy` describes these functions and their arguments.

    Attributes:
        budget: an exact count or fraction; a mean count, which needs a calibration; or "adaptive"
            for the learned stop, which None selects as well.
        params: the weights; None before training.
        config: configuration of the policy.
        stats: statistics of the training features; None if the features are not standardized.
        stop_bias: number that is added to the stop logits; a higher number keeps fewer tokens.
        calibration: table of stop biases and mean counts; None if it was not measured.
        group: number of tokens per pointer distribution; None for the configuration's number.
        seed: seed of the sampled tokens.
        draw: sampling temperature, 0 for no sampling; None for the configuration's temperature.
    """

    config: PolicyConfig = dataclasses.field(default_factory=PolicyConfig, kw_only=True)
    group: int | None = None
    seed: int = 0
    draw: float | None = None

    name = "stepprune"
    label = "StepPrune"
    budgets: ClassVar[tuple[str, ...]] = (*EXACT, "mean", "adaptive")
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
        """Returns the specifications of the weights of `policy.init_policy`."""
        return param_specs(self.config)

    def init_state(self) -> Any:
        """Returns the running mean of K if `soft_budget` is "batch_mean"; () otherwise."""
        return jnp.zeros(()) if self.config.soft_budget == "batch_mean" else ()

    def loss(
        self,
        key: Array,
        inputs: Inputs,
        lm_loss_fn: Callable[[Float[Array, "b n d"]], Float[Array, ""]],
        progress: Progress,
        **options: Any,
    ) -> tuple[Float[Array, ""], Aux]:
        """Computes the training objective through the noise gate, as `Selector.loss` describes.

        Further keyword arguments are passed to `policy.train_loss`.
        """
        loss, aux = policy.train_loss(
            self.params, self.config, key, inputs, lm_loss_fn, progress=progress, **options
        )
        return loss, Aux(policy.policy_metrics(aux), aux.gated.state)

    def sample_subsets(
        self, inputs: Inputs, limits: Limits, keys: AnyKey, progress: Progress
    ) -> SampledSubsets:
        """Samples subsets of tokens with the pointer policy and its stop; see `policy.sample`.

        Args:
            inputs: image and question.
            limits: bounds on the number of kept tokens of each row.
            keys: [g] PRNG keys, one per subset; consumed.
            progress: progress of training; `text_gate` is used.

        Returns:
            The subsets, with log-probabilities that are differentiable in the weights.
        """
        # A random log-price per row is added to the stop logits; see `PolicyConfig.price_range`.
        # The key of the prices is folded with 2, because folding with 1 may give the second key of
        # a split, and that key samples the stop. The keys are cloned, because jax's check of key
        # reuse counts an indexed key as used.
        price_key = jax.random.fold_in(jax.random.clone(keys)[0], 2)
        num_rows = inputs.image.shape[0]
        return policy.sample(
            self.params,
            self.config,
            inputs,
            limits,
            keys,
            text_gate=progress.text_gate,
            stop_bias=draw_log_prices(price_key, self.config, num_rows),
        )

    def warm_start(self, key: Array, inputs: Inputs, importance: Float[Array, "b n"]) -> WarmStart:
        """Trains the pointer towards the importance of tokens; see `policy.warm_start_loss`."""
        return policy.warm_start_loss(self.params, self.config, key, inputs, importance)

    def price_stop(self, inputs: Inputs, key: Array, progress: Progress) -> StopPrice:
        """Computes the expected price of the learned stop's tokens with `policy.price_stop`."""
        return policy.price_stop(
            self.params, self.config, inputs, key, text_gate=progress.text_gate
        )

    def is_stop(self, path: str) -> bool:
        """Returns True for the stop slot and the hazard layer."""
        return "stop" in path or "hazard" in path

    @property
    def min_tokens(self) -> int:
        """The configuration's minimum number of tokens."""
        return self.config.min_tokens

    @property
    def clips_stop_apart(self) -> bool:
        """True for a hazard: its gradients reach only its weights, and must not scale others."""
        return self.config.stop == "hazard"

    @property
    def encoder_config(self) -> PolicyConfig:
        """The configuration, whose encoder the policy uses."""
        return self.config

    @property
    def pointer_group(self) -> int:
        """The group of the method, or else of the configuration."""
        return self.group or self.config.group

    # Selection.

    def longest(self, num_tokens: int) -> int:
        """Returns T_max for an image of `num_tokens` tokens."""
        return self.config.steps(num_tokens)

    def prepare(self) -> StepPrune:
        """Returns a copy for many calls, with weights cast to the compute dtype."""
        params = policy.cast_weights(self.params, self.config.dtype)
        return super().prepare().replace(params=params)

    def order(
        self, inputs: Inputs, steps: int, key: Array | None = None, **options: Any
    ) -> Ranking:
        """Orders tokens by the pointer policy and records the stop margins.

        A stop margin is the stop logit minus the best token's logit, without `self.stop_bias`.

        Args:
            inputs: image and question.
            steps: length of the order; static.
            key: PRNG key of the sampled tokens; None for a fixed key.
            **options: further keyword arguments of `policy.rank`.

        Returns:
            The first `steps` tokens of the order, and the margin before each of them.
        """
        limits = Limits(max_steps=steps, group=self.group, draw=self.draw)
        ranked = policy.rank(self.params, self.config, inputs, limits, key=key, **options)
        return Ranking(ranked.choice, ranked.margin)

    def as_arrays(self, inputs: Inputs, limits: Limits) -> Limits:
        """Converts the counts of limits to arrays, so that all counts share one program."""
        return as_arrays(self._fill_limits(limits), self.config, *inputs.image.shape[:2])

    def choose(
        self, inputs: Inputs, limits: Limits, key: Array | None = None, **options: Any
    ) -> Picks:
        """Chooses tokens one by one until every row has stopped.

        Args:
            inputs: image and question.
            limits: bounds on the number of kept tokens; an exact budget disables the learned stop.
            key: PRNG key of the sampled tokens; None for a fixed key.
            **options: further keyword arguments of `policy.choose`.

        Returns:
            The kept tokens of each row, in order of choice.
        """
        bias = self.bias if limits.budget is None else 0.0
        limits = self._fill_limits(limits)
        return policy.choose(
            self.params, self.config, inputs, limits, stop_bias=bias, key=key, **options
        )

    def _fill_limits(self, limits: Limits) -> Limits:
        """Fills in the group and the sampling temperature of this object if limits have none."""
        return dataclasses.replace(
            limits,
            group=self.group if limits.group is None else limits.group,
            draw=self.draw if limits.draw is None else limits.draw,
        )

    def open_scores(
        self, inputs: Inputs, budget: int
    ) -> tuple[Float[Array, "b n"], Float[Array, ""]]:
        """Returns the scores of Eq. (11), which the gates of training are computed from.

        Also returns the mean entropy of the pointer; see `Selector.open_scores`.
        """
        limits = Limits(budget=budget, draw=0.0)  # `policy.gate` does not sample tokens
        trajectory = policy.select(self.params, self.config, inputs, limits)
        return policy.trajectory_scores(self.config, trajectory), pointer_entropy(trajectory)

    def rank(self, view: PrunerInputs, steps: int) -> Ranking:
        """Orders the tokens of a pruner's inputs, and records the stop margins.

        An infinite margin always stops a row: margins are infinite from each row's T_max on.
        """
        order, margin = super().rank(view, steps)
        max_steps = max_steps_per_row(self.config, jnp.sum(self.inputs(view).real, axis=1))
        is_before_end = jnp.arange(order.shape[1]) < max_steps[:, None]
        return Ranking(order, jnp.where(is_before_end, jnp.asarray(margin), jnp.inf))

    def counts(self, ranking: Ranking, exact: Int[ArrayLike, "r"]) -> Int[ArrayLike, "r"]:
        """Returns the number of tokens to keep of each row: `exact`, or by the learned stop."""
        if self.budget.is_exact:
            return exact
        min_tokens = min(self.min_tokens, ranking.order.shape[1])
        return count_at_bias(jnp.asarray(ranking.margin), self.bias, min_tokens)

    def keep(self, view: PrunerInputs, capacity: int) -> Kept:
        """Chooses the tokens to keep, and packs them to `capacity` slots.

        With an exact budget, zero vectors are kept only after all other tokens.
        """
        inputs, key = self.inputs(view), view.keys(self.seed)
        if not self.budget.is_exact:
            picks = self.choose(inputs, Limits(), key)
            return from_picks(view.whole, picks, capacity)
        # Steps beyond the capacity choose no token that is kept.
        steps = min(self.config.steps(view.tokens.shape[1]), capacity)
        picks = self.choose(inputs, Limits(max_steps=steps, budget=view.count), key)
        order = zeros_last(picks.action, inputs.image_mask)
        return take_first(view.whole, order, view.count, capacity)
