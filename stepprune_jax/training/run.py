"""The training loop, from a configuration to a trained selector's file."""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.frozen import model_dtype, model_folders
from stepprune_jax.checkpoints.identity import file_identity, model_identity
from stepprune_jax.checkpoints.load import VLM, load_vlm
from stepprune_jax.checkpoints.policy import Policy, config_metadata, save_policy
from stepprune_jax.data.source import training_source
from stepprune_jax.evaluation.split import Split
from stepprune_jax.parallel import distributed
from stepprune_jax.parallel.placement import replicate_like, local_rows, place_rows
from stepprune_jax.policy import FeatureStats
from stepprune_jax.training import memory, nonfinite, settings, step
from stepprune_jax.training.batches import Batches, Stream
from stepprune_jax.training.boards import check_boards
from stepprune_jax.training.checkpoints import (
    POLICY_FILE,
    Checkpoints,
    Saved,
    claim,
)
from stepprune_jax.training.data import open_batches
from stepprune_jax.training.interrupt import Interrupt
from stepprune_jax.training.validation import Validation, read_questions
from stepprune_jax.training.watch import Watch
from stepprune_jax.user_input import user_input


class _Run(NamedTuple):
    """What the loop needs."""

    model: VLM
    setup: step.Setup
    mesh: Mesh | None
    batches: Batches
    validation: Validation | None


def train(config: Any, workdir: str | Path, window: tuple[int, int] | None = None) -> None:
    """Trains a selector on a frozen model, or goes on where an interrupted run stopped.

    Writes `metrics.jsonl` (an object a line), `run.json`, `checkpoints/` and at the end
    `policy.safetensors`; if asked for, `validation.jsonl`, `overlays/` and `profile/`. The
    continuation of a run gives the numbers that the whole run would have given, bit for bit. On
    Ctrl-C or SIGTERM it saves and returns. Of several processes (`parallel.distributed`) all
    have to call it, with a folder that all of them see.

    Args:
        config: see `configs/shapes.py`.
        workdir: folder of the run; one run each.
        window: first and last update to profile, counted from 1.

    Raises:
        FileNotFoundError: model, data or a picture is missing.
        ValueError: a bad configuration, bad data, or the folder of another run; too little memory;
            or too many updates in a row without a finite loss and gradient.
    """
    workdir = Path(workdir).expanduser().resolve()
    with user_input():
        settings.check_config(config)
        mesh = settings.make_mesh(config)
        check_boards(config)
        source = inspect_folder(*model_folders(config))
        setup = settings.make_setup(config, source.config, mesh)
        data = distributed.main_first(lambda: training_source(config, workdir))
        questions = read_questions(config, setup, workdir)
        identities = model_identity(source), file_identity(data.file)
        about = distributed.main_first(lambda: claim(workdir, config, *identities))
    about |= {"selector": config_metadata(setup.selector)}
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
            if _stopped(interrupt):
                return
            with memory.advice(config):
                with user_input():
                    run = _prepare(config, workdir, batches, setup, mesh, questions)
                _loop(config, workdir, run, checkpoints, interrupt, about, window)
        finally:
            checkpoints.close()


def _stopped(interrupt: Interrupt) -> bool:
    """Whether to leave before the first update, when there is nothing to save."""
    stopped = distributed.any_process(interrupt.requested)
    if stopped:
        distributed.say("Stopped before the first update")
    return stopped


def _prepare(
    config: Any, workdir: Path, batches: Batches, setup: step.Setup, mesh: Mesh | None,
    questions: Split | None,
) -> _Run:  # fmt: skip
    """Loads the model, once the data are known to be good."""
    name, vision = model_folders(config)
    model = load_vlm(
        name, mesh, model_dtype(config), vision_folder=vision,
        progress=distributed.is_main(),
    )  # fmt: skip
    distributed.say(
        f"Widths {', '.join(str(bucket.ids) for bucket in batches.buckets)}; {config.steps} steps "
        f"of {config.batch_size} on {jax.device_count() if mesh else 1} "
        f"{jax.default_backend()} device(s)"
    )
    validation = None
    if questions is not None:
        validation = Validation(config, model, questions, workdir)
    return _Run(model, setup, mesh, batches, validation)


def _begin(run: _Run, config: Any, checkpoints: Checkpoints) -> tuple[int, Saved, Stream]:
    """What to start from, the latest checkpoint or a new state, and the batches from there on."""
    seed = jax.random.key(config.seed)
    init_key, key = (jax.random.fold_in(seed, use) for use in range(2))
    state = jax.jit(step.init_state, static_argnums=1)(init_key, run.setup)
    stats = FeatureStats.start(run.setup.model.vision.hidden_size)
    fresh = replicate_like(run.model.params, Saved(state, stats, jax.random.key_data(key)))
    if checkpoints.latest is not None:
        done, saved, about = checkpoints.restore(fresh)
        distributed.say(f"Resuming after step {done}")
        return done, saved, run.batches.stream(config.steps, about["batches"])
    fresh = fresh._replace(stats=_statistics(run, config, fresh.stats))
    return 0, fresh, run.batches.stream(config.steps)


def _statistics(run: _Run, config: Any, stats: FeatureStats) -> FeatureStats:
    """Feature statistics over the pictures of the first steps."""
    pictures, size = run.batches.first_pictures(config.data.stats_images), config.batch_size
    while part := list(itertools.islice(pictures, size)):
        real = np.arange(size) < len(part)
        part += part[:1] * (size - len(part))
        pixels, real = place_rows(run.mesh, (np.stack(part), real))
        stats = step.gather_stats(
            run.model.params, stats, pixels, real, setup=run.setup, mesh=run.mesh
        )
    return stats


def _loop(
    config: Any, workdir: Path, run: _Run, checkpoints: Checkpoints, interrupt: Interrupt,
    about: dict[str, Any], window: tuple[int, int] | None,
):  # fmt: skip
    """Updates until the end or an interruption."""
    if _stopped(interrupt):
        return
    done, (state, stats, key_data), stream = _begin(run, config, checkpoints)
    watch = Watch(config, workdir, done, run.validation, window)
    key = jax.random.wrap_key_data(key_data)
    guard = nonfinite.Guard(workdir / nonfinite.FILE, run.batches, config.max_skipped)

    def policy() -> Policy:
        return Policy(state.params, run.setup.selector, stats)

    try:
        for batch in stream:
            batch = place_rows(run.mesh, batch, config.batch_size)
            watch.before(done + 1)
            state, scalars = step.update(
                run.model.params, state, stats, batch, key, np.int32(done),
                setup=run.setup, mesh=run.mesh,
            )  # fmt: skip
            done += 1
            last = done == config.steps or distributed.any_process(interrupt.requested)
            last |= guard.add(done, scalars["skipped_in_row"], last)
            # Before the state is saved: a run goes on behind what it has written of itself.
            watch.after(done, scalars, policy)
            if done % config.checkpoint_every == 0 or last:
                checkpoints.save(
                    done, Saved(state, stats, key_data), about | {"batches": stream.state}
                )
            if last:
                break
    finally:
        stream.close()
        watch.close()
    if guard.problem:
        with user_input():
            raise ValueError(guard.problem)
    if done < config.steps:
        distributed.say(
            f"Stopped after step {done} of {config.steps}; the same command goes on from there"
        )
    elif distributed.is_main():
        path = save_policy(policy(), workdir / POLICY_FILE)
        print(f"Done: {path}", flush=True)
