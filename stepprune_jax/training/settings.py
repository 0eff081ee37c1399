"""Settings of a training run, and the recipe that follows from them."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from stepprune_jax.evaluation.settings import EvaluationRun
from stepprune_jax.parallel.accelerators import ACCELERATORS
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.registry import trainable
from stepprune_jax.selectors import AutoSelectConfig, SelectorConfig
from stepprune_jax.settings import Settings, choice, count, setting, share
from stepprune_jax.training.objectives import (
    GATE,
    RLOO,
    WARM_START,
    GateObjective,
    RlooObjective,
)
from stepprune_jax.training.optimizer import OptimizerSettings
from stepprune_jax.training.recipes import (
    AUTO,
    RECIPES,
    Auto,
    Gate,
    Recipe,
    Rloo,
    RlooTraining,
    WarmStart,
    WarmStartTraining,
    default_lr,
)
from stepprune_jax.user_input import UserError

_LOG = logging.getLogger(__name__)

AnyRun = TypeVar("AnyRun", bound="Run")

# Fields that only the gate reads, each with advice for a run that uses only RLOO.
_GATE_FIELDS = {
    "optimizer.lr": "set config.rloo.lr",
    "optimizer.final_lr": "set config.rloo.final_lr",
    "optimizer.muon_lr": "set config.rloo.muon_lr",
    "text_gate_anneal": "RLOO keeps the text gate open",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceleratorSettings(Settings, path="config.accelerator"):
    """The accelerators that `--dry_run` plans for.

    Attributes:
        name: a name of `parallel.accelerators.ACCELERATORS`.
        ids: assumed number of ids of each row, with one id for its image, if the training file is
            absent. The memory is then planned for the longest rows that the data settings allow.
        count: number of devices to plan for, if jax finds no accelerators.
        utilisation: assumed fraction of the peak operations per second.
    """

    name: str = choice("rtx-a6000", tuple(ACCELERATORS))
    ids: int = count(640, minimum=2)
    count: int = count(1)
    utilisation: float = setting(0.4, "a share above 0, up to 1", lambda value: 0 < value <= 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationSettings(Settings, path="config.validation"):
    """Validation of a policy during training.

    Attributes:
        every: updates between validations; 0 turns validation off.
        folder: folder with validation.jsonl, validation_answers.jsonl and images/; empty for the
            folder of the training data.
        questions: number of questions.
        budget: tokens to keep; 0 lets the policy decide.
        max_new_tokens: longest answer, in tokens.
        overlays: number of questions whose kept tokens are drawn.
        calibrate: number of questions on which the stop of the trained policy is calibrated for
            mean budgets; 0 turns calibration off. Without a validation split there is no
            calibration.
    """

    every: int = count(0, minimum=0)
    folder: str = ""
    questions: int = count(64)
    budget: int = count(0, minimum=0)
    max_new_tokens: int = count(3)
    overlays: int = count(4, minimum=0)
    calibrate: int = count(256, minimum=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(EvaluationRun):
    """Settings of a run of `train.py`, and of `eval.py` on the run's policy.

    The fields of `EvaluationRun` are included. Its `seed` is also the seed of the weights, the
    noise and the order of samples.

    Attributes:
        method: name of the method to train, a key of `PRUNERS`.
        recipe: "gate" trains through the noise gate; "rloo" trains by RLOO on sampled subsets;
            "warm_start" begins with the warm start and continues with RLOO; "auto" tries the warm
            start before training, and chooses among these recipes.
        steps: updates of the run.
        batch_size: rows of an update, over all devices.
        text_gate_anneal: fraction of the gate's updates over which the text gate opens; 0 keeps the
            gate open. While the gate is closed, the policy learns that some tokens matter for every
            question, and some runs never unlearn this.
        log_every: updates between lines of metrics.
        checkpoint_every: updates between checkpoints.
        keep_checkpoints: number of checkpoints to keep.
        max_skipped: number of consecutive non-finite updates that stop the run.
        tensorboard: whether to write TensorBoard events.
        wandb: project of Weights & Biases; empty for none.
        policy: configuration of the method "stepprune". The widths of features and text are set to
            the model's widths, except that a `text_width` of 0 hides the question.
        autoselect: configuration of the method "autoselect", with widths as in `policy`.
        optimizer: the optimizer, with the learning rates of the gate.
        rloo: RLOO on sampled subsets, with its learning rates.
        warm_start: the warm start of the recipes "warm_start" and "auto".
        start: file or name of a policy that provides the first weights. Its method, shape and
            number of heads must match the run; empty for random weights.
        accelerator: devices that a dry run plans for.
        validation: validation during training.
    """

    method: str = setting(
        "stepprune",
        f"one of {', '.join(trainable())}",
        lambda value: value in trainable(),  # a lambda, because methods may be registered later
    )
    recipe: str = setting(
        GATE, "one of gate, rloo (formerly sets), warm_start, auto", lambda value: value in RECIPES
    )
    steps: int = count(500)
    batch_size: int = count(32)
    text_gate_anneal: float = share(0.0)
    log_every: int = count(10, free=True)
    checkpoint_every: int = count(100, free=True)
    keep_checkpoints: int = count(2, free=True)
    max_skipped: int = count(10, free=True)
    tensorboard: bool = setting(False, free=True)
    wandb: str = setting("", free=True)
    policy: SelectorConfig = PolicyConfig()
    autoselect: SelectorConfig = AutoSelectConfig()
    optimizer: OptimizerSettings = OptimizerSettings()
    rloo: RlooTraining = RlooTraining()
    warm_start: WarmStartTraining = WarmStartTraining()
    start: str = ""
    accelerator: AcceleratorSettings = setting(AcceleratorSettings(), free=True)
    validation: ValidationSettings = setting(ValidationSettings(), free=True)

    def __post_init__(self):
        super().__post_init__()
        num_steps = self._count_shortest_phase()
        prefix = "" if num_steps == self.steps else "the shorter phase of "
        expected = f"an integer from 0, below {prefix}config.steps ({num_steps})"
        self.optimizer.expect("warmup", self.optimizer.warmup < num_steps, expected)

    def _count_shortest_phase(self) -> int:
        """Returns the number of updates of the shortest phase that the run may have."""
        recipe = self.make_recipe()
        recipes = [recipe]
        if isinstance(recipe, Auto):
            recipes = [recipe.choose(begin) for begin in (GATE, WARM_START)]
        return min(phase.num_steps for recipe in recipes for phase in recipe.phases(self.steps))

    @property
    def selector_group(self) -> str:
        """Name of the group that configures the method to train."""
        return trainable()[self.method].settings

    @property
    def selector_config(self) -> Any:
        """Configuration of the method to train, without the widths of the model."""
        return getattr(self, self.selector_group)

    def make_recipe(self) -> Recipe:
        """Builds the recipe that the settings describe.

        With "auto", a method that cannot sample subsets is trained through the gate.

        Raises:
            UserError: the recipe needs a method that can sample subsets.
        """
        can_sample = trainable()[self.method].samples_subsets
        expected = f"{GATE} or {AUTO}, as {self.method} cannot sample subsets of tokens"
        self.expect("recipe", can_sample or self.recipe in (GATE, AUTO), expected)
        gate = Gate(GateObjective(self.text_gate_anneal), self.optimizer)
        if self.recipe == GATE or not can_sample:
            return gate
        rloo = self._make_rloo()
        if self.recipe == RLOO:
            return rloo
        lr = self.warm_start.lr or default_lr(self.selector_config)
        optimizer = dataclasses.replace(self.optimizer, lr=lr, final_lr=lr / 10, muon_lr=0.0)
        warm_start = WarmStart(optimizer, rloo, self.warm_start.share)
        return warm_start if self.recipe == WARM_START else Auto(warm_start, rloo, gate)

    def _make_rloo(self) -> Rloo:
        """Builds the recipe "rloo" for the method to train.

        Raises:
            UserError: `rloo.length_weight` is set for a method without a price of tokens.
        """
        has_price = hasattr(self.selector_config, "length_weight")
        expected = f"None, as {self.method} has no price of a token"
        self.rloo.expect("length_weight", has_price or self.rloo.length_weight is None, expected)
        settings = self.resolve_rloo()
        has_temperature = hasattr(self.selector_config, "draw")
        objective = RlooObjective(
            settings,
            temperature=settings.temperature if has_temperature else None,
            length_weight=settings.length_weight,
        )
        optimizer = dataclasses.replace(
            self.optimizer, lr=settings.lr, final_lr=settings.final_lr, muon_lr=settings.muon_lr
        )
        return Rloo(objective, optimizer)

    def resolve_rloo(self) -> RlooTraining:
        """Returns the group `rloo` with default numbers for None, for the method to train."""
        return self.rloo.resolve(self.selector_config)

    def replace(self: AnyRun, changes: Mapping[str, object]) -> AnyRun:
        """Returns the settings with some fields changed; see `Settings.replace`.

        If the changes shorten a phase to less than the warm-up of the learning rate, and do not set
        `optimizer.warmup`, the warm-up becomes a tenth of the shortest phase, and the log says so.

        Args:
            changes: new values by dotted name, such as {"optimizer.lr": 1e-3}.

        Raises:
            UserError: a change has a name of an earlier version, or sets a field that the recipe
                "rloo" does not read.
        """
        for name in changes:
            if name.partition(".")[0] == "policy_gradient":
                raise UserError(
                    f"config.{name} is now config.{name.replace('policy_gradient', RLOO)}; "
                    f"config.recipe={RLOO} selects RLOO on sampled subsets"
                )
        run = super().replace(self._shorten_warmup(changes) | dict(changes))
        ignored = run._ignored_by_rloo() if run.recipe == RLOO else {}
        for name in changes:
            if name in ignored:
                raise UserError(
                    f"config.{name} has no effect on the recipe {RLOO!r}: {ignored[name]}"
                )
        return run

    def _shorten_warmup(self, changes: Mapping[str, object]) -> dict[str, object]:
        """Returns the change of `optimizer.warmup` that makes other changes valid; {} for none.

        Args:
            changes: new values by dotted name.
        """
        if {"optimizer", "optimizer.warmup"} & changes.keys():
            return {}
        num_steps = super().replace({**changes, "optimizer.warmup": 0})._count_shortest_phase()
        if self.optimizer.warmup < num_steps:
            return {}
        warmup = num_steps // 10
        _LOG.info(
            "config.optimizer.warmup is %d instead of %d: a tenth of %d updates, the shortest "
            "phase that the recipe may choose; set it for another value",
            warmup,
            self.optimizer.warmup,
            num_steps,
        )
        return {"optimizer.warmup": warmup}

    def free_fields(self) -> tuple[str, ...]:
        """Returns the names of fields and groups that no result of the run depends on.

        These include the groups of other methods, and the fields that the recipe does not read.
        """
        other_groups = {method.settings for method in trainable().values()} - {self.selector_group}
        ignored = {
            GATE: (RLOO, WARM_START),
            RLOO: (*self._ignored_by_rloo(), WARM_START),
            WARM_START: tuple(self._ignored_by_rloo()),
        }.get(self.recipe, ())
        return (*super().free_fields(), *other_groups, *ignored)

    def _ignored_by_rloo(self) -> dict[str, str]:
        """Returns the fields that RLOO does not read, each with advice for an error message."""
        group = self.selector_group
        ignored = _GATE_FIELDS | {f"{group}.draw": "set config.rloo.temperature"}
        if self.rloo.length_weight is not None:
            ignored[f"{group}.length_weight"] = "config.rloo.length_weight is set"
        return ignored

    def changes(self, old: Mapping[str, object]) -> list[str]:
        """Lists the differences from the settings of an earlier run.

        Args:
            old: settings by dotted name, possibly with names of earlier versions.

        Returns:
            One line per difference.
        """
        run, differences = self, []
        if old.get("policy_gradient.samples"):
            # The earlier version stored numbers where the group `rloo` now has None.
            run = dataclasses.replace(self, rloo=self.resolve_rloo())
            if old.get("text_gate_anneal"):
                differences.append("config.text_gate_anneal: RLOO now keeps the text gate open")
        renamed = read_former_names(old, self.selector_group)
        return super(Run, run).changes(renamed) + differences


def read_former_names(old: Mapping[str, object], group: str) -> dict[str, object]:
    """Translates the settings of an earlier version to the current names.

    In earlier versions, the group `rloo` was called `policy_gradient`, and the recipe "rloo" was
    called "sets". A number of samples above 0 also selected RLOO. Such a run stored RLOO's learning
    rates, temperature and price in the fields that only the gate reads now.

    Args:
        old: settings by dotted name, from `Settings.flat`.
        group: group that configures the method of the run.

    Returns:
        Settings by the current dotted names.
    """
    former_prefix = "policy_gradient."
    # Earlier versions had several gates; a run with the gate "vp" equals a current run.
    new = {name: value for name, value in old.items() if (name, value) != ("policy.gate", "vp")}
    if f"{former_prefix}samples" not in old:
        return new
    new = {name.replace(former_prefix, "rloo."): value for name, value in new.items()}
    recipe = old.get("recipe")
    if old[f"{former_prefix}samples"]:
        recipe = RLOO
        for name in ("lr", "final_lr", "muon_lr"):
            new[f"rloo.{name}"] = old[f"optimizer.{name}"]
        new["rloo.temperature"] = old.get(f"{group}.draw", RlooTraining().temperature)
        new["rloo.length_weight"] = old.get(f"{group}.length_weight")
    else:
        unused_fields = ("samples", "lr", "final_lr", "muon_lr", "temperature", "length_weight")
        new |= {f"rloo.{name}": getattr(RlooTraining(), name) for name in unused_fields}
    return new | {"recipe": read_former_recipe(recipe) or GATE}


def read_former_recipe(name: object) -> object:
    """Returns the current name of a recipe or of its first phase."""
    return RLOO if name == "sets" else name
