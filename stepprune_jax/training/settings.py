"""The settings of a training run, and the objects built from them before loading."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from stepprune_jax.evaluation.settings import EvaluationRun
from stepprune_jax.models import vlm
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.parallel.accelerators import ACCELERATORS
from stepprune_jax.parallel.placement import row_count
from stepprune_jax.parallel.sharding import build_mesh, shardings
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.registry import trainable
from stepprune_jax.selectors import AutoSelectConfig, Policy, RlooSettings, SelectorConfig
from stepprune_jax.settings import Settings, choice, count, setting, share
from stepprune_jax.training.language_loss import ForwardOptions
from stepprune_jax.training.optimizer import OptimizerSettings
from stepprune_jax.training.step import StepConfig
from stepprune_jax.user_input import UserError, naming

# How a policy is trained, and what "auto" chooses between.
GATE, SETS, AUTO = "gate", "sets", "auto"
RECIPES = (GATE, SETS, AUTO)
# Share of the updates through the gate, where "auto" begins with it: with .5 and .7 some runs have
# not yet found what sets are to go on from (experiments/RESULTS.md).
GATE_SHARE = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceleratorSettings(Settings, path="config.accelerator"):
    """The accelerators that `--dry_run` plans for.

    Attributes:
        name: a name of `parallel.accelerators.ACCELERATORS`.
        ids: assumed tokens of each row, its image as one, where the training file is absent; memory
            is then that of the longest rows allowed.
        count: devices to plan for, if jax sees no accelerators.
        utilisation: assumed share of the peak.
    """

    name: str = choice("rtx-a6000", tuple(ACCELERATORS))
    ids: int = count(640, minimum=2)
    count: int = count(1)
    utilisation: float = setting(0.4, "a share above 0, up to 1", lambda value: 0 < value <= 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationSettings(Settings, path="config.validation"):
    """Validation of a policy during training.

    Attributes:
        every: updates between validations; 0 for none.
        folder: folder with validation.jsonl, validation_answers.jsonl and images/; empty for that
            of the data.
        questions: number of questions.
        budget: tokens to keep; 0 to let the policy decide.
        max_new_tokens: longest answer, in tokens.
        overlays: number of questions whose selections are drawn.
        calibrate: number of questions for calibrating the trained policy's stop, for mean budgets;
            0 for none. Without a validation split there is no calibration.
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
    """The settings of a run of `train.py`, and of `eval.py` on its policy.

    Those of `EvaluationRun`, whose `seed` is also that of weights, noise and the order of samples,
    and:

    Attributes:
        method: method to train, of `PRUNERS`.
        recipe: "gate", through the noise gate; "sets", on sampled sets; "auto", which looks at what
            sets gain before training, and begins with sets or with the gate. None for the gate, or
            sets if `policy_gradient.samples` is set. The other fields are those of the gate, from
            which those of sets follow, unless `policy_gradient.samples` is set.
        steps: updates of the whole run.
        batch_size: rows of an update, over all devices.
        text_gate_anneal: share of the steps over which the text gate opens; 0 for an open gate. A
            policy that cannot read the question yet learns that some tokens matter for any
            question, and some runs never unlearn it.
        log_every: updates between lines of metrics.
        checkpoint_every: updates between checkpoints.
        keep_checkpoints: number of checkpoints to keep.
        max_skipped: non-finite updates in a row that stop the run.
        tensorboard: whether to write TensorBoard events.
        wandb: a project of Weights & Biases; empty for none.
        policy: the policy, for the method "stepprune". Its widths of features and text are those of
            the model, unless a `text_width` of 0 hides the question.
        autoselect: the one-shot scorer, for the method "autoselect"; likewise.
        optimizer: the optimiser.
        policy_gradient: training on sampled sets instead of through the noise gate.
        start: file or name of the policy to begin with, of the same method, shape and number of
            heads; empty to draw new weights.
        accelerator: devices that a dry run plans for.
        validation: validation during training.
    """

    method: str = setting(
        "stepprune",
        f"one of {', '.join(trainable())}",
        lambda value: value in trainable(),  # at the time of the check, as methods may be added
    )
    recipe: str | None = setting(
        None, f"one of {', '.join(RECIPES)}", lambda value: value in RECIPES
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
    policy_gradient: RlooSettings = RlooSettings()
    start: str = ""
    accelerator: AcceleratorSettings = setting(AcceleratorSettings(), free=True)
    validation: ValidationSettings = setting(ValidationSettings(), free=True)

    def __post_init__(self):
        super().__post_init__()
        auto, sampled = self.recipe == AUTO, self.policy_gradient.samples
        expected = f"{SETS}, or config.policy_gradient.samples 0: it is {sampled}"
        self.expect("recipe", self.recipe in (None, SETS) or not sampled, expected)
        most = self.steps - round(GATE_SHARE * self.steps) if auto else self.steps
        shorter = "the shorter phase of " if auto else ""
        expected = f"an integer from 0, below {shorter}config.steps ({most})"
        self.optimizer.expect("warmup", self.optimizer.warmup < most, expected)

    def free_fields(self) -> tuple[str, ...]:
        """Adds the group of the method that is not trained to the free fields."""
        groups = {kind.settings for kind in trainable().values()}
        return (*super().free_fields(), *groups - {trainable()[self.method].settings})

    def changes(self, old: Mapping[str, object]) -> list[str]:
        """Compares with a run that may be older.

        `policy.gate` is ignored if it is the only gate that is left. A run from before there were
        recipes goes on as what it was, also under "auto".
        """
        kept = {name: old[name] for name in old if (name, old[name]) != ("policy.gate", "vp")}
        was = SETS if old.get("policy_gradient.samples") else GATE
        same = {"recipe": self.recipe} if self.recipe in (None, AUTO, was) else {}
        return super().changes(same | kept)


class Phase(NamedTuple):
    """A part of a run that has settings of its own.

    Attributes:
        name: "gate" or "sets".
        first: updates of the run before it.
        run: its settings, for `make_step_config`; `steps` is the number of its updates.
    """

    name: str
    first: int
    run: Run

    def __str__(self) -> str:
        """Its name in words."""
        return {GATE: "the gate", SETS: "sampled sets"}[self.name]


def split(run: Run, begin: str = GATE) -> tuple[Phase, ...]:
    """Returns the phases of a run, one after the other.

    Args:
        run: settings of the run.
        begin: what a run of the recipe "auto" begins with.

    Raises:
        ValueError: a recipe with sets, of a method that draws none.
    """
    draws, sampled = trainable()[run.method].samples_subsets, run.policy_gradient.samples
    expected = f"{GATE} or {AUTO}, as {run.method} draws no sets"
    run.expect("recipe", draws or run.recipe != SETS, expected)
    recipe = run.recipe or (SETS if sampled else GATE)
    if recipe == AUTO and begin == GATE and draws:
        first = round(GATE_SHARE * run.steps)
        parts = (GATE, 0, first), (SETS, first, run.steps)
    else:
        parts = ((begin if recipe == AUTO else recipe, 0, run.steps),)
    phases = []
    for name, first, last in parts:
        own = rloo_run(run) if name == SETS and not sampled else run
        phases.append(Phase(name, first, own.replace({"recipe": None, "steps": last - first})))
    return tuple(phases)


def rloo_run(run: Run) -> Run:
    """Returns the settings for training on sampled sets that follow from those of the gate.

    The learning rate and the other changes are those of the method that is trained. A token's price
    is four times that of the gate: on sets a token gains probability, through the gate it gains
    nats.
    """
    group = trainable()[run.method].settings
    config = getattr(run, group)
    width = getattr(config, "policy_width", config.feature_width)
    lr = 1e-3 * 64 / width  # half the rates served twice the width, one run each
    changes = {
        "recipe": None,
        "text_gate_anneal": 0.0,
        "policy_gradient.samples": 8,
        "optimizer.lr": lr,
        "optimizer.final_lr": lr / 10,
        "optimizer.muon_lr": 0.0,
    }
    if hasattr(config, "draw"):
        changes[f"{group}.draw"] = 1.0  # inference draws as training does
    if hasattr(config, "length_weight"):
        changes[f"{group}.length_weight"] = 4 * config.length_weight
    return run.replace(changes)


def make_mesh(run: Run, devices: Sequence[jax.Device] | None = None) -> Mesh | None:
    """Builds the mesh of a run; None for a single device."""
    if run.mesh == "single":
        processes = jax.process_count()
        run.expect("mesh", processes == 1, f"one for the {processes} processes of this run")
        return None
    mesh = build_mesh(run.mesh, devices)
    parts = row_count(mesh)
    expected = f"a multiple of the {parts} devices that rows are split over"
    run.expect("batch_size", run.batch_size % parts == 0, expected)
    return mesh


def read_method(run: Run, model: ModelConfig) -> Policy:
    """Builds the method to be trained, its widths those of the model."""
    kind = trainable()[run.method]
    name, config = kind.settings, getattr(run, kind.settings)
    run.expect(name, isinstance(config, kind.config_type), kind.config_type.__name__)
    if model.sizes_vary and getattr(config, "max_steps", None) is not None:
        raise UserError(
            f"config.{name}.max_steps is {config.max_steps!r}, expected None, half of each "
            "image's tokens: images of this model differ in their number"
        )
    text_width = model.text.hidden_size if config.text_width else 0
    with naming(f"config.{name}", ValueError):  # such as heads that do not divide the width
        config = dataclasses.replace(
            config, feature_width=model.feature_width, text_width=text_width
        )
        return kind(config=config)


def make_step_config(run: Run, backbone: Backbone, mesh: Mesh | None = None) -> StepConfig:
    """Builds the static part of the update, of a run in phases that of the first."""
    run = split(run)[0].run
    run.model.execution.check_backend()
    method = read_method(run, backbone.config)
    if mesh is not None:
        # Checked before data are read.
        shardings(vlm.abstract_params(backbone), backbone.SHARDING_RULES, mesh)
    parts = row_count(mesh)
    rows, each = run.model.rows_at_once, run.batch_size // parts
    run.model.expect(
        "rows_at_once",
        rows == 0 or rows >= each or each % rows == 0,
        f"0 or a divisor of the {each} rows of each device",
    )
    sampled = run.policy_gradient
    sampled.expect(
        "samples",
        method.samples_subsets or not sampled.samples,
        f"0, as {run.method} draws no sets",
    )
    forward = ForwardOptions(
        execution=run.model.execution,
        rows=rows * parts if rows < each else 0,
        mesh=mesh,
    )
    return StepConfig(
        backbone=backbone,
        method=method,
        steps=run.steps,
        optimizer=run.optimizer,
        text_gate_anneal=run.text_gate_anneal,
        forward=forward,
        policy_gradient=run.policy_gradient,
        weights=run.model.weights,
    )
