"""The training loop, from the settings of a run to the file of a trained selector."""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from stepprune_jax.checkpoints.folder import ModelFolder
from stepprune_jax.checkpoints.identity import file_identity, model_identity
from stepprune_jax.checkpoints.load import VLM, load_vlm
from stepprune_jax.checkpoints.policy import (
    POLICY_FILE,
    load_policy,
    save_policy,
)
from stepprune_jax.data.json_files import JsonObject, write_json
from stepprune_jax.data.llava import Question
from stepprune_jax.data.source import Source, training_source
from stepprune_jax.evaluation.calibrate import calibrate_policy
from stepprune_jax.extras import need
from stepprune_jax.parallel import distributed
from stepprune_jax.parallel.placement import local_rows, row_count
from stepprune_jax.policy import FeatureStats
from stepprune_jax.selectors import Policy
from stepprune_jax.selectors.base import Weights
from stepprune_jax.selectors.calibration import StopCounts
from stepprune_jax.training.batches import Batches, open_batches
from stepprune_jax.training.failures import NONFINITE_FILE, Guard, memory_advice
from stepprune_jax.training.hooks import Hooks
from stepprune_jax.training.model_answers import (
    ANSWERS_FILE,
    ModelAnswers,
    generate_answers,
)
from stepprune_jax.training.objectives import GATE, RLOO, WARM_START
from stepprune_jax.training.recipes import AUTO, Auto, Phase, first_objective
from stepprune_jax.training.settings import Run, read_former_recipe
from stepprune_jax.training.step_config import StepConfig, make_mesh, make_step_configs
from stepprune_jax.training.trainer import Trainer
from stepprune_jax.training.validation import (
    Validation,
    read_calibration_questions,
    read_model_questions,
    read_questions,
)
from stepprune_jax.user_input import UserError, local_path
from stepprune_jax.workdir.checkpoints import RUN_FILE, Checkpoints, Interrupt, claim
from stepprune_jax.workdir.lock import locked
from stepprune_jax.workdir.metrics import METRICS, VALIDATION, check_boards

_LOG = logging.getLogger(__name__)

# Field of run.json with the name of the first objective, for a run of the recipe "auto".
_BEGIN = "begin"


def train(run: Run, workdir: str | Path, window: tuple[int, int] | None = None) -> int:
    """Trains a selector on a frozen model, or resumes an interrupted run.

    Writes `metrics.jsonl` (one object per line), `run.json`, `checkpoints/` and at the end
    `policy.safetensors`; if requested, `validation.jsonl`, `overlays/` and `profile/`. A resumed
    run gives bitwise the same numbers as an uninterrupted run. On Ctrl-C, SIGTERM or SIGHUP the run
    saves its state and returns. The run claims its folder after all checks except the checks of
    images and weights. With several processes (`parallel.distributed`), all processes must call
    `train` with a folder that all can read.

    Args:
        run: settings of the run.
        workdir: folder of the run, for this run only.
        window: first and last update to profile, counted from 1.

    Returns:
        0 if the run is finished; otherwise the number of the signal that stopped any process.

    Raises:
        FileNotFoundError: model, data or an image is missing.
        ValueError: the configuration or the data are invalid; the folder belongs to another run or
            another process uses it; the memory does not suffice; or too many consecutive updates
            had a loss or gradient that was not finite.
    """
    workdir = _check_outputs(run, workdir)
    source, phases = run.model.inspect(), run.make_recipe().phases(run.steps)
    configs = make_step_configs(run, source.backbone, make_mesh(run), phases)
    with ExitStack() as stack:
        stack.enter_context(locked(workdir))
        data = training_source(run.data, workdir)
        questions = read_questions(run, configs[0])
        calibration_questions = read_calibration_questions(run)
        model_hash, data_hash = model_identity(source), file_identity(data.file)
        description = distributed.main_first(lambda: claim(workdir, run, model_hash, data_hash))
        interrupt = stack.enter_context(Interrupt())
        checkpoints = stack.enter_context(closing(Checkpoints(workdir, run.keep_checkpoints)))
        if _is_finished(run, workdir, checkpoints):
            return 0
        is_new = checkpoints.latest is None
        if run.recipe == AUTO and not is_new:
            configs = _configs_from(_read_begin(workdir, description), run, configs)
        start_weights = _read_start(run, configs[0]) if is_new else None
        open_rows = partial(_open_batches, run, configs[0], source=source)
        # Rows are checked before weights are loaded, even if the model's answers are still missing.
        batches = open_rows(data=data, data_hash=data_hash)
        if signal_number := _stopped_before_start(interrupt):
            return signal_number
        stack.enter_context(memory_advice(run))
        model = _load_model(run, configs[0])
        if data.answers is not None:
            answers = _generate_answers(
                run,
                model,
                batches,
                file=workdir / ANSWERS_FILE,
                origin={"model": model_hash, "data": data_hash},
                interrupt=interrupt,
            )
            if answers is None:
                return _stopped_before_start(interrupt)
            data = data._replace(answers=answers)
            batches = open_rows(data=data, data_hash=data_hash)
        _announce(run, batches, configs[0])
        validation = Validation(run, model, questions, workdir) if questions else None
        if signal_number := _stopped_before_start(interrupt):
            return signal_number
        if is_new:
            _announce_model(run, model, validation, workdir)
        trainer = Trainer(run, model, configs, batches)
        if is_new:
            trainer.init(start_weights)
        else:
            trainer.restore(checkpoints)
        stack.callback(trainer.stream.close)
        if is_new and run.recipe == AUTO:
            decision = _decide(run, configs, trainer, interrupt)
            if decision is None:
                return _stopped_before_start(interrupt)
            description = _write_run_file(workdir, description | decision)
        hooks = stack.enter_context(closing(Hooks(run, workdir, trainer.done, validation, window)))
        guard = Guard(workdir / NONFINITE_FILE, batches, run.max_skipped)
        loop = _Loop(
            trainer, hooks, guard, interrupt, partial(trainer.save, checkpoints, description)
        )
        if signal_number := loop.update_to_end():
            return signal_number
        policy = _calibrate(run, model, trainer.policy(), calibration_questions, loop.metrics)
        _save(policy, workdir / POLICY_FILE, model_hash)
    return 0


def _check_outputs(run: Run, workdir: str | Path) -> Path:
    """Checks that a run can write its outputs, and returns the absolute path of its folder.

    Raises:
        MissingPackageError: the validation draws overlays, and matplotlib is not installed.
        UserError: TensorBoard or Weights & Biases is not installed although requested; or the
            folder has a file with the name of a log but no `run.json`, as a data folder may have.
    """
    check_boards(run.tensorboard, run.wandb)
    if run.validation.every and run.validation.overlays:
        need("matplotlib", "config.validation.overlays, which draws, is not 0")
    workdir = local_path(workdir).resolve()
    log_files = [workdir / name for name in (METRICS, VALIDATION) if (workdir / name).exists()]
    if log_files and not (workdir / RUN_FILE).exists():
        raise UserError(f"{log_files[0]} is of no run and would be erased: give another --workdir")
    return workdir


def _is_finished(run: Run, workdir: Path, checkpoints: Checkpoints) -> bool:
    """Returns whether the run has written its policy, and prints a message if so.

    Args:
        run: settings of the run.
        workdir: folder of the run, with `run.json`.
        checkpoints: checkpoints of the run.
    """
    policy_file, start_time = workdir / POLICY_FILE, (workdir / RUN_FILE).stat().st_mtime
    # A policy of an earlier run in the same folder is older than run.json.
    has_policy = policy_file.is_file() and policy_file.stat().st_mtime >= start_time
    is_finished = distributed.any_process(has_policy) and checkpoints.latest == run.steps
    if is_finished:
        distributed.say(f"{workdir} has finished its {run.steps} steps: see {POLICY_FILE}")
    return is_finished


def _configs_from(begin: str, run: Run, configs: Sequence[StepConfig]) -> Sequence[StepConfig]:
    """Returns the static part of the updates of each phase, given the first objective of "auto".

    Args:
        begin: name of the first objective, "gate", "rloo" or "warm_start".
        run: settings of a run of the recipe "auto".
        configs: static part of the updates of each phase of a run that begins with the warm start.
    """
    recipe = run.make_recipe()
    if not isinstance(recipe, Auto):  # the method cannot sample subsets
        return configs
    phases, config = recipe.choose(begin).phases(run.steps), configs[0]
    return make_step_configs(run, config.backbone, config.forward.mesh, phases)


def _read_begin(workdir: Path, description: JsonObject) -> str:
    """Reads the first objective of an interrupted run of "auto" from its description.

    Args:
        workdir: folder of the run, for error messages.
        description: content of run.json.

    Returns:
        "gate", "rloo" or "warm_start".

    Raises:
        UserError: run.json has no such name.
    """
    begin = read_former_recipe(description.get(_BEGIN))
    names = (GATE, RLOO, WARM_START)
    if begin not in names:
        file = workdir / RUN_FILE
        raise UserError(f"{file}: {_BEGIN!r} is {begin!r}, expected one of {', '.join(names)}")
    return begin


def _read_start(run: Run, config: StepConfig) -> tuple[Weights, FeatureStats] | None:
    """Reads the weights of the policy that `run.start` names.

    Args:
        run: settings of the run.
        config: static part of the updates, with the selector to train.

    Returns:
        The weights, and the statistics of features; None if the run starts from random weights.

    Raises:
        UserError: the policy has another method, shape or number of heads than the run.
    """
    if not run.start:
        return None
    policy, selector = load_policy(run.start), config.selector
    has_same_shape = policy.name == run.method and policy.specs() == selector.specs()
    if not has_same_shape or policy.stats is None:
        expected = "a policy of the run's method, model and shape, with statistics of features"
        raise UserError(f"config.start is {run.start!r}, expected {expected}")
    # The shapes of the weights do not depend on the number of heads.
    num_heads = getattr(selector.config, "num_heads", None)
    num_policy_heads = getattr(policy.config, "num_heads", None)
    field = f"config.{run.selector_group}.num_heads"
    expected = f"a policy of {num_heads} heads ({field}), not {num_policy_heads}"
    run.expect("start", num_policy_heads == num_heads, expected)
    return policy.params, policy.stats


def _open_batches(
    run: Run, config: StepConfig, *, source: ModelFolder, data: Source, data_hash: str
) -> Batches:
    """Opens the batches of a run, and checks that all processes read the same samples.

    Args:
        run: settings of the run.
        config: static part of the updates.
        source: folder of the frozen model.
        data: paths of the training file and its images, and answers of the model.
        data_hash: hash of the training file.
    """
    process_rows = local_rows(config.forward.mesh, run.batch_size)
    has_placeholders = data.answers == {}
    batches = open_batches(
        run,
        source=data,
        identity=data_hash,
        model=source,
        local=process_rows,
        num_devices=row_count(config.forward.mesh),
        # The lengths of placeholders are of no interest.
        say=(lambda line: None) if has_placeholders else distributed.say,
    )
    distributed.require_same(batches.identity, "the samples that can be trained on")
    return batches


def _stopped_before_start(interrupt: Interrupt) -> int:
    """Returns the number of a signal that arrived before the first update; 0 for no signal.

    All processes return the same number.
    """
    signal_number = distributed.greatest(interrupt.number)
    if signal_number:
        distributed.say("Stopped before the first update")
    return signal_number


def _load_model(run: Run, config: StepConfig) -> VLM:
    """Loads the frozen model onto the mesh of `config`."""
    folder, vision_folder = run.model.folders
    return load_vlm(
        folder,
        config.forward.mesh,
        jnp.dtype(run.model.dtype),
        vision_folder=vision_folder,
        use="training",
        weights=run.model.weights,
        progress=distributed.is_main(),
        **run.model.image_bounds,
    )


def _generate_answers(
    run: Run,
    model: VLM,
    batches: Batches,
    *,
    file: Path,
    origin: JsonObject,
    interrupt: Interrupt,
) -> ModelAnswers | None:
    """Generates the answers that a run with `data.answers` = "model" trains on.

    Args:
        run: settings of the run.
        model: the frozen model.
        batches: the batches of the run, with placeholders for answers.
        file: file that stores the answers.
        origin: hashes of the model and of the training file.
        interrupt: signals that stop the run.

    Returns:
        The answers; None if a signal arrived.
    """
    return generate_answers(
        run,
        model,
        batches.corpus,
        file=file,
        origin=origin | {"answer_tokens": run.data.answer_tokens},
        should_stop=lambda: distributed.any_process(interrupt.requested),
    )


def _announce(run: Run, batches: Batches, config: StepConfig) -> None:
    """Prints the size of a run and the widths of its batches."""
    num_devices = jax.device_count() if config.forward.mesh else 1
    distributed.say(
        f"{run.steps} steps of {run.batch_size} samples on {num_devices} "
        f"{jax.default_backend()} device(s); prompts are padded to "
        f"{', '.join(str(bucket.ids) for bucket in batches.buckets)} ids"
    )


def _announce_model(run: Run, model: VLM, validation: Validation | None, workdir: Path) -> None:
    """Prints how well the frozen model answers validation questions, before the first update.

    Args:
        run: settings of the run.
        model: the frozen model.
        validation: the validation of the run. None reads questions of the validation split, if
            there is one.
        workdir: folder of the run.
    """
    if validation is None:
        questions = read_model_questions(run)
        if questions is None:
            return
        try:
            validation = Validation(run, model, questions, workdir)
        except UserError as error:  # A conversation may be too long, which training truncates.
            distributed.say(f"the frozen model is not tested: {error}")
            return
    for line in validation.test_model():
        distributed.say(line)


def _decide(
    run: Run, configs: Sequence[StepConfig], trainer: Trainer, interrupt: Interrupt
) -> JsonObject | None:
    """Chooses the phases of a run of the recipe "auto", and prints the reason.

    Args:
        run: settings of the run.
        configs: static part of the updates of each phase of a run that begins with the warm start.
        trainer: the trainer before the first update; its phases are replaced by the chosen phases.
        interrupt: signals that stop the run.

    Returns:
        Fields of run.json: the first objective, and the measured gains before and after the trial
        of the warm start. None if a signal arrived.
    """
    if not trainer.policy().samples_subsets:
        distributed.say(f"Recipe: the gate, because {run.method} cannot sample subsets of tokens")
        return {_BEGIN: GATE}

    def should_stop() -> bool:
        return distributed.any_process(interrupt.requested)

    gain = trainer.measure_subset_gain(configs[-1], should_stop)
    if gain is None:
        return None
    trial = gain
    if len(configs) > 1:  # a share of 0 leaves the warm start out
        trial = trainer.try_warm_start(configs[0], configs[-1], should_stop)
        if trial is None:
            return None
    begin, reason = first_objective(gain, trial), "a trial of the warm start does not help"
    if begin == WARM_START:
        reason = f"a trial of the warm start improves them: {trial.rewards}"
    configs = _configs_from(begin, run, configs)
    trainer.use_phases(configs)
    phases = [config.phase for config in configs]
    distributed.say(f"Recipe: {_describe_phases(phases)}, because {gain.summary}; {reason}")
    return {_BEGIN: begin, "signal": gain._asdict(), "trial": trial._asdict()}


def _describe_phases(phases: Sequence[Phase]) -> str:
    """Describes phases, as in "the gate for 250 updates, then RLOO on sampled subsets"."""
    *earlier_phases, last_phase = phases
    earlier_text = "".join(
        f"{phase.objective.title} for {phase.num_steps} updates, then " for phase in earlier_phases
    )
    return earlier_text + last_phase.objective.title


def _write_run_file(workdir: Path, description: JsonObject) -> JsonObject:
    """Writes a description of the run to run.json, and returns the description.

    Must be called before the first checkpoint. Afterwards, run.json must not change.
    """
    if distributed.is_main():
        write_json(workdir / RUN_FILE, description)
    return description


@dataclasses.dataclass
class _Loop:
    """The loop over the updates of a run.

    Attributes:
        trainer: the state that the updates change.
        hooks: metrics, validation and profile.
        guard: the check for non-finite updates.
        interrupt: signals that stop the run.
        save: saves the state, with a description of the run.
        metrics: metrics of the last update; empty before any update.
    """

    trainer: Trainer
    hooks: Hooks
    guard: Guard
    interrupt: Interrupt
    save: Callable[[], None]
    metrics: dict[str, jax.Array] = dataclasses.field(default_factory=dict)

    def update_to_end(self) -> int:
        """Performs the remaining updates and saves the state.

        Returns:
            0 if all updates are done; otherwise the number of the signal that stopped the run.

        Raises:
            UserError: too many consecutive updates were not finite. The state has been saved.
        """
        trainer, run, signal_number = self.trainer, self.trainer.run, 0
        if trainer.done == run.steps:
            # An earlier process may have ended before it checked the last update.
            self.guard.add(trainer.done, trainer.state.skipped_in_row, is_last=True)
        for batch in distributed.each_together(trainer.stream):
            self.hooks.before(trainer.done + 1)
            self.metrics = trainer.update(batch)
            is_finished = trainer.done == run.steps
            skipped_in_row = self.metrics["skipped_in_row"]
            has_problem = self.guard.add(trainer.done, skipped_in_row, is_last=is_finished)
            write_error = self._log()
            signal_number = distributed.greatest(self.interrupt.number)
            must_end = is_finished or has_problem or signal_number > 0
            if trainer.done % run.checkpoint_every == 0 or must_end:
                self.save()
            if write_error is not None:
                raise write_error
            if must_end:
                break
        if self.guard.problem:
            raise UserError(self.guard.problem)
        if trainer.done == run.steps:
            return 0
        distributed.say(
            f"Stopped after step {trainer.done} of {run.steps}; run the same command to resume"
        )
        return signal_number

    def _log(self) -> OSError | None:
        """Logs the last update.

        The log is written before the state is saved, so that a resumed run continues the log.

        Returns:
            An error that ended the writing; None without an error. The caller saves the state
            before it raises the error, because Ctrl-C may also have ended the process that reads
            the log.
        """
        trainer = self.trainer
        try:
            self.hooks.after(
                trainer.done, self.metrics, trainer.policy, trainer.phase.objective.name
            )
        except OSError as error:
            return error
        return None


def _calibrate(
    run: Run,
    model: VLM,
    policy: Policy,
    questions: Sequence[Question],
    metrics: Mapping[str, jax.Array],
) -> Policy:
    """Calibrates the learned stop of a trained policy for mean budgets.

    Args:
        run: settings of the run.
        model: the frozen model.
        policy: the trained policy.
        questions: the calibration questions. Without questions, the policy is not calibrated.
        metrics: metrics of the last update, which tell whether the stop was at a bound.

    Returns:
        The calibrated policy; the same policy without a learned stop or without questions.
    """
    if not policy.has_stop:
        return policy
    if questions:
        return calibrate_policy(model, policy, questions, run.model.execution, run.batch_size)
    _warn_of_bound(metrics)
    return policy


def _warn_of_bound(metrics: Mapping[str, jax.Array]) -> None:
    """Warns if the learned stop kept almost always the fewest or the most tokens.

    Args:
        metrics: metrics of the last update, with the mean and the deviation of the number of kept
            tokens, and the fractions of rows at the lower and at the upper bound.
    """
    names = ("k_mean", "k_std", "k_floor", "k_cap")
    if distributed.is_main() and {*names} <= metrics.keys():
        mean, deviation, floor_share, cap_share = (float(metrics[name]) for name in names)
        stop_counts = StopCounts(mean, deviation, math.nan, floor_share, cap_share)
        if stop_counts.finding:
            _LOG.warning("last update: %s", stop_counts.finding)


def _save(policy: Policy, path: Path, model_hash: str) -> None:
    """Writes the file of a trained policy; only the main process writes."""
    if distributed.is_main():
        _LOG.info("Done: %s", save_policy(policy, path, {"model": model_hash}))
