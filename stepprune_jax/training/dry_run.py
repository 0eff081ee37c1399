"""A run before the run: what it would take, from its configuration and data, without weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.frozen import model_dtype, model_folders
from stepprune_jax.checkpoints.identity import file_identity
from stepprune_jax.data.source import training_source
from stepprune_jax.parallel.placement import row_count
from stepprune_jax.training import settings
from stepprune_jax.training.data import open_batches
from stepprune_jax.training.plan import Plan, make_plan
from stepprune_jax.training.step import Setup
from stepprune_jax.user_input import user_input


def use_virtual_devices(config: Any) -> None:
    """Makes as many CPU devices as the configuration plans for; before jax starts.

    Where jax sees accelerators, those are used and these are not.

    Args:
        config: the run's `ConfigDict`.

    Raises:
        ValueError: the group `accelerator` is missing or has a bad value.
    """
    settings.accelerator(config)
    jax.config.update("jax_num_cpu_devices", config.accelerator.count)


def dry_run(config: Any, workdir: str | Path) -> Plan:
    """Checks configuration and data, compiles the update from abstract weights, and prints.

    Neither weights nor accelerators are needed: of the model's folder only its configuration, its
    tokenizer and its image processor are read. Nothing is written but the shapes world and the
    counts of tokens, which the run then finds.

    Args:
        config: see `configs/shapes.py`.
        workdir: folder of the run.

    Returns:
        What was printed.

    Raises:
        FileNotFoundError: model or data is missing.
        ValueError: a bad configuration or bad data, or too few devices.
    """
    with user_input():
        settings.check_config(config)
        settings.accelerator(config)
        mesh = settings.make_mesh(config, _devices(config))
        source = inspect_folder(*model_folders(config))
        setup = settings.make_setup(config, source.config, mesh)
        data = training_source(config, Path(workdir).expanduser().resolve())
        batches = open_batches(config, data, file_identity(data.file), source)
    plan = make_plan(batches, setup, mesh, model_dtype(config), config.batch_size)
    for line in _report(plan, config, setup, mesh):
        print(line, flush=True)
    return plan


def _devices(config: Any) -> list[Any]:
    """The accelerators that there are, else as many CPU devices as are planned for."""
    found, count = jax.devices(), config.accelerator.count
    if jax.default_backend() != "cpu":
        return found
    if len(found) < count:
        raise ValueError(
            f"config.accelerator.count is {count}, jax has {len(found)} CPU devices: set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return found[:count]


def _report(plan: Plan, config: Any, setup: Setup, mesh: Mesh | None) -> Iterator[str]:
    """The plan in lines."""
    name, (device, utilisation) = config.accelerator.name, settings.accelerator(config)
    parts = row_count(mesh)
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items()) if mesh else "single"
    backend = jax.default_backend()
    kind = "virtual CPU" if backend == "cpu" else backend
    yield f"mesh        {sizes}: {plan.devices} {kind} device(s)"
    rows = setup.frozen_rows or config.batch_size
    yield (
        f"batch       {config.batch_size} rows an update, {config.batch_size // parts} on each "
        f"device; the frozen model takes {rows // parts} of them at a time"
    )
    use, gib = plan.memory, 2**30
    beside = use.arguments - plan.weights + use.outputs
    yield (
        f"memory      {use.total / gib:.2f} GiB on each device, as XLA's {backend.upper()} "
        f"compiler plans the widest update: frozen weights {plan.weights / gib:.2f}, state and "
        f"batch {beside / gib:.2f}, temporary {use.temporary / gib:.2f}"
    )
    verdict = "fits" if use.total <= device.memory else "DOES NOT FIT"
    yield (
        f"            {name}: {device.memory / gib:.1f} GiB, {verdict} "
        f"({use.total / device.memory:.0%})"
    )
    total = sum(plan.widths.values())
    shares = ", ".join(
        f"{bucket.ids} ids {count / total:.0%}" for bucket, count in sorted(plan.widths.items())
    )
    yield f"operations  {plan.flops:.3g} FLOPs an update on all devices, the mean over {shares}"
    yield (
        f"time        {plan.hours(config.steps, device, utilisation):.3g} hours for {config.steps} "
        f"updates on {plan.devices} {name}, if they reach {utilisation:.0%} of "
        f"{device.flops / 1e12:.0f} TFLOP/s in bfloat16 (assumed: config.accelerator.utilisation)"
    )
