"""The static part of an update, built and checked before weights are loaded."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from stepprune_jax.models import vlm
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.parallel.placement import row_count
from stepprune_jax.parallel.sharding import build_mesh, shardings
from stepprune_jax.registry import trainable
from stepprune_jax.selectors import Policy
from stepprune_jax.training.language_loss import ForwardOptions
from stepprune_jax.training.recipes import Phase
from stepprune_jax.training.settings import Run
from stepprune_jax.user_input import UserError, naming

# Devices of jax. Type checkers take `jax.Device` for a variable.
Devices = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """The static part of an update: a hashable argument of compiled programs.

    Attributes:
        backbone: the frozen model.
        selector: the selector that is trained, without weights, as the objective configures it.
        phase: objective, optimizer and number of updates.
        forward: how the frozen model is run.
        weights: how the frozen model's matrices are stored, see `models.int8`.
    """

    backbone: Backbone
    selector: Policy
    phase: Phase
    forward: ForwardOptions
    weights: str = "full"


def make_mesh(run: Run, devices: Devices | None = None) -> Mesh | None:
    """Builds the mesh of a run; None for a single device."""
    if run.mesh == "single":
        processes = jax.process_count()
        run.expect("mesh", processes == 1, f"one for the {processes} processes of this run")
        return None
    mesh = build_mesh(run.mesh, devices)
    num_parts = row_count(mesh)
    expected = f"a multiple of the {num_parts} devices that rows are split over"
    run.expect("batch_size", run.batch_size % num_parts == 0, expected)
    return mesh


def make_selector(run: Run, model: ModelConfig) -> Policy:
    """Builds the selector to train, without weights.

    Args:
        run: settings of the run, with the configuration of the selector.
        model: configuration of the frozen model, which determines the widths of features and text.

    Raises:
        UserError: the configuration has a type of another method, or does not fit the model.
    """
    kind, config = trainable()[run.method], run.selector_config
    group, config_type = run.selector_group, kind.config_type or object
    run.expect(group, isinstance(config, config_type), config_type.__name__)
    if model.sizes_vary and getattr(config, "max_steps", None) is not None:
        raise UserError(
            f"config.{group}.max_steps is {config.max_steps!r}, expected None, half of each "
            "image's tokens: images of this model differ in their number"
        )
    text_width = model.text.hidden_size if config.text_width else 0
    with naming(f"config.{group}", ValueError):  # such as heads that do not divide the width
        config = dataclasses.replace(
            config, feature_width=model.feature_width, text_width=text_width
        )
        return kind(config=config)


def make_step_configs(
    run: Run, backbone: Backbone, mesh: Mesh | None, phases: Sequence[Phase]
) -> tuple[StepConfig, ...]:
    """Builds and checks the static part of the updates of each phase.

    Args:
        run: settings of the run.
        backbone: the frozen model, without weights.
        mesh: mesh of the run, from `make_mesh`.
        phases: phases of the run's recipe.

    Returns:
        One `StepConfig` per phase.

    Raises:
        UserError: a setting does not fit the model, the backend or the mesh.
    """
    run.model.execution.check_backend()
    selector = make_selector(run, backbone.config)
    if mesh is not None:
        # Called only for its error: a mesh that does not divide the weights is reported before the
        # training data are read.
        shardings(vlm.abstract_params(backbone), backbone.SHARDING_RULES, mesh)
    num_parts, rows_at_once = row_count(mesh), run.model.rows_at_once
    device_rows = run.batch_size // num_parts
    run.model.expect(
        "rows_at_once",
        rows_at_once == 0 or rows_at_once >= device_rows or device_rows % rows_at_once == 0,
        f"0 or a divisor of the {device_rows} rows of each device",
    )
    forward = ForwardOptions(
        execution=run.model.execution,
        # `rows_at_once` is per device, and 0 is one pass of all rows.
        rows=rows_at_once * num_parts if rows_at_once < device_rows else 0,
        mesh=mesh,
    )
    return tuple(
        StepConfig(
            backbone=backbone,
            selector=phase.objective.configure(selector),
            phase=phase,
            forward=forward,
            weights=run.model.weights,
        )
        for phase in phases
    )


def make_step_config(run: Run, backbone: Backbone, mesh: Mesh | None = None) -> StepConfig:
    """Builds the static part of the updates of a run's first phase; see `make_step_configs`."""
    phases = run.make_recipe().phases(run.steps)
    return make_step_configs(run, backbone, mesh, phases[:1])[0]
