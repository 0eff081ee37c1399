"""The cost of a run, compiled and counted from shapes: `train.py --dry_run`."""

import collections
import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import PyTree

from stepprune_jax.checkpoints.identity import file_identity
from stepprune_jax.data.source import training_source
from stepprune_jax.flops import traced_flops
from stepprune_jax.models import vlm
from stepprune_jax.parallel.accelerators import ACCELERATORS, Accelerator
from stepprune_jax.parallel.aot_targets import Target, make_target, missing, read_name
from stepprune_jax.parallel.compiling import Usage, usage
from stepprune_jax.parallel.placement import row_count
from stepprune_jax.parallel.sharding import BATCH_RULES, Rules, build_mesh, shardings
from stepprune_jax.policy import FeatureStats
from stepprune_jax.policy.jax_settings import THREEFRY
from stepprune_jax.training import step
from stepprune_jax.training.batches import Batches, Bucket, open_batches, row_limits
from stepprune_jax.training.failures import memory_advice, remedies
from stepprune_jax.training.language_loss import Targets
from stepprune_jax.training.settings import (
    AUTO,
    SETS,
    AcceleratorSettings,
    Phase,
    Run,
    make_mesh,
    make_step_config,
    split,
)
from stepprune_jax.user_input import UserError, local_path

_LOG = logging.getLogger(__name__)

# Number of batches, evenly spaced over the run, whose widths represent those of all.
_SAMPLED = 512
# The program is not run, so its machine code need not be fast: this halves the time.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class RunCost(NamedTuple):
    """The cost of a run.

    Attributes:
        devices: number of devices.
        weights: bytes of the frozen weights on each device.
        memory: memory of the widest update, on each device.
        flops: FLOPs of one update on all devices together, averaged over the run's batches.
        widths: number of sampled batches of each width.
    """

    devices: int
    weights: int
    memory: Usage
    flops: float
    widths: dict[Bucket, int]

    def hours(self, steps: int, device: Accelerator, utilisation: float) -> float:
        """Returns the hours of `steps` updates at a share of the devices' peak."""
        return steps * self.flops / (self.devices * device.flops * utilisation) / 3600


def sample_widths(batches: Batches, steps: int) -> tuple[dict[Bucket, int], Bucket]:
    """Returns the widths of batches, by how many of a sample have them, and the widest of all."""
    apart = max(1, steps // _SAMPLED)
    widths = (batches.bucket(batches.indices(number)) for number in range(0, steps, apart))
    return dict(collections.Counter(widths)), batches.buckets[-1]


def assume_widths(run: Run, setup: step.StepConfig) -> tuple[dict[Bucket, int], Bucket]:
    """Returns the width of batches whose rows have the stated length, and the widest allowed."""
    data = run.data
    most = row_limits(data, setup.backbone.config).ids
    run.accelerator.expect("ids", run.accelerator.ids <= most, f"at most {most}, for one image")

    def bucket(ids: int) -> Bucket:
        wide = -(-ids // data.length_multiple) * data.length_multiple
        return Bucket(wide, min(wide, data.policy_text_limit), ids)

    return {bucket(run.accelerator.ids): 1}, bucket(most)


def make_plan(
    sampled: tuple[dict[Bucket, int], Bucket],
    setup: step.StepConfig,
    dtype: DTypeLike,
    rows: int,
    target: Target | None = None,
) -> RunCost:
    """Compiles the widest update, and counts the operations of every width."""
    widths, widest = sampled
    traced = {bucket: trace_update(setup, dtype, rows, bucket) for bucket in {*widths, widest}}
    held = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(abstract_weights(setup, dtype))
    )
    flops = sum(count * traced_flops(traced[bucket].jaxpr) for bucket, count in widths.items())
    memory = planned_memory(traced[widest], target)
    mesh = setup.forward.mesh
    return RunCost(mesh.size if mesh else 1, held, memory, flops / sum(widths.values()), widths)


def planned_memory(traced: jax.stages.Traced, target: Target | None = None) -> Usage:
    """Compiles the result of `trace_update` and returns its memory on each device."""
    if target is not None:
        return usage(target.compile(traced.lower()))
    on_cpu = jax.default_backend() == "cpu"
    return usage(traced.lower().compile(compiler_options=_QUICK if on_cpu else None))


def trace_update(
    setup: step.StepConfig, dtype: DTypeLike, rows: int, bucket: Bucket
) -> jax.stages.Traced:
    """Traces an update of abstract weights, state and batch, placed as in a run."""
    mesh = setup.forward.mesh
    key = jax.eval_shape(lambda: jax.random.key(0, impl=THREEFRY))
    state = jax.eval_shape(lambda key: step.init_state(key, setup), key)
    stats = jax.eval_shape(lambda: FeatureStats.start(setup.backbone.config.token_width))
    state, stats, key = _placed((state, stats, key), mesh, ((r".*", P()),))
    batch = _placed(abstract_batch(setup, rows, bucket), mesh, BATCH_RULES)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    weights = abstract_weights(setup, dtype)
    return step.update.trace(weights, state, stats, batch, key, number, setup=setup)


def abstract_batch(setup: step.StepConfig, rows: int, bucket: Bucket) -> step.TrainingBatch:
    """Returns the shapes of a batch with these widths, as `Batches` builds it."""

    def ints(*shape: int, dtype: DTypeLike = jnp.int32):
        return jax.ShapeDtypeStruct((rows, *shape), dtype)

    targets, supervised = ints(bucket.targets), ints(bucket.targets, dtype=jnp.bool_)
    conversations = Targets(ints(bucket.ids), ints(), targets, targets, supervised, ints(2))
    pixels = setup.backbone.largest_pixel_shapes(rows)
    return step.TrainingBatch(pixels, ints(bucket.text), ints(), conversations)


def abstract_weights(setup: step.StepConfig, dtype: DTypeLike) -> PyTree:
    """Returns the shapes of the frozen weights, placed as in a run."""
    weights = vlm.abstract_params(setup.backbone, dtype, setup.weights)
    return _placed(weights, setup.forward.mesh, setup.backbone.SHARDING_RULES)


def _placed(tree: PyTree, mesh: Mesh | None, rules: Rules) -> PyTree:
    """Returns abstract arrays with the shardings of a run."""
    if mesh is None:
        alone = SingleDeviceSharding(jax.devices()[0])
        where = jax.tree.map(lambda _: alone, tree)
    else:
        where = shardings(tree, rules, mesh)
    return jax.tree.map(
        lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), tree, where
    )


def use_virtual_devices(run: Run, target: str | None = None) -> None:
    """Creates as many CPU devices as are planned for; to be called before jax starts.

    If jax sees accelerators, those are used instead, unless there is a target.
    """
    jax.config.update("jax_num_cpu_devices", _planned_for(run, target).count)
    if target is not None:
        jax.config.update("jax_platforms", "cpu")


def _planned_for(run: Run, target: str | None) -> AcceleratorSettings:
    """Returns the group `accelerator`, with the devices of the target if there is one."""
    if target is None:
        return run.accelerator
    named = read_name(target)
    return dataclasses.replace(run.accelerator, name=named.accelerator, count=named.count)


def dry_run(run: Run, workdir: str | Path, target: str | None = None) -> RunCost:
    """Checks configuration and data, compiles the update from abstract weights, and logs a plan.

    Neither weights nor accelerators are needed: only the model's configuration, tokenizer and image
    processor are read. Nothing is written but the token counts, which the run then reuses. Where
    the training file or the folder of its images is absent, all rows are as long as
    `config.accelerator.ids`, which a line says.

    Returns:
        The cost of the run; of one in phases the most memory, and the mean operations of an update.
    """
    run = dataclasses.replace(run, accelerator=_planned_for(run, target))
    problem = missing(target) if target else None
    if problem:
        _LOG.info("target      %s: %s; planning with the CPU's compiler", target, problem)
    compiler = make_target(target) if target and not problem else None
    devices = compiler.devices if compiler else _devices(run, target)
    mesh = make_mesh(run, devices)
    if compiler and mesh is None:  # a mesh determines the device
        mesh = build_mesh("single", devices)
    source = run.model.inspect()
    phases = split(run)
    setups = [make_step_config(phase.run, source.backbone, mesh) for phase in phases]
    try:
        data = training_source(run.data, local_path(workdir).resolve())
    except FileNotFoundError as error:
        _LOG.info(
            "data        %s: assuming %d ids of every row, and for memory the longest that "
            "config.data.context_limit allows",
            error,
            run.accelerator.ids,
        )
        sampled = assume_widths(run, setups[0])
    else:
        batches = open_batches(run, data, file_identity(data.file), source)
        sampled = sample_widths(batches, run.steps)
    dtype, plans = jnp.dtype(run.model.dtype), []
    with memory_advice(run, devices):
        for setup in setups:
            plans.append(make_plan(sampled, setup, dtype, run.batch_size, compiler))
    for line in _report(plans, phases, run, setups[0], devices):
        _LOG.info(line)
    widest = max(plans, key=lambda plan: plan.memory.total)
    costs = [plan.flops * phase.run.steps for plan, phase in zip(plans, phases, strict=True)]
    return widest._replace(flops=sum(costs) / run.steps)


def _devices(run: Run, target: str | None) -> list[jax.Device]:
    """Returns the present accelerators, or as many CPU devices as are planned for."""
    devices, count = jax.devices(), run.accelerator.count
    if jax.default_backend() != "cpu" and target is None:
        return devices
    if len(devices) < count:
        raise UserError(
            f"config.accelerator.count is {count}, jax has {len(devices)} CPU devices: set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return devices[:count]


def _report(
    plans: Sequence[RunCost],
    phases: Sequence[Phase],
    run: Run,
    setup: step.StepConfig,
    devices: Sequence[jax.Device],
) -> Iterator[str]:
    """Yields the plans of a run's phases line by line; `setup` is of any of them."""
    name, utilisation = run.accelerator.name, run.accelerator.utilisation
    device, mesh, plan = ACCELERATORS[name], setup.forward.mesh, plans[0]
    parts = row_count(mesh)
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items()) if mesh else "single"
    backend = devices[0].platform
    kind = "virtual CPU" if backend == "cpu" else devices[0].device_kind
    yield f"mesh        {sizes}: {plan.devices} {kind} device(s)"
    rows = setup.forward.rows or run.batch_size
    yield (
        f"batch       {run.batch_size} rows per update, {run.batch_size // parts} on each "
        f"device; the frozen model takes {rows // parts} of them at a time"
    )
    hours = {}
    for plan, phase in zip(plans, phases, strict=True):
        if run.recipe == AUTO:
            yield f"phase       {phase}"
        yield from _of_phase(plan, run, devices)
        hours[phase.name] = plan.hours(1, device, utilisation)
        yield (
            f"time        {phase.run.steps * hours[phase.name]:.3g} hours for {phase.run.steps} "
            f"updates on {plan.devices} {name}, if they reach {utilisation:.0%} of "
            f"{device.flops / 1e12:.0f} TFLOP/s in bfloat16 (assumed: "
            "config.accelerator.utilisation)"
        )
    if len(phases) > 1:
        both = sum(phase.run.steps * hours[phase.name] for phase in phases)
        yield (
            f"auto        {both:.3g} hours if it begins with the gate, "
            f"{run.steps * hours[SETS]:.3g} if all {run.steps} updates are on sampled sets"
        )


def _of_phase(plan: RunCost, run: Run, devices: Sequence[jax.Device]) -> Iterator[str]:
    """Yields memory and operations of a phase."""
    backend, name = devices[0].platform, run.accelerator.name
    device = ACCELERATORS[name]
    use, gib = plan.memory, 2**30
    others = use.arguments - plan.weights + use.outputs
    yield (
        f"memory      {use.total / gib:.2f} GiB on each device, as XLA's {backend.upper()} "
        f"compiler plans the widest update: frozen weights {plan.weights / gib:.2f}, state and "
        f"batch {others / gib:.2f}, temporary {use.temporary / gib:.2f}"
    )
    verdict = "fits" if use.total <= device.memory else "DOES NOT FIT"
    yield (
        f"            {name}: {device.memory / gib:.1f} GiB, {verdict} "
        f"({use.total / device.memory:.0%})"
    )
    if use.total > device.memory:
        yield f"            to change: {'; '.join(remedies(run, devices))}"
    total = sum(plan.widths.values())
    shares = ", ".join(
        f"{bucket.ids} ids {count / total:.0%}" for bucket, count in sorted(plan.widths.items())
    )
    yield f"operations  {plan.flops:.3g} FLOPs per update on all devices, the mean over {shares}"
