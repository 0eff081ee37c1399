"""The training loop, from a configuration to a trained selector's file."""

import collections
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from stepprune_jax import distributed
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.load import VLM, load_vlm
from stepprune_jax.checkpoints.policy import Policy, save_policy
from stepprune_jax.data.source import training_source
from stepprune_jax.generate.placement import beside, local_rows, place_rows
from stepprune_jax.policy import FeatureStats
from stepprune_jax.training import settings, step
from stepprune_jax.training.batches import Batches, Stream
from stepprune_jax.training.checkpoints import (
    POLICY_FILE,
    Checkpoints,
    Saved,
    claim,
    file_identity,
    model_identity,
)
from stepprune_jax.training.data import open_batches
from stepprune_jax.training.interrupt import Interrupt
from stepprune_jax.training.metrics import MetricsLog, NoLog, summary_writer
from stepprune_jax.user_input import user_input

# Updates that may wait on the device while the host goes on; each holds its batch.
_IN_FLIGHT = 2


class _Run(NamedTuple):
    """What the loop needs."""

    model: VLM
    setup: step.Setup
    mesh: Mesh | None
    batches: Batches


def train(config: Any, workdir: str | Path) -> None:
    """Trains a selector on a frozen model, or goes on where an interrupted run stopped.

    Writes `metrics.jsonl` (an object a line), `run.json`, `checkpoints/` and at the end
    `policy.safetensors`. The continuation of a run gives the numbers that the whole run would have
    given, bit for bit. On Ctrl-C or SIGTERM it saves and returns. Of several processes
    (`stepprune_jax.distributed`) all have to call it, with a folder that all of them see.

    Args:
        config: see `configs/shapes.py`.
        workdir: folder of the run; one run each.

    Raises:
        FileNotFoundError: model, data or a picture is missing.
        ValueError: a bad configuration, bad data, or the folder of another run.
    """
    workdir = Path(workdir).expanduser().resolve()
    with user_input():
        settings.check_config(config)
        mesh = settings.make_mesh(config)
        if config.tensorboard:
            summary_writer(workdir / "tensorboard").close()
        source = inspect_folder(*settings.model_folders(config))
        setup = settings.make_setup(config, source.config, mesh)
        data = distributed.main_first(lambda: training_source(config, workdir))
        identities = model_identity(source), file_identity(data.file)
        about = distributed.main_first(lambda: claim(workdir, config, *identities))
    with Interrupt() as interrupt:
        checkpoints = Checkpoints(workdir, config.keep_checkpoints)
        try:
            if checkpoints.latest == config.steps and (workdir / POLICY_FILE).is_file():
                distributed.say(
                    f"{workdir} has finished its {config.steps} steps: see {POLICY_FILE}"
                )
                return
            with user_input():
                rows = local_rows(mesh, config.batch_size)
                batches = open_batches(config, data, identities[1], source, rows, distributed.say)
                distributed.require_same(batches.identity, "the samples that can be trained on")
                run = _prepare(config, batches, setup, mesh)
            _loop(config, workdir, run, checkpoints, interrupt, about)
        finally:
            checkpoints.close()


def _prepare(config: Any, batches: Batches, setup: step.Setup, mesh: Mesh | None) -> _Run:
    """Loads the model, once the data are known to be good."""
    name, vision = settings.model_folders(config)
    model = load_vlm(
        name, mesh, settings.model_dtype(config), vision_folder=vision,
        progress=distributed.is_main(),
    )  # fmt: skip
    distributed.say(
        f"Widths {', '.join(str(bucket.ids) for bucket in batches.buckets)}; {config.steps} steps "
        f"of {config.batch_size} on {jax.device_count() if mesh else 1} "
        f"{jax.default_backend()} device(s)"
    )
    return _Run(model, setup, mesh, batches)


def _begin(run: _Run, config: Any, checkpoints: Checkpoints) -> tuple[int, Saved, Stream]:
    """What to start from, the latest checkpoint or a new state, and the batches from there on."""
    seed = jax.random.key(config.seed)
    init_key, key = (jax.random.fold_in(seed, use) for use in range(2))
    state = jax.jit(step.init_state, static_argnums=1)(init_key, run.setup)
    stats = FeatureStats.start(run.setup.model.vision.hidden_size)
    fresh = beside(run.model.params, Saved(state, stats, jax.random.key_data(key)))
    if checkpoints.latest is not None:
        done, saved, about = checkpoints.restore(fresh)
        distributed.say(f"Resuming after step {done}")
        return done, saved, run.batches.stream(config.steps, about["batches"])
    fresh = fresh._replace(stats=_statistics(run, config, fresh.stats))
    return 0, fresh, run.batches.stream(config.steps)


def _statistics(run: _Run, config: Any, stats: FeatureStats) -> FeatureStats:
    """Feature statistics over the pictures of the first steps."""
    paths = run.batches.first_images(config.data.stats_images)
    size = config.batch_size
    for start in range(0, len(paths), size):
        part = paths[start : start + size]
        real = np.arange(size) < len(part)
        part += part[:1] * (size - len(part))
        pixels = np.stack([run.batches.pixels(path) for path in part])
        pixels, real = place_rows(run.mesh, (pixels, real))
        stats = step.gather_stats(
            run.model.params, stats, pixels, real, setup=run.setup, mesh=run.mesh
        )
    return stats


def _loop(
    config: Any, workdir: Path, run: _Run, checkpoints: Checkpoints, interrupt: Interrupt,
    about: dict[str, Any],
):  # fmt: skip
    """Updates until the end or an interruption."""
    done, (state, stats, key_data), stream = _begin(run, config, checkpoints)
    kind = MetricsLog if distributed.is_main() else NoLog
    log = kind(workdir, done, config.steps, config.batch_size, config.tensorboard)
    key, first = jax.random.wrap_key_data(key_data), done
    waiting: collections.deque = collections.deque()
    try:
        for batch in stream:
            batch = place_rows(run.mesh, batch, config.batch_size)
            state, scalars = step.update(
                run.model.params, state, stats, batch, key, np.int32(done),
                setup=run.setup, mesh=run.mesh,
            )  # fmt: skip
            done += 1
            waiting.append(scalars["loss"])
            if len(waiting) > _IN_FLIGHT:
                jax.block_until_ready(waiting.popleft())
            if done == first + 1:
                jax.block_until_ready(scalars)
                log.start_clock(done)
            last = done == config.steps or distributed.any_process(interrupt.requested)
            if done % config.log_every == 0 or done == config.steps:
                log.write(done, scalars)
            if done % config.checkpoint_every == 0 or last:
                checkpoints.save(
                    done, Saved(state, stats, key_data), about | {"batches": stream.state}
                )
            if last:
                break
    finally:
        stream.close()
        log.close()
    if done < config.steps:
        distributed.say(
            f"Stopped after step {done} of {config.steps}; the same command goes on from there"
        )
    elif distributed.is_main():
        _save(workdir, run, state, stats)


def _save(workdir: Path, run: _Run, state: step.State, stats: FeatureStats):
    """Writes the trained selector as one file."""
    policy = Policy(state.params, run.setup.selector, stats)
    path = save_policy(policy, workdir / POLICY_FILE)
    print(f"Done: {path}", flush=True)
