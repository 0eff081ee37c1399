"""What an update of a run takes: compiled and counted from shapes alone."""

import collections
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from stepprune_jax.accelerators import Accelerator
from stepprune_jax.compiling import Usage, usage
from stepprune_jax.flops import traced_flops
from stepprune_jax.models import vlm
from stepprune_jax.policy import FeatureStats
from stepprune_jax.sharding import BATCH_RULES, VLM_RULES, shardings
from stepprune_jax.training import step
from stepprune_jax.training.batches import Batches, Bucket
from stepprune_jax.training.language_loss import Targets

# Batches, evenly spaced over the run, whose widths stand for those of all.
_SAMPLED = 512
# The program is not run, so its machine code need not be good: this halves the time.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Plan(NamedTuple):
    """What a run would take.

    Attributes:
        devices: that it is spread over.
        weights: bytes of the frozen weights on each device.
        memory: of the widest update, on each device.
        flops: of one update on all devices together, the mean over the run's batches.
        widths: number of sampled batches of each width.
    """

    devices: int
    weights: int
    memory: Usage
    flops: float
    widths: dict[Bucket, int]

    def hours(self, steps: int, device: Accelerator, utilisation: float) -> float:
        """Hours for so many updates at a share of the devices' peak."""
        return steps * self.flops / (self.devices * device.flops * utilisation) / 3600


def make_plan(
    batches: Batches,
    setup: step.Setup,
    mesh: Mesh | None,
    dtype: Any,
    rows: int,
    compile_fn: Callable[[Any], Any] | None = None,
) -> Plan:
    """Compiles the widest update, and counts the operations of each.

    Args:
        batches: the data.
        setup: the static part of the step.
        mesh: devices; None for the default one.
        dtype: of the frozen weights.
        rows: of a batch.
        compile_fn: compiles what was traced, for devices that jax does not see; by default for
            those that it sees.

    Returns:
        The plan.
    """
    apart = max(1, setup.steps // _SAMPLED)
    widths = collections.Counter(
        batches.bucket(batches.indices(number)) for number in range(0, setup.steps, apart)
    )
    widest = batches.buckets[-1]
    traced = {
        bucket: trace_update(setup, mesh, dtype, rows, bucket) for bucket in {*widths, widest}
    }
    held = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(abstract_weights(setup, mesh, dtype))
    )
    flops = sum(count * traced_flops(traced[bucket].jaxpr) for bucket, count in widths.items())
    memory = planned_memory(traced[widest], compile_fn)
    return Plan(mesh.size if mesh else 1, held, memory, flops / widths.total(), dict(widths))


def planned_memory(traced: Any, compile_fn: Callable[[Any], Any] | None = None) -> Usage:
    """Compiles what `trace_update` returned, as in `make_plan`; its memory on each device."""
    if compile_fn is not None:
        return usage(compile_fn(traced))
    on_cpu = jax.default_backend() == "cpu"
    return usage(traced.lower().compile(compiler_options=_QUICK if on_cpu else None))


def trace_update(
    setup: step.Setup, mesh: Mesh | None, dtype: Any, rows: int, bucket: Bucket
) -> Any:
    """Traces an update of abstract weights, state and batch, placed as a run has them.

    Args:
        setup: the static part of the step.
        mesh: devices; None for the default one.
        dtype: of the frozen weights.
        rows: of the batch.
        bucket: its widths.

    Returns:
        What `jax.jit(...).trace` returns: it has a `jaxpr`, and `lower`.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(lambda key: step.init_state(key, setup), key)
    stats = jax.eval_shape(lambda: FeatureStats.start(setup.model.vision.hidden_size))
    state, stats, key = _placed((state, stats, key), mesh, ((r".*", P()),))
    batch = _placed(abstract_batch(setup, rows, bucket), mesh, BATCH_RULES)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    weights = abstract_weights(setup, mesh, dtype)
    return step.update.trace(weights, state, stats, batch, key, number, setup=setup, mesh=mesh)


def abstract_batch(setup: step.Setup, rows: int, bucket: Bucket) -> step.Batch:
    """Shapes of a batch of these widths, as `Batches` makes them."""

    def ints(*shape: int, dtype: Any = jnp.int32):
        return jax.ShapeDtypeStruct((rows, *shape), dtype)

    side, targets = setup.model.vision.image_size, ints(bucket.targets)
    supervised = ints(bucket.targets, dtype=jnp.bool_)
    return step.Batch(
        ints(3, side, side, dtype=jnp.float32), ints(bucket.text), ints(),
        Targets(ints(bucket.ids), ints(), targets, targets, supervised),
    )  # fmt: skip


def abstract_weights(setup: step.Setup, mesh: Mesh | None, dtype: Any) -> Any:
    """Shapes of the frozen weights, placed as a run has them."""
    return _placed(vlm.abstract_params(setup.model, dtype), mesh, VLM_RULES)


def _placed(tree: Any, mesh: Mesh | None, rules: Any) -> Any:
    """Abstract arrays with the shardings of a run."""
    if mesh is None:
        alone = SingleDeviceSharding(jax.devices()[0])
        where = jax.tree.map(lambda _: alone, tree)
    else:
        where = shardings(tree, rules, mesh)
    return jax.tree.map(
        lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), tree, where
    )
