"""The training loop, from the settings of a run to the file of a trained selector."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import jax
import jax.numpy as jnp

from stepprune_jax.checkpoints.identity import file_identity, model_identity
from stepprune_jax.checkpoints.load import VLM, load_vlm
from stepprune_jax.checkpoints.policy import (
    POLICY_FILE,
    load_policy,
    save_policy,
)
from stepprune_jax.data.json_files import JsonObject, write_json
from stepprune_jax.data.source import training_source
from stepprune_jax.evaluation.calibrate import calibrate_policy
from stepprune_jax.parallel import distributed
from stepprune_jax.parallel.placement import local_rows
from stepprune_jax.selectors import Policy
from stepprune_jax.selectors.calibration import StopCounts
from stepprune_jax.training.batches import Batches, open_batches
from stepprune_jax.training.failures import NONFINITE_FILE, Guard, memory_advice
from stepprune_jax.training.hooks import Hooks
from stepprune_jax.training.questions import read_calibration_questions, read_questions
from stepprune_jax.training.settings import (
    AUTO,
    GATE,
    SETS,
    Phase,
    Run,
    make_mesh,
    make_step_config,
    split,
)
from stepprune_jax.training.step import StepConfig
from stepprune_jax.training.trainer import Trainer
from stepprune_jax.training.validation import Validation
from stepprune_jax.user_input import UserError, local_path, require
from stepprune_jax.workdir.checkpoints import RUN_FILE, Checkpoints, Interrupt, claim
from stepprune_jax.workdir.lock import locked
from stepprune_jax.workdir.metrics import METRICS, VALIDATION, check_boards

_LOG = logging.getLogger(__name__)

_STOPPED = "Stopped before the first update"
# What run.json says of the recipe "auto": with which phase the run began.
_BEGIN = "begin"


def train(run: Run, workdir: str | Path, window: tuple[int, int] | None = None) -> int:
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

    Returns:
        0 if the run is finished; else the number of the signal that stopped it in any process.

    Raises:
        FileNotFoundError: model, data or an image is missing.
        ValueError: a bad configuration, bad data, the folder of another run, or one that another
            process writes to; too little memory; or too many updates in a row without a finite loss
            and gradient.
    """
    workdir = local_path(workdir).resolve()
    logs = [workdir / name for name in (METRICS, VALIDATION) if (workdir / name).exists()]
    if logs and not (workdir / RUN_FILE).exists():  # such as the questions of a data folder
        raise UserError(f"{logs[0]} is of no run and would be erased: give another --workdir")
    mesh = make_mesh(run)
    check_boards(run.tensorboard, run.wandb)
    source = run.model.inspect()
    phases = split(run)
    setup, *_ = (make_step_config(phase.run, source.backbone, mesh) for phase in phases)
    with ExitStack() as stack:
        # Claim the folder, when everything but images and weights has been checked.
        stack.enter_context(locked(workdir))
        data = training_source(run.data, workdir)
        questions = read_questions(run, setup)
        unanswered = read_calibration_questions(run)
        model_hash, data_hash = model_identity(source), file_identity(data.file)
        about = distributed.main_first(lambda: claim(workdir, run, model_hash, data_hash))
        interrupt = stack.enter_context(Interrupt())
        checkpoints = stack.enter_context(closing(Checkpoints(workdir, run.keep_checkpoints)))
        if _has_policy(workdir) and checkpoints.latest == run.steps:
            distributed.say(f"{workdir} has finished its {run.steps} steps: see {POLICY_FILE}")
            return 0
        if checkpoints.latest is not None and run.recipe == AUTO:
            # A run from before there were recipes decided nothing, and goes on as what it was.
            begin = about.get(_BEGIN)
            known = f"{workdir / RUN_FILE}: {_BEGIN!r} is {begin!r}, expected {GATE} or {SETS}"
            require(begin in (None, GATE, SETS), known)
            run = run if begin else run.replace({"recipe": None})
            phases = split(run, begin or GATE)

        # Build what the loop needs.
        start = _read_start(run, setup) if checkpoints.latest is None else None
        rows = local_rows(mesh, run.batch_size)
        batches = open_batches(run, data, data_hash, source, rows, distributed.say)
        distributed.require_same(batches.identity, "the samples that can be trained on")
        if received := _received(interrupt):
            return received
        stack.enter_context(memory_advice(run))
        model, validation = _load_model(run, batches, setup), None
        if questions is not None:
            validation = Validation(run, model, questions, workdir)
        if received := _received(interrupt):
            return received
        trainer = Trainer(run, model, phases, batches)
        if checkpoints.latest is None:
            trainer.init(start)
        else:
            trainer.restore(checkpoints)
        stack.callback(trainer.stream.close)
        if checkpoints.latest is None and run.recipe == AUTO:
            decided = _decide(run, trainer, lambda: distributed.any_process(interrupt.requested))
            if decided is None:
                return _received(interrupt)
            about |= decided
            if distributed.is_main():  # before any checkpoint, with which the folder is the run's
                write_json(workdir / RUN_FILE, about)
        guard = Guard(workdir / NONFINITE_FILE, batches, run.max_skipped)
        if trainer.done == run.steps:  # the run may have stopped at its end
            guard.add(trainer.done, trainer.state.skipped_in_row, last=True)
        hooks = stack.enter_context(closing(Hooks(run, workdir, trainer.done, validation, window)))

        # Update until the end, an interruption, or too many updates that are not finite.
        received, scalars = 0, {}
        for batch in distributed.each_together(trainer.stream):
            hooks.before(trainer.done + 1)
            scalars = trainer.update(batch)
            last = trainer.done == run.steps
            last |= guard.add(trainer.done, scalars["skipped_in_row"], last)
            unwritten = None
            try:  # before the state is saved: a resumed run continues after what it has logged
                hooks.after(trainer.done, scalars, trainer.policy, trainer.phase.name)
            except OSError as error:  # as Ctrl-C has ended the log's reader, too: save first
                unwritten = error
            received = distributed.greatest(interrupt.number)
            last |= received > 0
            if trainer.done % run.checkpoint_every == 0 or last:
                trainer.save(checkpoints, about)
            if unwritten is not None:
                raise unwritten
            if last:
                break

        if guard.problem:
            raise UserError(guard.problem)
        if trainer.done < run.steps:
            where = f"step {trainer.done} of {run.steps}"
            distributed.say(f"Stopped after {where}; run the same command to resume")
            return received
        policy = trainer.policy()
        if policy.has_stop and unanswered:
            policy = calibrate_policy(
                model, policy, unanswered, run.model.execution, run.batch_size
            )
        elif policy.has_stop:
            _warn_of_bound(scalars)
        if distributed.is_main():
            path = save_policy(policy, workdir / POLICY_FILE, {"model": model_hash})
            _LOG.info("Done: %s", path)
    return 0


def _warn_of_bound(scalars: Mapping[str, jax.Array]) -> None:
    """Warns where the learned stop sat at a bound in the last update, without validation data."""
    names = ("k_mean", "k_std", "k_floor", "k_cap")
    if distributed.is_main() and {*names} <= scalars.keys():
        mean, deviation, floor, cap = (float(scalars[name]) for name in names)
        stops = StopCounts(mean, deviation, math.nan, floor, cap)
        if stops.finding:
            _LOG.warning("last update: %s", stops.finding)


def _decide(run: Run, trainer: Trainer, stop: Callable[[], bool]) -> JsonObject | None:
    """Chooses the phases of a run of the recipe "auto", and says why; None if asked to stop.

    Returns:
        What is to be remembered: the first phase, and what sets gain, unless none can be drawn.
    """
    if not trainer.policy().samples_subsets:
        distributed.say(f"Recipe: the gate, because {run.method} draws no sets of tokens")
        return {_BEGIN: GATE}
    signal = trainer.measure_subset_gain(split(run, SETS)[0], stop)
    if signal is None:
        return None
    begin = SETS if signal.suffices else GATE
    phases = split(run, begin)
    trainer.follow(phases)
    distributed.say(f"Recipe: {_in_words(phases)}, because {signal}")
    return {_BEGIN: begin, "signal": signal._asdict()}


def _in_words(phases: Sequence[Phase]) -> str:
    """Describes phases: "the gate for 250 updates, then sampled sets"."""
    *before, last = phases
    return "".join(f"{phase} for {phase.run.steps} updates, then " for phase in before) + str(last)


def _has_policy(workdir: Path) -> bool:
    """Returns whether the folder has this run's policy; an earlier run's is older than run.json."""
    policy, begun = workdir / POLICY_FILE, (workdir / RUN_FILE).stat().st_mtime
    return distributed.any_process(policy.is_file() and policy.stat().st_mtime >= begun)


def _read_start(run: Run, setup: StepConfig) -> Policy | None:
    """Reads the policy that a run begins with; None for new weights."""
    if not run.start:
        return None
    policy = load_policy(run.start)
    fits = policy.name == run.method and policy.specs() == setup.method.specs()
    expected = "a policy of the run's method, model and shape, with statistics of features"
    run.expect("start", fits and policy.stats is not None, expected)
    # No shape of a weight shows the number of heads.
    own, heads = (getattr(x, "num_heads", None) for x in (setup.method.config, policy.config))
    expected = f"a policy of {own} heads (config.{setup.method.settings}.num_heads), not {heads}"
    run.expect("start", heads == own, expected)
    return policy


def _received(interrupt: Interrupt) -> int:
    """Returns the signal that stops the run before its first update; 0 without one.

    There is nothing to save yet.
    """
    received = distributed.greatest(interrupt.number)
    if received:
        distributed.say(_STOPPED)
    return received


def _load_model(run: Run, batches: Batches, setup: StepConfig) -> VLM:
    """Loads the frozen model, after the data have been checked."""
    folder, vision_folder = run.model.folders
    mesh = setup.forward.mesh
    model = load_vlm(
        folder,
        mesh,
        jnp.dtype(run.model.dtype),
        vision_folder=vision_folder,
        use="training",
        weights=run.model.weights,
        progress=distributed.is_main(),
        **run.model.image_bounds,
    )
    distributed.say(
        f"{run.steps} steps of {run.batch_size} samples on {jax.device_count() if mesh else 1} "
        f"{jax.default_backend()} device(s); prompts are padded to "
        f"{', '.join(str(bucket.ids) for bucket in batches.buckets)} ids"
    )
    return model
