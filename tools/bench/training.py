r"""Times the updates of a training run at full size, without real weights or data.

    python -m tools.bench.training --config configs/llava7b.py --model llava-7b

The run is the run of the configuration, on all devices of jax. Weights are random and made on the
devices. Images and conversations are random files in LLaVA's format, which pass the usual input
pipeline. The command prints the time of an update, model FLOP utilization, peak memory, how long an
update waits for its batch, and the policy's part.
"""

import collections
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stepprune_jax.checkpoints.folder import ModelFolder, inspect_folder
from stepprune_jax.checkpoints.identity import file_identity
from stepprune_jax.cli.command_line import Parser, add_config, exit_with, integer_from, read_config
from stepprune_jax.data.source import training_source
from stepprune_jax.efficiency.model_shapes import MODELS, find_backbone
from stepprune_jax.efficiency.timing import peak_memory
from stepprune_jax.efficiency.weights import random_weights
from stepprune_jax.flops import traced_flops
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.accelerators import ACCELERATORS, known_as
from stepprune_jax.parallel.compiling import Usage, usage
from stepprune_jax.parallel.placement import place_rows, replicate_like
from stepprune_jax.policy import FeatureStats
from stepprune_jax.training import dry_run, step
from stepprune_jax.training.batches import Batches, open_batches
from stepprune_jax.training.failures import memory_advice
from stepprune_jax.training.objectives import ModelLoss
from stepprune_jax.training.settings import Run
from stepprune_jax.training.step_config import StepConfig, make_mesh, make_step_config
from stepprune_jax.user_input import expect
from tools.bench.drawn_data import write_conversations, write_model
from tools.bench.timing import machine

# Updates in flight before the host waits for an update, as in train.py.
_IN_FLIGHT = 2
# Updates before the timing, which fill the pipeline.
_WARM_UP = 3
# Number of images. They are not cached, so each batch reads and decodes its images.
_IMAGES = 256
# Timed updates of the same batch.
_REPEATS = 10
_NAME = "tools.bench.training"


class Measured(NamedTuple):
    """Measurements of a run. Seconds are of one update, and operations of all devices.

    Attributes:
        update: mean time between updates with the input pipeline.
        wait: mean time that the host waits for a batch. Updates in flight hide some of it.
        fed: mean time of an update whose batch is ready.
        policy: mean time of the policy's forward, backward and optimizer, with a language model
            without cost.
        model_flops: operations of an update without recomputation by `remat`.
        flops: operations of the program.
        policy_flops: operations of the policy's part.
        planned: memory of a device, as the compiler plans it.
        peak: largest memory in use on a device in bytes; None if jax does not report it.
    """

    update: float
    wait: float
    fed: float
    policy: float
    model_flops: float
    flops: float
    policy_flops: float
    planned: Usage
    peak: int | None


class _Bench(NamedTuple):
    """State of the benchmark."""

    params: Any
    state: step.State
    stats: FeatureStats
    key: Any
    setup: StepConfig
    batches: Batches


def measure(run: Run, fields: dict[str, Any], steps: int, ids: int, folder: Path) -> Measured:
    """Times the updates of a run.

    Args:
        run: configuration of the run.
        fields: config.json of the model.
        steps: number of timed updates.
        ids: tokens of a conversation, with its image as one token.
        folder: folder for the random data.
    """
    run = replace_data(run, fields, ids, folder, _IMAGES)
    mesh = make_mesh(run)
    source, batches = _open(run, folder)
    setup = make_step_config(run, source.backbone, mesh)
    (bucket,), dtype, rows = batches.buckets, jnp.dtype(run.model.dtype), run.batch_size
    traced = dry_run.trace_update(setup, dtype, rows, bucket)
    once = dataclasses.replace(setup, forward=setup.forward._replace(execution=Execution()))
    model_flops = traced_flops(dry_run.trace_update(once, dtype, rows, bucket).jaxpr)
    update = traced.lower().compile()
    params = random_weights(dry_run.abstract_weights(setup, dtype))
    init_key, key = jax.random.split(jax.random.key(run.seed))
    state = jax.jit(step.init_state, static_argnums=1)(init_key, setup)
    stats = FeatureStats.start(setup.backbone.config.vision.hidden_size)
    bench = _Bench(params, *replicate_like(params, (state, stats, key)), setup, batches)
    seconds, wait, bench = _time_with_pipeline(bench, update, steps)
    peak = peak_memory()
    batch = place_rows(mesh, batches[0])
    fed, bench = _time_repeatedly(
        bench, lambda b, n: update(b.params, b.state, b.stats, batch, key=b.key, step=n)
    )
    compiled, policy_flops = _compile_policy_part(bench, batch)
    policy, _ = _time_repeatedly(bench, lambda b, n: compiled(b.state, b.stats, b.key, n))
    return Measured(
        seconds,
        wait,
        fed,
        policy,
        model_flops,
        traced_flops(traced.jaxpr),
        policy_flops,
        usage(update),
        peak,
    )


def replace_data(run: Run, fields: dict[str, Any], ids: int, folder: Path, images: int) -> Run:
    """Writes a random model and random data, and returns the run with these folders."""
    return run.replace(
        {
            "model.folder": str(write_model(folder / "model", fields)),
            "model.vision_folder": "",
            "data.folder": str(write_conversations(folder / "data", images, ids)),
            "data.train_file": "",
            "data.image_folder": "",
            "data.index_folder": str(folder),
            "data.split_turns": False,
            "data.cache_gb": 0.0,
        }
    )


def _open(run: Run, folder: Path) -> tuple[ModelFolder, Batches]:
    """Opens the model folder and the input pipeline."""
    source, data = inspect_folder(run.model.folder), training_source(run.data, folder)
    batches = open_batches(run, data, file_identity(data.file), source, say=lambda line: None)
    return source, batches


def _time_with_pipeline(
    bench: _Bench, update: Callable[..., Any], steps: int
) -> tuple[float, float, _Bench]:
    """Returns the mean seconds of an update and of waiting for a batch, and the final state."""
    state, in_flight, wait, start_time = bench.state, collections.deque(), 0.0, 0.0
    stream = bench.batches.stream(_WARM_UP + steps)
    try:
        for number in range(_WARM_UP + steps):
            if number == _WARM_UP:
                jax.block_until_ready(state)
                start_time, wait = time.perf_counter(), 0.0
            wait_start = time.perf_counter()
            batch = next(stream)
            wait += time.perf_counter() - wait_start
            batch = place_rows(bench.setup.forward.mesh, batch)
            state, scalars = update(
                bench.params, state, bench.stats, batch, key=bench.key, step=np.int32(number)
            )
            in_flight.append(scalars["loss"])
            if len(in_flight) > _IN_FLIGHT:
                jax.block_until_ready(in_flight.popleft())
        jax.block_until_ready(state)
    finally:
        stream.close()
    return (time.perf_counter() - start_time) / steps, wait / steps, bench._replace(state=state)


def _time_repeatedly(
    bench: _Bench, update: Callable[[_Bench, np.int32], Any]
) -> tuple[float, _Bench]:
    """Returns the mean seconds of updates, after one update without timing, and the state."""
    for number in range(_REPEATS + 1):
        if number == 1:
            jax.block_until_ready(bench.state)
            begin = time.perf_counter()
        bench = bench._replace(state=update(bench, np.int32(number))[0])
    jax.block_until_ready(bench.state)
    return (time.perf_counter() - begin) / _REPEATS, bench


def _compile_policy_part(
    bench: _Bench, batch: step.TrainingBatch
) -> tuple[Callable[..., Any], float]:
    """Returns the compiled policy's part of an update, and its number of operations."""
    setup = bench.setup
    inputs = jax.jit(step.selector_inputs, static_argnames=("config",))(
        bench.params, config=setup, batch=batch
    )

    def learn(state, stats, inputs, key, number):
        model_loss = ModelLoss(
            lambda tokens: jnp.mean(tokens.astype(jnp.float32)),
            lambda kept, _: jnp.mean(kept.tokens.astype(jnp.float32), axis=(-2, -1)),
            lambda inputs: jnp.mean(inputs.image.astype(jnp.float32), axis=-1),
        )
        return step.learn(
            state,
            stats,
            inputs=inputs,
            model_loss=model_loss,
            key=key,
            step=number,
            config=setup,
        )

    traced = jax.jit(learn, donate_argnums=0).trace(
        bench.state, bench.stats, inputs, bench.key, np.int32(0)
    )
    compiled = traced.lower().compile()

    def call(state, stats, key, number):
        return compiled(state, stats, inputs, key, number)

    return call, float(traced_flops(traced.jaxpr))


def report(measured: Measured, devices: int, name: str | None) -> Iterator[str]:
    """Yields the lines of the report."""
    yield f"update        {measured.update:.4g} s, fed by the pipeline"
    yield f"              {measured.fed:.4g} s with the batch at hand"
    rate = measured.model_flops / measured.update
    rate_text = f"{measured.model_flops / 1e12:.4g} TFLOPs an update, {rate / 1e12:.4g} TFLOP/s"
    if name:
        peak = devices * ACCELERATORS[name].flops
        recomputed = f"{measured.flops / measured.update / peak:.1%} with recomputation by remat"
        yield f"MFU           {rate / peak:.1%} of {devices} {name} ({recomputed}); {rate_text}"
    else:
        yield f"MFU           none: the peak of this device is not known; {rate_text}"
    planned = f"the compiler planned {measured.planned.total / 2**30:.2f} GiB"
    if measured.peak is None:
        yield f"peak memory   not reported by this device; {planned}"
    else:
        yield f"peak memory   {measured.peak / 2**30:.2f} GiB on a device; {planned}"
    share = measured.wait / measured.update
    yield f"input wait    {measured.wait:.4g} s an update, {share:.1%} of its time"
    yield (
        f"policy        {measured.policy:.4g} s, {measured.policy / measured.fed:.1%} of an update "
        f"with the batch at hand; {measured.policy_flops / measured.flops:.1%} of its operations"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = Parser(prog=_NAME, description=__doc__.splitlines()[0])
    add_config(parser)
    model_names = ", ".join(MODELS)
    parser.add_argument(
        "--model", default="llava-7b", help=f"shape: a folder, or one of {model_names}"
    )
    parser.add_argument("--steps", type=integer_from(1), default=50, help="timed updates")
    parser.add_argument(
        "--ids",
        type=integer_from(1),
        default=640,
        help="tokens of a conversation, with its image as one token",
    )
    flags, run = read_config(parser, arguments, Run)
    model, ids = flags.model, flags.ids
    max_ids = 1 + run.data.context_limit - find_backbone(model).config.max_image_tokens
    expect("--ids", ids, ids <= max_ids, f"at most {max_ids}, as config.data.context_limit allows")
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    fields = MODELS[model] if model in MODELS else json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as folder, memory_advice(run):
        measured = measure(run, fields, flags.steps, ids, Path(folder))
    mesh = make_mesh(run)
    print(machine())
    print(f"{model}, mesh {run.mesh}, {run.batch_size} rows of {ids} ids; {flags.steps} updates")
    name = known_as(jax.devices()[0].device_kind)
    for line in report(measured, mesh.size if mesh else 1, name):
        print(line, flush=True)


if __name__ == "__main__":
    exit_with(_NAME, main)
