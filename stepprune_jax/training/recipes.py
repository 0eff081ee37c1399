"""Recipes: which objective and which optimizer train which updates of a run.

`Run.make_recipe` builds a recipe from the settings of a run. `training.run` asks it for its phases.
"""

import dataclasses
from typing import Any

from stepprune_jax.selectors import RlooSettings
from stepprune_jax.selectors.rloo import SubsetGain
from stepprune_jax.settings import Settings, number, setting
from stepprune_jax.training.objectives import (
    GATE,
    RLOO,
    WARM_START,
    GateObjective,
    Objective,
    RlooObjective,
    WarmStartObjective,
)
from stepprune_jax.training.optimizer import OptimizerSettings

AUTO = "auto"
RECIPES = (GATE, RLOO, WARM_START, AUTO)
# Fraction of the updates that train through the gate, if "auto" begins with the gate. With 0.5 and
# 0.7, some runs switched before a few tokens sufficed for an answer (experiments/RESULTS.md).
GATE_SHARE = 0.8
# Updates of the trial of "auto", as a fraction of the updates of the run.
TRIAL_SHARE = 0.1
# Learning rate of RLOO at a width of 64, tuned in the small world of the experiments. The rate is
# inversely proportional to the width: half the rate worked at twice the width, in one run each.
_RLOO_LR, _RLOO_WIDTH = 1e-3, 64
# Ratio of RLOO's price of a token to the gate's price. RLOO's reward is a probability, and the
# gate's loss is in nats.
_PRICE_FACTOR = 4


def default_lr(config: Any) -> float:
    """Returns the peak learning rate of AdamW for RLOO and the warm start, by the policy's width.

    Args:
        config: configuration of the selector to train.
    """
    return _RLOO_LR * _RLOO_WIDTH / getattr(config, "policy_width", config.feature_width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RlooTraining(RlooSettings, path="config.rloo"):
    """Settings of training by RLOO; the group `rloo` of a configuration.

    Attributes:
        lr: peak learning rate; None selects 1e-3 * 64 / width.
        final_lr: learning rate at the end of the cosine; None selects a tenth of `lr`.
        muon_lr: peak learning rate of Muon, for matrices; 0 leaves all weights to AdamW.
        temperature: sampling temperature in training, and afterwards of the trained policy.
        length_weight: price of a kept token; None selects four times the gate's price.
    """

    lr: float | None = setting(None, "a number above 0, or None", lambda value: value > 0)
    final_lr: float | None = number(None)
    muon_lr: float = number(0.0)
    temperature: float = number(1.0)
    length_weight: float | None = number(None)

    def resolve(self, config: Any) -> "RlooTraining":
        """Replaces None by the default numbers for a selector.

        Args:
            config: configuration of the selector to train.

        Returns:
            The settings, where only `length_weight` may be None: for a selector without a price of
            tokens.
        """
        lr = default_lr(config) if self.lr is None else self.lr
        final_lr = lr / 10 if self.final_lr is None else self.final_lr
        length_weight = self.length_weight
        if length_weight is None and hasattr(config, "length_weight"):
            length_weight = _PRICE_FACTOR * config.length_weight
        return dataclasses.replace(self, lr=lr, final_lr=final_lr, length_weight=length_weight)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStartTraining(Settings, path="config.warm_start"):
    """Settings of the warm start; the group `warm_start` of a configuration.

    Attributes:
        share: fraction of the updates that belong to the warm start; 0 leaves it out.
        lr: peak learning rate; None selects 1e-3 * 64 / width.
    """

    share: float = setting(0.4, "a share from 0, below 1", lambda value: 0 <= value < 1)
    lr: float | None = setting(None, "a number above 0, or None", lambda value: value > 0)


@dataclasses.dataclass(frozen=True)
class Phase:
    """Consecutive updates of a run with one objective and one optimizer.

    Attributes:
        objective: the loss.
        optimizer: settings of the optimizer, whose schedule spans the phase.
        first: number of updates of the run before the phase.
        last: number of updates of the run at the end of the phase.
    """

    objective: Objective
    optimizer: OptimizerSettings
    first: int
    last: int

    @property
    def num_steps(self) -> int:
        """Number of updates in the phase."""
        return self.last - self.first


@dataclasses.dataclass(frozen=True)
class Gate:
    """All updates through the noise gate.

    Attributes:
        objective: the loss.
        optimizer: settings of the optimizer.
    """

    objective: GateObjective
    optimizer: OptimizerSettings

    def phases(self, steps: int) -> tuple[Phase, ...]:
        """Returns one phase of `steps` updates."""
        return (Phase(self.objective, self.optimizer, 0, steps),)


@dataclasses.dataclass(frozen=True)
class Rloo:
    """All updates by RLOO on sampled subsets.

    Attributes:
        objective: the loss.
        optimizer: settings of the optimizer.
    """

    objective: RlooObjective
    optimizer: OptimizerSettings

    def phases(self, steps: int) -> tuple[Phase, ...]:
        """Returns one phase of `steps` updates."""
        return (Phase(self.objective, self.optimizer, 0, steps),)


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """The warm start, then RLOO on sampled subsets.

    Attributes:
        optimizer: settings of the optimizer in the warm start.
        rloo: recipe of the later updates.
        share: fraction of the updates that belong to the warm start.
    """

    optimizer: OptimizerSettings
    rloo: Rloo
    share: float

    def phases(self, steps: int) -> tuple[Phase, ...]:
        """Returns the two phases; only RLOO if the warm start would have no update."""
        num_warm_steps, rloo = round(self.share * steps), self.rloo
        last_phase = Phase(rloo.objective, rloo.optimizer, first=num_warm_steps, last=steps)
        if not num_warm_steps:
            return (last_phase,)
        return Phase(WarmStartObjective(), self.optimizer, 0, num_warm_steps), last_phase


@dataclasses.dataclass(frozen=True)
class Auto:
    """The warm start and RLOO, unless a trial shows that another recipe is better.

    `training.run` makes the trial before the first update, and calls `choose`.

    Attributes:
        warm_start: recipe of a run whose trial improves the subsets that the policy samples.
        rloo: recipe of a run whose trial fails, if subsets help a random policy.
        gate: recipe of the first updates of all other runs; the last updates use RLOO.
    """

    warm_start: WarmStart
    rloo: Rloo
    gate: Gate

    def phases(self, steps: int) -> tuple[Phase, ...]:
        """Returns the phases of a run whose trial succeeds."""
        return self.warm_start.phases(steps)

    def choose(self, begin: str) -> "WarmStart | Rloo | GateThenRloo":
        """Returns the recipe of a run whose first objective has the name `begin`."""
        recipes = {
            WARM_START: self.warm_start,
            RLOO: self.rloo,
            GATE: GateThenRloo(self.gate, self.rloo),
        }
        return recipes[begin]


def first_objective(gain: SubsetGain, trial: SubsetGain) -> str:
    """Returns the name of the objective that a run of the recipe "auto" begins with.

    Args:
        gain: gain of the subsets that a randomly initialized policy samples.
        trial: gain of the subsets of the same questions after a trial of the warm start.
    """
    if trial.is_better_than(gain):
        return WARM_START
    return RLOO if gain.suffices else GATE


@dataclasses.dataclass(frozen=True)
class GateThenRloo:
    """The gate, then RLOO on sampled subsets.

    Attributes:
        gate: recipe of the first updates.
        rloo: recipe of the last updates.
    """

    gate: Gate
    rloo: Rloo

    def phases(self, steps: int) -> tuple[Phase, ...]:
        """Returns the two phases."""
        num_gate_steps = round(GATE_SHARE * steps)
        return (
            Phase(self.gate.objective, self.gate.optimizer, first=0, last=num_gate_steps),
            Phase(self.rloo.objective, self.rloo.optimizer, first=num_gate_steps, last=steps),
        )


Recipe = Gate | Rloo | WarmStart | Auto
