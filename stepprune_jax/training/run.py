"""The training loop, from the settings of a run to the file of a trained selector."""

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from stepprune_jax.checkpoints.folder import Source
from stepprune_jax.checkpoints.identity import file_identity, model_identity
from stepprune_jax.checkpoints.load import VLM, load_vlm
from stepprune_jax.checkpoints.policy import (
    POLICY_FILE,
    config_metadata,
    load_policy,
    save_policy,
)
from stepprune_jax.data.llava import Question
from stepprune_jax.data.source import training_source
from stepprune_jax.evaluation.calibrate import calibrate_policy
from stepprune_jax.models.images import stack_images
from stepprune_jax.parallel import distributed
from stepprune_jax.parallel.placement import local_rows, place_rows, replicate_like
from stepprune_jax.policy import FeatureStats
from stepprune_jax.policy.host import THREEFRY, jax_defaults
from stepprune_jax.pruning import Policy
from stepprune_jax.training import step
from stepprune_jax.training.batches import Batches, Stream, open_batches
from stepprune_jax.training.failures import NONFINITE_FILE, Guard, memory_advice
from stepprune_jax.training.hooks import Hooks
from stepprune_jax.training.settings import Run, make_mesh, make_setup
from stepprune_jax.training.validation import (
    Validation,
    read_calibration_questions,
    read_questions,
)
from stepprune_jax.user_input import local_path, user_input
from stepprune_jax.workdir.checkpoints import RUN_FILE, Checkpoints, Interrupt, claim
from stepprune_jax.workdir.lock import locked
from stepprune_jax.workdir.metrics import METRICS, VALIDATION, check_boards

_LOG = logging.getLogger(__name__)


class Saved(NamedTuple):
    """The arrays of a training checkpoint, without the frozen weights.

    Attributes:
        state: weights, moments and counters.
        stats: statistics of the tower's features.
        key: data of the PRNG key from which those of all updates are derived.
    """

    state: step.State
    stats: FeatureStats
    key: UInt32[Array, "words"]


class _Loop(NamedTuple):
    """Inputs of the loop."""

    run: Run
    workdir: Path
    model: VLM
    setup: step.Setup
    batches: Batches
    validation: Validation | None
    questions: Sequence[Question]
    start: Policy | None
    checkpoints: Checkpoints
    interrupt: Interrupt


def train(run: Run, workdir: str | Path, window: tuple[int, int] | None = None) -> None:
    """Trains a selector on a frozen model, or resumes an interrupted run.

    Writes `metrics.jsonl` (one object per line), `run.json`, `checkpoints/` and at the end
    `policy.safetensors`; if requested, `validation.jsonl`, `overlays/` and `profile/`. A resumed
    run gives bitwise the same numbers as an uninterrupted one. On Ctrl-C, SIGTERM or SIGHUP it
    saves and returns. With several processes (`parallel.distributed`) all must call it, with a
    folder that all of them see.

    Args:
        run: settings of the run.
        workdir: folder of the run, for this run only.
        window: first and last update to profile, counted from 1.

    Raises:
        FileNotFoundError: model, data or an image is missing.
        ValueError: a bad configuration, bad data, the folder of another run, or one that another
            process writes to; too little memory; or too many updates in a row without a finite loss
            and gradient.
    """
    with user_input():
        workdir = local_path(workdir).resolve()
        logs = [workdir / name for name in (METRICS, VALIDATION) if (workdir / name).exists()]
        if logs and not (workdir / RUN_FILE).exists():  # such as the questions of a data folder
            raise ValueError(f"{logs[0]} is of no run and would be erased: give another --workdir")
        mesh = make_mesh(run)
        check_boards(run.tensorboard, run.wandb)
        source = run.model.inspect()
        setup = make_setup(run, source.config, mesh)
    with locked(workdir):
        _train(run, workdir, window, source, setup)


def _train(
    run: Run, workdir: Path, window: tuple[int, int] | None, source: Source, setup: step.Setup
) -> None:
    """Trains in a folder that no other process writes to."""
    with user_input():
        data = training_source(run.data, workdir)
        questions = read_questions(run, setup)
        unanswered = read_calibration_questions(run)
        identities = model_identity(source), file_identity(data.file)
        about = distributed.main_first(lambda: claim(workdir, run, *identities))
    about |= {"selector": config_metadata(setup.method.config)}
    with Interrupt() as interrupt:
        checkpoints = Checkpoints(workdir, run.keep_checkpoints)
        try:
            policy, begun = workdir / POLICY_FILE, (workdir / RUN_FILE).stat().st_mtime
            # One from before the run began is of an earlier run in this folder.
            own = policy.is_file() and policy.stat().st_mtime >= begun
            written = distributed.any_process(own)
            if written and checkpoints.latest == run.steps:
                distributed.say(f"{workdir} has finished its {run.steps} steps: see {POLICY_FILE}")
                return
            with user_input():
                start = _read_start(run, setup) if checkpoints.latest is None else None
                rows = local_rows(setup.forward.mesh, run.batch_size)
                batches = open_batches(run, data, identities[1], source, rows, distributed.say)
                distributed.require_same(batches.identity, "the samples that can be trained on")
            if _stopped(interrupt):
                return
            with memory_advice(run):
                with user_input():
                    model = _load_model(run, batches, setup)
                    validation = None
                    if questions is not None:
                        validation = Validation(run, model, questions, workdir)
                if _stopped(interrupt):
                    return
                parts = (run, workdir, model, setup, batches, validation, unanswered, start)
                _loop(_Loop(*parts, checkpoints, interrupt), about, window)
        finally:
            checkpoints.close()


def _read_start(run: Run, setup: step.Setup) -> Policy | None:
    """Reads the policy that a run begins with; None for new weights."""
    if not run.start:
        return None
    policy = load_policy(run.start)
    fits = policy.method == run.method and policy.pruner.specs() == setup.method.specs()
    expected = "a policy of the run's method, model and shape, with statistics of features"
    run.require("start", fits and policy.stats is not None, expected)
    # No shape of a weight shows the number of heads.
    own, heads = (getattr(x, "num_heads", None) for x in (setup.method.config, policy.config))
    expected = f"a policy of {own} heads (config.{setup.method.settings}.num_heads), not {heads}"
    run.require("start", heads == own, expected)
    return policy


def _stopped(interrupt: Interrupt) -> bool:
    """Returns whether to stop before the first update, when there is nothing to save."""
    stopped = distributed.any_process(interrupt.requested)
    if stopped:
        distributed.say("Stopped before the first update")
    return stopped


def _load_model(run: Run, batches: Batches, setup: step.Setup) -> VLM:
    """Loads the frozen model, after the data have been checked."""
    folder, vision_folder = run.model.folders
    mesh, dtype, progress = setup.forward.mesh, jnp.dtype(run.model.dtype), distributed.is_main()
    model = load_vlm(
        folder,
        mesh,
        dtype,
        vision_folder=vision_folder,
        layers="stacked",
        progress=progress,
        **run.model.image_bounds,
    )
    distributed.say(
        f"{run.steps} steps of {run.batch_size} samples on {jax.device_count() if mesh else 1} "
        f"{jax.default_backend()} device(s); prompts are padded to "
        f"{', '.join(str(bucket.ids) for bucket in batches.buckets)} ids"
    )
    return model


def _begin(loop: _Loop, about: dict[str, Any]) -> tuple[int, Saved, Stream]:
    """Returns updates done, the latest checkpoint or a new state, and the remaining batches."""
    run, model, setup = loop.run, loop.model, loop.setup
    seed = jax.random.key(run.seed, impl=THREEFRY)
    init_key, key = (jax.random.fold_in(seed, use) for use in range(2))
    with jax_defaults():
        state = jax.jit(step.init_state, static_argnums=1)(init_key, setup)
    stats = FeatureStats.start(setup.model.feature_width)
    fresh = replicate_like(model.params, Saved(state, stats, jax.random.key_data(key)))
    if loop.checkpoints.latest is not None:
        restored = loop.checkpoints.restore(fresh)
        distributed.say(f"Resuming after step {restored.step}")
        stream = loop.batches.stream(run.steps, restored.about["batches"])
        return restored.step, restored.saved, stream
    if loop.start is None:
        fresh = fresh._replace(stats=_statistics(loop, fresh.stats))
    else:
        begun = loop.start.params, loop.start.stats
        params, stats = replicate_like(model.params, begun)
        fresh = fresh._replace(state=fresh.state._replace(params=params), stats=stats)
    return 0, fresh, loop.batches.stream(run.steps)


def _statistics(loop: _Loop, stats: FeatureStats) -> FeatureStats:
    """Computes feature statistics over the images of the first steps."""
    setup, size = loop.setup, loop.run.batch_size
    images = loop.batches.first_images(loop.run.data.stats_images)
    while part := list(itertools.islice(images, size)):
        real = np.arange(size) < len(part)
        pixels = stack_images([*part, *part[:1] * (size - len(part))])
        family = setup.model.family
        tokens = family.num_tokens(setup.model, family.grids(setup.model, pixels))
        pixels, tokens = place_rows(setup.forward.mesh, (pixels, np.where(real, tokens, 0)))
        stats = step.gather_stats(loop.model.params, stats, pixels, tokens, setup=setup)
    return stats


def _loop(loop: _Loop, about: dict[str, Any], window: tuple[int, int] | None):
    """Updates until the end or an interruption."""
    run, workdir, setup = loop.run, loop.workdir, loop.setup
    done, (state, stats, key_data), stream = _begin(loop, about)
    hooks = Hooks(run, workdir, done, loop.validation, window)
    key = jax.random.wrap_key_data(key_data, impl=THREEFRY)
    guard = Guard(workdir / NONFINITE_FILE, loop.batches, run.max_skipped)
    if done == run.steps:  # the run may have stopped at its end
        guard.add(done, state.skipped_in_row, last=True)

    def policy() -> Policy:
        return Policy(state.params, setup.method.config, stats)

    try:
        for batch in stream:
            batch = place_rows(setup.forward.mesh, batch, run.batch_size)
            hooks.before(done + 1)
            state, scalars = step.update(
                loop.model.params, state, stats, batch, key, np.int32(done), setup=setup
            )
            done += 1
            last = done == run.steps
            last |= guard.add(done, scalars["skipped_in_row"], last)
            unwritten = None
            try:  # before the state is saved: a resumed run continues after what it has logged
                hooks.after(done, scalars, policy)
            except OSError as error:  # as Ctrl-C has ended the log's reader, too: save first
                unwritten = error
            last |= distributed.any_process(loop.interrupt.requested)
            if done % run.checkpoint_every == 0 or last:
                extra = about | {"batches": stream.state}
                loop.checkpoints.save(done, Saved(state, stats, key_data), extra)
            if unwritten is not None:
                raise unwritten
            if last:
                break
    finally:
        stream.close()
        hooks.close()
    if guard.problem:
        with user_input():
            raise ValueError(guard.problem)
    if done < run.steps:
        distributed.say(f"Stopped after step {done} of {run.steps}; run the same command to resume")
    else:
        trained = _calibrated(loop, policy())
        if distributed.is_main():
            path = save_policy(trained, workdir / POLICY_FILE, {"model": about["model"]})
            _LOG.info("Done: %s", path)


def _calibrated(loop: _Loop, policy: Policy) -> Policy:
    """Calibrates a policy, if it has a stop and there are questions for it."""
    if not policy.has_stop or not loop.questions:
        return policy
    with user_input():
        return calibrate_policy(
            loop.model,
            policy,
            loop.questions,
            loop.run.model.execution,
            loop.run.batch_size,
        )
