"""The cost of a run, compiled and counted from shapes: `train.py --dry_run`."""

import collections
import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import PyTree

from stepprune_jax.checkpoints import hub
from stepprune_jax.checkpoints.folder import ModelFolder
from stepprune_jax.checkpoints.identity import file_identity
from stepprune_jax.checkpoints.model_settings import ModelSettings
from stepprune_jax.checkpoints.shipped import PUBLISHED_CONFIGS, read_shipped_config
from stepprune_jax.data.source import training_source
from stepprune_jax.flops import traced_flops
from stepprune_jax.models import vlm
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.families import find_family
from stepprune_jax.models.sequence import Clips
from stepprune_jax.parallel.accelerators import ACCELERATORS, Accelerator
from stepprune_jax.parallel.aot_targets import Target, make_target, missing, read_name
from stepprune_jax.parallel.compiling import Usage, usage
from stepprune_jax.parallel.placement import row_count
from stepprune_jax.parallel.sharding import BATCH_RULES, Rules, build_mesh, shardings
from stepprune_jax.policy import FeatureStats
from stepprune_jax.policy.buckets import round_up
from stepprune_jax.policy.jax_settings import THREEFRY
from stepprune_jax.training import step
from stepprune_jax.training.batches import Batches, Bucket, open_batches, row_limits
from stepprune_jax.training.failures import memory_advice, remedies
from stepprune_jax.training.language_loss import Targets
from stepprune_jax.training.settings import AcceleratorSettings, Run
from stepprune_jax.training.step_config import (
    Devices,
    StepConfig,
    make_mesh,
    make_step_configs,
)
from stepprune_jax.user_input import UserError, local_path

_LOG = logging.getLogger(__name__)

# Number of batches whose widths are counted, evenly spaced over the run. Counting all batches of a
# long run would be slow.
_NUM_COUNTED_BATCHES = 512
# The program is not run, so its machine code need not be fast: this halves the time to compile.
_QUICK_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
_GIB = 2**30


class BatchWidths(NamedTuple):
    """Padded widths of the batches of a run.

    Attributes:
        counts: number of counted batches of each `Bucket` of widths.
        widest: widths of the widest batch of the run.
    """

    counts: dict[Bucket, int]
    widest: Bucket


class RunCost(NamedTuple):
    """The cost of a run, or of one of its phases.

    Attributes:
        devices: number of devices.
        weights: bytes of the frozen weights on each device.
        memory: memory of the widest update, on each device.
        flops: FLOPs of one update on all devices together, averaged over the run's batches.
        widths: number of counted batches of each `Bucket` of widths.
    """

    devices: int
    weights: int
    memory: Usage
    flops: float
    widths: dict[Bucket, int]

    def hours(self, steps: int, device: Accelerator, utilisation: float) -> float:
        """Estimates the hours of a number of updates.

        Args:
            steps: number of updates.
            device: the kind of device, with its peak FLOPs per second.
            utilisation: fraction of the peak that the updates reach.
        """
        return steps * self.flops / (self.devices * device.flops * utilisation) / 3600


def count_widths(batches: Batches, steps: int) -> BatchWidths:
    """Counts the padded widths of evenly spaced batches of a run of `steps` updates."""
    stride = max(1, steps // _NUM_COUNTED_BATCHES)
    widths = (batches.bucket(batches.indices(step)) for step in range(0, steps, stride))
    return BatchWidths(dict(collections.Counter(widths)), batches.widest)


def assume_widths(run: Run, config: StepConfig) -> BatchWidths:
    """Assumes that each row of the absent training file has `config.accelerator.ids` ids.

    Args:
        run: settings of the run.
        config: static part of the updates.

    Returns:
        One batch of the assumed widths. The widest batch has rows of the longest length that the
        data settings allow.

    Raises:
        UserError: `config.accelerator.ids` is more than the data settings allow.
    """
    data, ids = run.data, run.accelerator.ids
    max_ids = row_limits(data, config.backbone.config).ids
    run.accelerator.expect("ids", ids <= max_ids, f"at most {max_ids}, for one image")

    def make_bucket(num_ids: int) -> Bucket:
        ids_width = int(round_up(num_ids, data.length_multiple))
        # The user's words and the targets are at most all ids of the row.
        return Bucket(ids_width, min(ids_width, data.policy_text_limit), num_ids)

    return BatchWidths({make_bucket(ids): 1}, make_bucket(max_ids))


def measure_cost(
    widths: BatchWidths,
    config: StepConfig,
    dtype: DTypeLike,
    rows: int,
    target: Target | None = None,
) -> RunCost:
    """Compiles the widest update of a phase, and counts the operations of every width.

    Args:
        widths: widths of the batches.
        config: static part of the updates.
        dtype: dtype of the frozen weights.
        rows: rows of a batch.
        target: compiler for devices that are not present; None compiles for the devices of jax.

    Returns:
        The cost of the phase.
    """
    counts, widest = widths
    traced = {bucket: trace_update(config, dtype, rows, bucket) for bucket in {*counts, widest}}
    weight_bytes = sum(  # of the part of each array that one device stores
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(abstract_weights(config, dtype))
    )
    flops = sum(count * traced_flops(traced[bucket].jaxpr) for bucket, count in counts.items())
    memory = planned_memory(traced[widest], target)
    mesh = config.forward.mesh
    num_devices = mesh.size if mesh else 1
    return RunCost(num_devices, weight_bytes, memory, flops / sum(counts.values()), counts)


def planned_memory(traced: jax.stages.Traced, target: Target | None = None) -> Usage:
    """Returns the memory that the compiler plans for an update on each device.

    Args:
        traced: result of `trace_update`.
        target: compiler for devices that are not present; None compiles for the devices of jax.
    """
    if target is not None:
        return usage(target.compile(traced.lower()))
    is_on_cpu = jax.default_backend() == "cpu"
    return usage(traced.lower().compile(compiler_options=_QUICK_OPTIONS if is_on_cpu else None))


def trace_update(
    config: StepConfig, dtype: DTypeLike, rows: int, bucket: Bucket
) -> jax.stages.Traced:
    """Traces an update without allocating arrays.

    Args:
        config: static part of the update.
        dtype: dtype of the frozen weights.
        rows: rows of a batch.
        bucket: padded widths of the batch.

    Returns:
        The traced update, whose arguments have the shardings of a run.
    """
    mesh = config.forward.mesh
    key = jax.eval_shape(lambda: jax.random.key(0, impl=THREEFRY))
    state = jax.eval_shape(lambda key: step.init_state(key, config), key)
    stats = jax.eval_shape(lambda: FeatureStats.start(config.backbone.config.token_width))
    state, stats, key = _place((state, stats, key), mesh, ((r".*", P()),))
    batch = _place(abstract_batch(config, rows, bucket), mesh, BATCH_RULES)
    step_number = jax.ShapeDtypeStruct((), jnp.int32)
    weights = abstract_weights(config, dtype)
    return step.update.trace(weights, state, stats, batch, key=key, step=step_number, config=config)


def abstract_batch(config: StepConfig, rows: int, bucket: Bucket) -> step.TrainingBatch:
    """Returns the shapes and dtypes of a batch of `Batches`.

    Args:
        config: static part of the updates.
        rows: rows of the batch.
        bucket: padded widths of the rows.
    """

    def make_array(*shape: int, dtype: DTypeLike = jnp.int32):
        return jax.ShapeDtypeStruct((rows, *shape), dtype)

    conversations = Targets(
        ids=make_array(bucket.ids),
        length=make_array(),
        place=make_array(bucket.targets),
        target=make_array(bucket.targets),
        supervised=make_array(bucket.targets, dtype=jnp.bool_),
        grid=make_array(2),
    )
    pixels, token_of = config.backbone.largest_pixel_shapes(rows), None
    if bucket.media is not None:
        pixels = config.backbone.patch_shapes(bucket.media.patches, bucket.media.patch_tokens)
        token_of = make_array(bucket.media.tokens)
        shapes: Any = (make_array(dtype=dtype) for dtype in (jnp.int32, jnp.float32, jnp.bool_))
        conversations = conversations._replace(clips=Clips(*shapes))
    return step.TrainingBatch(
        pixels=pixels,
        text=make_array(bucket.text),
        text_length=make_array(),
        targets=conversations,
        token_of=token_of,
    )


def abstract_weights(config: StepConfig, dtype: DTypeLike) -> PyTree:
    """Returns the shapes of the frozen weights, placed as in a run."""
    weights = vlm.abstract_params(config.backbone, dtype, config.weights)
    return _place(weights, config.forward.mesh, config.backbone.SHARDING_RULES)


def _place(tree: PyTree, mesh: Mesh | None, rules: Rules) -> PyTree:
    """Adds the shardings of a run to a tree of abstract arrays.

    Args:
        tree: abstract arrays.
        mesh: mesh of the run; None places all arrays on the first device.
        rules: sharding of each array by its path.

    Returns:
        The tree of abstract arrays with shardings.
    """
    if mesh is None:
        first_device = SingleDeviceSharding(jax.devices()[0])
        placement = jax.tree.map(lambda _: first_device, tree)
    else:
        placement = shardings(tree, rules, mesh)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        placement,
    )


def use_virtual_devices(run: Run, target: str | None = None) -> None:
    """Configures jax to provide the planned number of CPU devices.

    Must be called before jax initializes its devices. Without a target, jax still prefers
    accelerators if it finds any.

    Args:
        run: settings of the run.
        target: devices to plan for, such as "h200:2"; None for the devices that jax finds.
    """
    jax.config.update("jax_num_cpu_devices", _planned_devices(run, target).count)
    if target is not None:
        jax.config.update("jax_platforms", "cpu")


def _planned_devices(run: Run, target: str | None) -> AcceleratorSettings:
    """Returns the settings of the devices to plan for; a target replaces name and count."""
    if target is None:
        return run.accelerator
    target_devices = read_name(target)
    return dataclasses.replace(
        run.accelerator, name=target_devices.accelerator, count=target_devices.count
    )


def dry_run(run: Run, workdir: str | Path, target: str | None = None) -> RunCost:
    """Checks configuration and data, compiles the update from abstract weights, and logs a plan.

    Needs neither weights nor accelerators: only the model's configuration, tokenizer and image
    processor are read. Writes only the token counts, which the run then reuses. If the training
    file, the folder of its images or the tokenizer is absent, all rows are assumed to have
    `config.accelerator.ids` ids, and a line of the log says so. If a published model cannot be
    fetched from the hub, the package's copy of its configuration is used.

    Args:
        run: settings of the run.
        workdir: folder of the run.
        target: devices to plan for, such as "h200:2"; None for the devices that jax finds.

    Returns:
        The cost of the run. For a run in phases, the memory is the maximum over the phases, and the
        FLOPs are the mean over all updates.
    """
    run = dataclasses.replace(run, accelerator=_planned_devices(run, target))
    missing_part = missing(target) if target else None
    if missing_part:
        _LOG.info("target      %s: %s; planning with the CPU's compiler", target, missing_part)
    compiler = make_target(target) if target and not missing_part else None
    devices = compiler.devices if compiler else _find_devices(run, target)
    mesh = make_mesh(run, devices)
    if compiler and mesh is None:  # a mesh determines the device
        mesh = build_mesh("single", devices)
    backbone, source = _find_model(run.model)
    phases = run.make_recipe().phases(run.steps)
    configs = make_step_configs(run, backbone, mesh, phases)
    widths = _find_widths(run, workdir, source, configs[0])
    dtype = jnp.dtype(run.model.dtype)
    with memory_advice(run, devices):
        costs = [
            measure_cost(widths, config, dtype, run.batch_size, compiler) for config in configs
        ]
    for line in _report(costs, configs, run, devices):
        _LOG.info(line)
    largest_cost = max(costs, key=lambda cost: cost.memory.total)
    flops = sum(cost.flops * phase.num_steps for cost, phase in zip(costs, phases, strict=True))
    return largest_cost._replace(flops=flops / run.steps)


def _find_model(settings: ModelSettings) -> tuple[Backbone, ModelFolder | None]:
    """Reads the configuration of the frozen model, if need be the package's copy of it.

    Args:
        settings: names the model.

    Returns:
        The backbone, and the model's folder. The folder is None if a published model could not be
        fetched from the hub.

    Raises:
        FileNotFoundError: there is no such folder, and the package has no copy of the model's
            configuration.
    """
    try:
        source = settings.inspect()
    except FileNotFoundError:
        name = PUBLISHED_CONFIGS.get(settings.folder.removeprefix(hub.PREFIX))
        if name is None or settings.vision_folder:
            raise
        _LOG.info(
            "model       no access to the hub: planning with the package's configuration of %s",
            name,
        )
        config = read_shipped_config(name)
        backbone = find_family(config, name).read(config, None)
        return backbone.bound_images(None, **settings.image_bounds), None
    return source.backbone, source


def _find_widths(
    run: Run, workdir: str | Path, source: ModelFolder | None, config: StepConfig
) -> BatchWidths:
    """Returns the widths of a run's batches; assumed widths if files are missing.

    Args:
        run: settings of the run.
        workdir: folder of the run.
        source: folder of the frozen model; None if there is none, and hence no tokenizer.
        config: static part of the updates.
    """
    try:
        data = training_source(run.data, local_path(workdir).resolve())
        if source is None:
            raise FileNotFoundError(f"no tokenizer of {run.model.folder}")
    except FileNotFoundError as error:
        _LOG.info(
            "data        %s: assuming %d ids of every row, and for memory the longest that "
            "config.data.context_limit allows",
            error,
            run.accelerator.ids,
        )
        return assume_widths(run, config)
    batches = open_batches(
        run,
        data,
        file_identity(data.file),
        source,
        num_devices=row_count(config.forward.mesh),
    )
    return count_widths(batches, run.steps)


def _find_devices(run: Run, target: str | None) -> Devices:
    """Returns the accelerators of jax; without accelerators, the planned number of CPU devices.

    Args:
        run: settings of the run.
        target: devices to plan for; None for the devices that jax finds.

    Raises:
        UserError: jax has fewer CPU devices than planned.
    """
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
    costs: Sequence[RunCost],
    configs: Sequence[StepConfig],
    run: Run,
    devices: Devices,
) -> Iterator[str]:
    """Yields the lines of the report of a dry run.

    Args:
        costs: cost of each phase.
        configs: static part of the updates of each phase.
        run: settings of the run.
        devices: devices of the run.
    """
    name, utilisation = run.accelerator.name, run.accelerator.utilisation
    device, forward, num_devices = ACCELERATORS[name], configs[0].forward, costs[0].devices
    mesh, num_parts = forward.mesh, row_count(forward.mesh)
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items()) if mesh else "single"
    device_kind = "virtual CPU" if devices[0].platform == "cpu" else devices[0].device_kind
    yield f"mesh        {axes}: {num_devices} {device_kind} device(s)"
    rows_per_pass = forward.rows or run.batch_size
    yield (
        f"batch       {run.batch_size} rows per update, {run.batch_size // num_parts} on each "
        f"device; the frozen model takes {rows_per_pass // num_parts} of them at a time"
    )
    phase_hours = []
    for cost, config in zip(costs, configs, strict=True):
        num_steps = config.phase.num_steps
        if len(costs) > 1:
            yield f"phase       {config.phase.objective.title}"
        yield from _report_phase(cost, run, devices)
        phase_hours.append(cost.hours(num_steps, device, utilisation))
        yield (
            f"time        {phase_hours[-1]:.3g} hours for {num_steps} "
            f"updates on {num_devices} {name}, if they reach {utilisation:.0%} of "
            f"{device.flops / 1e12:.0f} TFLOP/s in bfloat16 (assumed: "
            "config.accelerator.utilisation)"
        )
    if len(costs) > 1:
        yield f"in all      {sum(phase_hours):.3g} hours for {run.steps} updates"


def _describe_media(bucket: Bucket) -> str:
    """Describes the videos of a batch, as in " and 16 temporal patches"; "" for images."""
    return f" and {bucket.media.patches} temporal patches" if bucket.media else ""


def _size_order(item: tuple[Bucket, int]) -> tuple[int, ...]:
    """Returns the key that sorts counted widths by the number of ids, then by the videos."""
    bucket, _ = item
    return (*bucket[:3], *(bucket.media or ()))


def _report_phase(cost: RunCost, run: Run, devices: Devices) -> Iterator[str]:
    """Yields the lines on memory and FLOPs of one phase.

    Args:
        cost: cost of the phase.
        run: settings of the run.
        devices: devices of the run.
    """
    backend, name = devices[0].platform, run.accelerator.name
    device, memory = ACCELERATORS[name], cost.memory
    state_bytes = memory.arguments - cost.weights + memory.outputs
    yield (
        f"memory      {memory.total / _GIB:.2f} GiB on each device, as XLA's {backend.upper()} "
        f"compiler plans the widest update: frozen weights {cost.weights / _GIB:.2f}, state and "
        f"batch {state_bytes / _GIB:.2f}, temporary {memory.temporary / _GIB:.2f}"
    )
    verdict = "fits" if memory.total <= device.memory else "DOES NOT FIT"
    yield (
        f"            {name}: {device.memory / _GIB:.1f} GiB, {verdict} "
        f"({memory.total / device.memory:.0%})"
    )
    if memory.total > device.memory:
        yield f"            to change: {'; '.join(remedies(run, devices))}"
    num_batches = sum(cost.widths.values())
    width_shares = ", ".join(
        f"{bucket.ids} ids{_describe_media(bucket)} {count / num_batches:.0%}"
        for bucket, count in sorted(cost.widths.items(), key=_size_order)
    )
    yield (
        f"operations  {cost.flops:.3g} FLOPs per update on all devices, the mean over "
        f"{width_shares}"
    )
