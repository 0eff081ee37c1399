"""The settings of a training run, and the objects built from them before loading."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from stepprune_jax.checkpoints.frozen import ModelSettings
from stepprune_jax.data.source import DataSettings
from stepprune_jax.models import vlm
from stepprune_jax.models.family import ModelConfig
from stepprune_jax.parallel.accelerators import ACCELERATORS
from stepprune_jax.parallel.placement import row_count
from stepprune_jax.parallel.sharding import build_mesh, shardings
from stepprune_jax.pruning import TrainedMethod, trained_methods
from stepprune_jax.settings import (
    Settings,
    choice,
    count,
    group,
    is_number,
    mapping,
    read,
    setting,
    share,
    switch,
    text,
)
from stepprune_jax.training.language_loss import ForwardOptions
from stepprune_jax.training.optimizer import OptimizerSettings
from stepprune_jax.training.step import Setup
from stepprune_jax.user_input import nearest


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceleratorSettings(Settings, group="accelerator"):
    """The accelerators that `--dry_run` plans for.

    Attributes:
        name: a name of `parallel.accelerators.ACCELERATORS`.
        count: devices to plan for, if jax sees no accelerators.
        utilisation: assumed share of the peak.
    """

    name: str = choice(tuple(ACCELERATORS))
    count: int = count()
    utilisation: float = setting(
        "a share above 0, up to 1", lambda value: is_number(value) and 0 < value <= 1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationSettings(Settings, group="validation"):
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

    every: int = count(0)
    folder: str = text()
    questions: int = count()
    budget: int = count(0)
    max_new_tokens: int = count()
    overlays: int = count(0)
    calibrate: int = count(0, default=256)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Settings):
    """The settings of a run of `train.py`; `configs/shapes.py` describes each field.

    Attributes:
        method: method to train, of `PRUNERS`.
        seed: seed of weights, noise and the order of samples.
        steps: updates of the whole run.
        batch_size: rows of an update, over all devices.
        text_gate_anneal: share of the steps over which the text gate opens; 0 for an open gate.
        cpu_devices: CPU devices, if jax sees no others; 0 leaves their number to jax.
        mesh: preset of `build_mesh`, or sizes by axis.
        log_every: updates between lines of metrics.
        checkpoint_every: updates between checkpoints.
        keep_checkpoints: number of checkpoints to keep.
        max_skipped: non-finite updates in a row that stop the run.
        tensorboard: whether to write TensorBoard events.
        wandb: a project of Weights & Biases; empty for none.
        model: the frozen model.
        data: the data.
        policy: fields of `PolicyConfig`, for the method "stepprune".
        autoselect: fields of `AutoSelectConfig`, for the method "autoselect".
        optimizer: the optimiser.
        accelerator: devices that a dry run plans for.
        validation: validation during training.
        eval: settings of `eval.py`, which reads them.
    """

    _added: ClassVar[Mapping[str, Any]] = {
        "policy.group": 1,
        "policy.text": True,
        "autoselect.text": True,
    }

    method: str = setting(
        f"one of {', '.join(trained_methods())}",
        lambda value: value in tuple(trained_methods()),
    )
    seed: int = count(0)
    steps: int = count()
    batch_size: int = count()
    text_gate_anneal: float = share()
    cpu_devices: int = count(0, free=True)
    mesh: str = text(free=True)
    log_every: int = count(free=True)
    checkpoint_every: int = count(free=True)
    keep_checkpoints: int = count(free=True)
    max_skipped: int = count(free=True)
    tensorboard: bool = switch(free=True)
    wandb: str = text(free=True)
    model: ModelSettings = group(ModelSettings)
    data: DataSettings = group(DataSettings)
    policy: Mapping[str, Any] = mapping()
    autoselect: Mapping[str, Any] = mapping()
    optimizer: OptimizerSettings = group(OptimizerSettings)
    accelerator: AcceleratorSettings | None = group(AcceleratorSettings, optional=True, free=True)
    validation: ValidationSettings = group(ValidationSettings, free=True)
    eval: Mapping[str, Any] | None = mapping(optional=True, free=True)

    def __post_init__(self):
        super().__post_init__()
        expected = f"an integer from 0, below config.steps ({self.steps})"
        self.optimizer.require("warmup", self.optimizer.warmup < self.steps, expected)

    def free_fields(self) -> tuple[str, ...]:
        """As in `Settings`; the group of the method that is not trained is free, too."""
        groups = {kind.settings for kind in trained_methods().values()}
        return (*super().free_fields(), *groups - {trained_methods()[self.method].settings})


def read_run(config: ConfigDict) -> Run:
    """Reads the settings of a training run from its configuration.

    Args:
        config: configuration from a file of `configs/`, with changes of the command line.

    Raises:
        ValueError: a field is unknown, missing, or has a bad value; the message names it.
    """
    return read(Run, config.to_dict())


def make_mesh(run: Run, devices: Sequence[Any] | None = None) -> Mesh | None:
    """Builds the mesh of a run; None for a single device.

    Args:
        run: settings of the run.
        devices: devices to use; by default all that jax sees.

    Raises:
        ValueError: an unknown preset, too many devices, or rows that do not divide over them.
    """
    if run.mesh == "single":
        processes = jax.process_count()
        run.require("mesh", processes == 1, f"one for the {processes} processes of this run")
        return None
    mesh = build_mesh(run.mesh, devices)
    parts = row_count(mesh)
    expected = f"a multiple of the {parts} devices that rows are split over"
    run.require("batch_size", run.batch_size % parts == 0, expected)
    return mesh


def read_method(run: Run, model: ModelConfig) -> TrainedMethod:
    """Builds the method to be trained, its widths taken from the model.

    Args:
        run: settings of the run; those of the method have a field more, "text": whether it reads
            the question.
        model: the frozen model.

    Raises:
        ValueError: an unknown field, or a value that the method's configuration rejects.
    """
    kind = trained_methods()[run.method]
    group, fields = f"config.{kind.settings}", dict(getattr(run, kind.settings))
    widths = {"feature_width", "text_width"}
    known = {field.name for field in dataclasses.fields(kind.config_type)} - widths | {"text"}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(
            f"{group} has unknown field(s) {', '.join(unknown)}; it has {', '.join(sorted(known))} "
            f"(the widths of features and text are the model's).{nearest(unknown[0], known)}"
        )
    if model.sizes_vary and fields.get("max_steps") is not None:
        raise ValueError(
            f"{group}.max_steps is {fields['max_steps']!r}, expected None, half of each image's "
            "tokens: images of this model differ in their number"
        )
    reads_text = fields.pop("text", True)
    if not isinstance(reads_text, bool):
        raise ValueError(f"{group}.text is {reads_text!r}, expected True or False")
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    text_width = model.text.hidden_size if reads_text else 0
    config = kind.config_type(feature_width=model.feature_width, text_width=text_width, **values)
    return kind(config=config)


def make_setup(run: Run, model: ModelConfig, mesh: Mesh | None = None) -> Setup:
    """Builds the static part of the update.

    Args:
        run: settings of the run.
        model: the frozen model.
        mesh: result of `make_mesh`.

    Raises:
        ValueError: the method's own fields are bad, a kernel needs another device, the mesh does
            not divide a weight, or `rows_at_once` does not divide the rows of a device.
    """
    run.model.execution.check_backend()
    method = read_method(run, model)
    if mesh is not None:
        shardings(
            vlm.abstract_params(model), model.family.SHARDING_RULES, mesh
        )  # before data are read
    parts = row_count(mesh)
    rows, each = run.model.rows_at_once, run.batch_size // parts
    run.model.require(
        "rows_at_once",
        rows == 0 or rows >= each or each % rows == 0,
        f"0 or a divisor of the {each} rows of each device",
    )
    forward = ForwardOptions(
        execution=run.model.execution,
        rows=rows * parts if rows < each else 0,
        mesh=mesh,
    )
    return Setup(
        model=model,
        method=method,
        steps=run.steps,
        optimizer=run.optimizer,
        text_gate_anneal=run.text_gate_anneal,
        forward=forward,
    )
