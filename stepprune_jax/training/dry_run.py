"""A run before the run: what it would take, from its configuration and data, without weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from stepprune_jax.aot import targets
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.frozen import model_dtype, model_folders
from stepprune_jax.checkpoints.identity import file_identity
from stepprune_jax.data.source import training_source
from stepprune_jax.generate.placement import row_count
from stepprune_jax.sharding import build_mesh
from stepprune_jax.training import settings
from stepprune_jax.training.data import open_batches
from stepprune_jax.training.memory import advice, remedies
from stepprune_jax.training.plan import Plan, make_plan
from stepprune_jax.training.step import Setup
from stepprune_jax.user_input import user_input


def use_virtual_devices(config: Any, target: str | None = None) -> None:
    """Makes as many CPU devices as are planned for; before jax starts.

    Where jax sees accelerators, those are used and these are not, unless there is a target.

    Args:
        config: the run's `ConfigDict`.
        target: as in `dry_run`.

    Raises:
        ValueError: the group `accelerator` is missing or has a bad value, or a bad target.
    """
    jax.config.update("jax_num_cpu_devices", _for_target(config, target).accelerator.count)
    if target is not None:
        jax.config.update("jax_platforms", "cpu")


def _for_target(config: Any, target: str | None) -> Any:
    """The configuration with the target's devices in its group `accelerator`."""
    settings.accelerator(config)
    if target is None:
        return config
    config, named = config.copy_and_resolve_references(), targets.read_name(target)
    config.accelerator.name, config.accelerator.count = named.accelerator, named.count
    return config


def dry_run(config: Any, workdir: str | Path, target: str | None = None) -> Plan:
    """Checks configuration and data, compiles the update from abstract weights, and prints.

    Neither weights nor accelerators are needed: of the model's folder only its configuration, its
    tokenizer and its image processor are read. Nothing is written but the shapes world and the
    counts of tokens, which the run then finds.

    Args:
        config: see `configs/shapes.py`.
        workdir: folder of the run.
        target: devices to plan for with their own compiler, as in `aot.targets.read_name`. Where
            that is not installed, the CPU's plans for as many, and a line says so.

    Returns:
        What was printed.

    Raises:
        FileNotFoundError: model or data is missing.
        ValueError: a bad configuration or bad data, a bad target, too few devices, or a compiler
            that refuses the update because it does not fit.
    """
    with user_input():
        settings.check_config(config)
        config = _for_target(config, target)
        problem = targets.missing(target) if target else None
        if problem:
            print(f"target      {target}: {problem}; the CPU's plans in its place", flush=True)
        compiler = targets.target(target) if target and not problem else None
        devices = compiler.devices if compiler else _devices(config, target)
        mesh = settings.make_mesh(config, devices)
        if compiler and mesh is None:  # a mesh says which device it is
            mesh = build_mesh("single", devices)
        source = inspect_folder(*model_folders(config))
        setup = settings.make_setup(config, source.config, mesh)
        data = training_source(config, Path(workdir).expanduser().resolve())
        batches = open_batches(config, data, file_identity(data.file), source)
    with advice(config, devices):
        plan = make_plan(
            batches, setup, mesh, model_dtype(config), config.batch_size,
            compiler.compile if compiler else None,
        )  # fmt: skip
    for line in _report(plan, config, setup, mesh, devices):
        print(line, flush=True)
    return plan


def _devices(config: Any, target: str | None) -> list[Any]:
    """The accelerators that there are, else as many CPU devices as are planned for."""
    found, count = jax.devices(), config.accelerator.count
    if jax.default_backend() != "cpu" and target is None:
        return found
    if len(found) < count:
        raise ValueError(
            f"config.accelerator.count is {count}, jax has {len(found)} CPU devices: set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return found[:count]


def _report(
    plan: Plan, config: Any, setup: Setup, mesh: Mesh | None, devices: Sequence[Any]
) -> Iterator[str]:
    """The plan in lines."""
    name, (device, utilisation) = config.accelerator.name, settings.accelerator(config)
    parts = row_count(mesh)
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items()) if mesh else "single"
    backend = devices[0].platform
    kind = "virtual CPU" if backend == "cpu" else devices[0].device_kind
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
    if use.total > device.memory:
        yield f"            to change: {'; '.join(remedies(config, devices))}"
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
