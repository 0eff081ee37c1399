"""First stage of an evaluation: answers the questions of benchmarks and writes answer files.

A row of the results table is a pruning method at one budget, and has one answer file per benchmark.
Questions are processed in chunks. A chunk passes through the vision tower once, and each ranking
method orders its tokens once. All rows are answered from these results. The answers of a row are
written before the next row begins. An interrupted run resumes with the unanswered questions.
"""

import dataclasses
import functools
import itertools
import logging
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from stepprune_jax.benchmarks import BENCHMARKS, Benchmark, BenchmarkQuestion
from stepprune_jax.benchmarks.answer_files import (
    ANSWERS,
    BOUND,
    AnswerFile,
    AnswerLine,
    answer_object,
    append,
    check_claim,
    claim,
    digest,
    find_unanswered,
)
from stepprune_jax.checkpoints.load import VLM, load_vlm
from stepprune_jax.data.unknown_words import describe_unknown_words
from stepprune_jax.evaluation.calibrate import (
    FILE,
    Biases,
    CalibrationSet,
    StopBiases,
    sample_evenly,
)
from stepprune_jax.evaluation.operations import first_token_flops
from stepprune_jax.evaluation.rows import Conditions, TableRow
from stepprune_jax.evaluation.settings import (
    EvaluationRun,
    check_policies,
    read_policies,
)
from stepprune_jax.evaluation.split import spread_over
from stepprune_jax.inference.base import RunOptions
from stepprune_jax.inference.dataset import Answers, Batching, milliseconds
from stepprune_jax.inference.decoding import NotFiniteError, listed
from stepprune_jax.inference.encode import WIDTHS, EncodedQuestions, chunk_size, encode_questions
from stepprune_jax.inference.generate import Generator, kept_per_patch
from stepprune_jax.parallel import distributed
from stepprune_jax.parallel.placement import mesh_of, row_count
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.pruning import AllTokens
from stepprune_jax.selectors import Policy
from stepprune_jax.user_input import expect, require

_LOG = logging.getLogger(__name__)


def generate_answers(
    run: EvaluationRun, workdir: str | Path, *, policy: str | Path | None = None
) -> dict[str, Path]:
    """Answers the unanswered questions of all benchmarks in all rows of the table.

    Args:
        run: settings of the evaluation.
        workdir: folder of the run. If there are several processes, all must see this folder.
        policy: the policy to evaluate; None selects the policy that was trained in `workdir`.

    Returns:
        The folder of answer files by benchmark: workdir/answers/BENCHMARK.

    Raises:
        FileNotFoundError: a question file, image or policy is missing.
        UserError: a setting does not fit the model, an answer file belongs to other settings, or
            some questions gave logits that are not finite.
    """
    folder = Path(workdir) / ANSWERS
    source = run.model.inspect()
    policies = read_policies(run.eval, workdir, policy, source)
    conditions = Conditions(run, source, policies, folder)
    check_policies(policies, source.config, run.eval, conditions.num_tokens)
    tasks = read_tasks(conditions)
    run.model.execution.check_backend()
    max_positions = source.config.text.max_positions
    expected = f"at most {max_positions}, the positions that the model was trained with"
    for max_tokens in (task.options.max_tokens for task in tasks):
        expect("config.eval.max_new_tokens", max_tokens, max_tokens <= max_positions, expected)
    answer_tasks(tasks, lambda: load_model(run))
    return {task.benchmark.name: folder / task.benchmark.name for task in tasks}


def load_model(run: EvaluationRun) -> VLM:
    """Loads the model of a run. Every process loads the complete model on its own devices."""
    folder, vision_folder = run.model.folders
    mesh = None if run.mesh == "single" else build_mesh(run.mesh, jax.local_devices())
    return load_vlm(
        folder,
        mesh,
        jnp.dtype(run.model.dtype),
        vision_folder=vision_folder,
        weights=run.model.weights,
        min_pixels=run.model.min_pixels,
        max_pixels=run.model.max_pixels,
    )


def answer_tasks(tasks: Sequence["Task"], load: Callable[[], VLM]) -> None:
    """Answers the unanswered questions of several benchmarks.

    Args:
        tasks: one task per benchmark.
        load: loads the model. Not called if all questions are answered.

    Raises:
        UserError: some questions gave logits that are not finite. All other answers are written.
    """
    # All tasks are checked first, so a file of another run is refused before the model is loaded.
    incomplete_tasks = [task for task in tasks if task.is_incomplete()]
    if not incomplete_tasks:
        return
    model = load()
    texts = (question.text for task in incomplete_tasks for question in task.questions)
    warning = describe_unknown_words(model.tokenizer, texts)
    if warning and distributed.is_main():
        _LOG.warning("%s", warning)
    problems = list(filter(None, [task.run(model) for task in incomplete_tasks]))
    message = f"{'; '.join(problems)}: {NotFiniteError.REASON}. All other answers are written"
    distributed.together(lambda: require(not problems, message))


def read_tasks(conditions: Conditions) -> list["Task"]:
    """Reads the questions of all benchmarks, and the questions that calibrate their stop biases.

    A stop bias makes a policy with a learned stop meet a budget on average. Benchmarks with a
    validation split are calibrated on it. All other benchmarks share one sample of their questions.

    Args:
        conditions: settings, model and policies of the run.

    Returns:
        One task per benchmark. A task has no sample, and its policies have no rows with mean
        budgets, if no policy has a learned stop or the validation split is missing.
    """
    run, names = conditions.run, conditions.settings.benchmark_names
    questions_of = {name: run.questions(name) for name in names}
    samples: dict[str, CalibrationSet] = {}
    if any(policy.has_stop for policy in conditions.policies.values()):
        without_split = [name for name in names if not BENCHMARKS[name].calibration]
        if without_split:
            question_limit = conditions.settings.validation_questions
            questions = sample_evenly(
                {name: questions_of[name] for name in without_split}, question_limit
            )
            samples = dict.fromkeys(without_split, CalibrationSet({}, questions, decimals=3))
        for name in (name for name in names if name not in without_split):
            split_path = run.root(name) / BENCHMARKS[name].calibration
            if split_path.is_file():
                samples[name] = read_sample(run, name)
            else:
                _LOG.warning(
                    "no file at %s, whose questions calibrate a learned stop: no rows with mean "
                    "budgets",
                    split_path,
                )
    return [
        Task(conditions, BENCHMARKS[name], questions, samples.get(name))
        for name, questions in questions_of.items()
    ]


def read_sample(run: EvaluationRun, name: str) -> CalibrationSet:
    """Samples the validation questions of a benchmark at regular intervals.

    Args:
        run: settings of the evaluation. `eval.validation_questions` limits the sample.
        name: name of a benchmark with a validation split.

    Raises:
        FileNotFoundError: an image is missing.
    """
    benchmark, root = BENCHMARKS[name], run.root(name)
    all_questions = run.sample_videos(benchmark.read_questions(root, benchmark.calibration))
    indices = spread_over(len(all_questions), run.eval.validation_questions)
    questions = [all_questions[index] for index in indices]
    sample_digest = digest(
        [f"{q.image.name} {q.text}{q.sampling}" for q in questions if isinstance(q.image, Path)]
    )
    return CalibrationSet({"split": "validation", "sample": sample_digest}, questions)


class _OpenRow(NamedTuple):
    """A row of the table, for one benchmark. Built when a task opens its answer files.

    Attributes:
        method: the pruning method and its budget.
        file: the answer file of the row.
        unanswered: indices of the questions that the file does not answer.
    """

    method: TableRow
    file: AnswerFile
    unanswered: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Task:
    """The questions of one benchmark, which every row of the table answers.

    Attributes:
        conditions: settings, model and policies, on which the answers depend.
        benchmark: the benchmark.
        questions: questions of the benchmark. Elsewhere, the index of a question is its index in
            this list.
        sample: questions that calibrate the stop biases; None without policies that need a bias.
    """

    conditions: Conditions
    benchmark: Benchmark
    questions: Sequence[BenchmarkQuestion]
    sample: CalibrationSet | None = None

    @property
    def options(self) -> RunOptions:
        """Options for generating the answers to this benchmark."""
        settings, run = self.conditions.settings, self.conditions.run
        max_tokens = settings.longest_answer(self.benchmark)
        return RunOptions(max_tokens, settings.positions, execution=run.model.execution)

    @property
    def _stop_policies(self) -> dict[str, Policy]:
        """The policies with a learned stop by label."""
        policies = self.conditions.policies.items()
        return {
            label: policy
            for label, policy in policies
            if isinstance(policy, Policy) and policy.has_stop
        }

    @property
    def _stop_biases(self) -> StopBiases:
        """The file of stop biases of the run, for its policies with a learned stop."""
        conditions = self.conditions
        digests = {label: conditions.digests[label] for label in self._stop_policies}
        model_fields = {"weights": conditions.weights, "num_tokens": conditions.num_tokens}
        model_fields |= conditions.source.config.image_bounds
        path = conditions.folder / FILE
        return StopBiases(path, model_fields, digests, conditions.settings.budgets)

    def _plan_rows(self, biases: Biases) -> list[TableRow]:
        """Plans the rows with these stop biases, without methods that cannot read the questions.

        Raises:
            UserError: a question has a video, and `eval.methods` names a method without a meaning
                for videos.
        """
        rows = self.conditions.rows(biases)
        if all(question.video is None for question in self.questions):
            return rows
        for row in rows:
            is_named = self.conditions.settings.is_named(row.label)
            require(
                row.pruner.reads_videos or not is_named,
                f"config.eval.methods names {row.label}, which prunes images only, and no videos; "
                "see docs/video.md",
            )
        return [row for row in rows if row.pruner.reads_videos]

    def is_incomplete(self) -> bool:
        """Returns whether an answer or a stop bias is missing. All processes must call this method.

        Raises:
            UserError: an answer file belongs to a run with other conditions.
        """

        def has_gap() -> bool:
            biases = {} if self.sample is None else self._stop_biases.read_cached(self.sample)
            rows = self._plan_rows(biases)
            files = self.conditions.files(rows, self.benchmark, self.questions)
            for file in files:
                check_claim(file)
            lacks_bias = self.sample is not None and biases.keys() < self._stop_policies.keys()
            # The list is complete before `any`, because `find_unanswered` also repairs each file.
            return lacks_bias or any([find_unanswered(file, self.questions) for file in files])

        # `any_process` also waits until all processes have read the files, before one writes.
        return distributed.any_process(distributed.main_first(has_gap))

    def run(self, model: VLM) -> str:
        """Answers the missing questions in all rows. All processes share the questions.

        Args:
            model: the model.

        Returns:
            A message that lists the questions with logits that are not finite; "" without such
            questions.
        """
        settings, run = self.conditions.settings, self.conditions.run
        # A batch is divided over the devices, so its size is rounded up to a multiple.
        num_devices = row_count(mesh_of(model.params))
        batch_size = math.ceil(settings.batch_size / num_devices) * num_devices
        biases = {}
        if self.sample is not None:
            biases = self._stop_biases.compute(
                model, self._stop_policies, self.sample, run.model.execution, batch_size
            )
        rows = self._open_files(biases)
        answerer = _Answerer(self, model, batch_size, rows)
        self._announce(rows)
        unanswered_indices = sorted(frozenset().union(*(row.unanswered for row in rows)))
        chunks = split_chunks(
            unanswered_indices,
            chunk_size(model, batch_size, self.questions),
            process_index=jax.process_index(),
            num_processes=jax.process_count(),
        )
        local_indices = frozenset(itertools.chain.from_iterable(chunks))
        with tqdm(
            total=sum(len(local_indices & row.unanswered) for row in rows),
            desc=self.benchmark.name,
            unit="answer",
            mininterval=0.2 if sys.stderr.isatty() else 10,
        ) as bar:
            for chunk in chunks:
                distributed.together(functools.partial(answerer.answer, chunk, bar))

        def merge_parts() -> None:
            if distributed.is_main():
                for row in rows:
                    find_unanswered(row.file, self.questions)  # merges the files of all processes

        distributed.main_first(merge_parts)
        ids = [self.questions[index].question_id for index in sorted(answerer.not_finite)]
        return f"{self.benchmark.name}: {listed('question', ids)}" if ids else ""

    def _announce(self, rows: Sequence[_OpenRow]) -> None:
        """Logs how many answers the task generates."""
        num_questions, num_rows = len(self.questions), len(rows)
        num_missing = sum(len(row.unanswered) for row in rows)
        num_present = num_rows * num_questions - num_missing
        present = f"; {num_present:,} exist already" if num_present else ""
        distributed.say(
            f"{self.benchmark.name}: {num_rows} rows of {num_questions:,} questions are "
            f"{num_rows * num_questions:,} answers{present}; fewer with --config.eval.methods and "
            "--config.eval.budgets"
        )

    def _open_files(self, biases: Biases) -> list[_OpenRow]:
        """Plans all rows, creates their answer files, and finds the missing answers of each file.

        Args:
            biases: stop biases. A policy without biases has no rows with mean budgets.
        """
        table_rows = self._plan_rows(biases)
        files = self.conditions.files(table_rows, self.benchmark, self.questions)

        def open_all() -> list[_OpenRow]:
            if distributed.is_main():
                for file in files:
                    claim(file)
            return [
                _OpenRow(row, file, frozenset(find_unanswered(file, self.questions)))
                for row, file in zip(table_rows, files, strict=True)
            ]

        open_rows = distributed.main_first(open_all)
        distributed.any_process(False)  # waits until all processes have read the files
        return open_rows


def _count_bound(row: TableRow, num_kept: int, num_tokens: int) -> dict[str, str]:
    """Returns a field of an answer if its learned stop kept the minimum or maximum of tokens.

    Args:
        row: the row of the answer.
        num_kept: number of kept tokens.
        num_tokens: number of visual tokens of the image.

    Returns:
        The field `BOUND` with "minimum" or "T_max". Empty for a count between the bounds, for equal
        bounds, and for every row except a learned stop without a budget.
    """
    pruner = row.pruner
    if row.budget.kind != "adaptive" or not isinstance(pruner, Policy) or not pruner.has_stop:
        return {}
    min_tokens, max_tokens = pruner.min_tokens, min(num_tokens, pruner.longest(num_tokens))
    if min_tokens >= max_tokens or min_tokens < num_kept < max_tokens:
        return {}
    return {BOUND: "T_max" if num_kept >= max_tokens else "minimum"}


def format_duration(seconds: float) -> str:
    """Formats a duration in seconds, minutes or hours, as in "12 min"."""
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def split_chunks(
    indices: Sequence[int], chunk_length: int, *, process_index: int, num_processes: int
) -> list[list[int]]:
    """Returns the chunks of questions that one process answers.

    Each process gets a contiguous range of the questions.

    Args:
        indices: indices of all unanswered questions.
        chunk_length: maximum number of questions in a chunk.
        process_index: index of the process.
        num_processes: number of processes.

    Returns:
        The indices in each chunk. All processes have the same number of chunks, because they
        process each chunk together. The last chunks of a process may therefore be empty.
    """
    start, stop = (
        len(indices) * process // num_processes for process in (process_index, process_index + 1)
    )
    max_per_process = math.ceil(len(indices) / num_processes)
    num_chunks = math.ceil(max_per_process / chunk_length)
    bounds = [min(start + chunk_length * chunk, stop) for chunk in range(num_chunks + 1)]
    return [list(indices[first:last]) for first, last in itertools.pairwise(bounds)]


class _Answerer:
    """Answers chunks of a task's questions in all rows. Used by `Task.run`.

    Attributes:
        not_finite: indices of the questions with logits that are not finite in some row.
    """

    def __init__(self, task: Task, model: VLM, batch_size: int, rows: Sequence[_OpenRow]):
        """Plans the batches, and selects the questions that store their kept tokens.

        Args:
            task: the benchmark's questions.
            model: the model.
            batch_size: questions per batch.
            rows: the rows with their answer files.
        """
        conditions, settings = task.conditions, task.conditions.settings
        self._task, self._model, self._rows = task, model, rows
        self._options = task.options
        self.not_finite: set[int] = set()
        self._has_estimated_time = False
        # Kept tokens are padded to a ladder of sizes or, if all images have the same size, to the
        # exact numbers of the rows.
        padded_counts = None
        if not model.config.sizes_vary:
            num_tokens = conditions.num_tokens
            max_counts = [
                row.method.pruner.schedule(model.config, num_tokens).bound for row in rows
            ]
            padded_counts = tuple(sorted({*max_counts, num_tokens}))
        self._batching = Batching(batch_size, padded_counts, WIDTHS)
        with_image = [
            index for index, question in enumerate(task.questions) if question.image is not None
        ]
        # Only some answers store their kept tokens, to limit the size of the file.
        num_samples = len(with_image) if task.benchmark.keep_order else settings.samples
        positions = spread_over(len(with_image), num_samples) if num_samples else []
        self._sampled_indices = {with_image[position] for position in positions}

    def answer(self, chunk: Sequence[int], bar: tqdm) -> None:
        """Answers a chunk of questions in the rows without an answer, and writes the answers.

        Args:
            chunk: indices of the questions.
            bar: progress bar, which counts answers.
        """
        # Pairs (row, indices of its unanswered questions in this chunk).
        unanswered_in_rows = [
            (row, indices)
            for row in self._rows
            if (indices := [index for index in chunk if index in row.unanswered])
        ]
        if not unanswered_in_rows:
            return
        model, questions = self._model, self._task.questions
        pruners = [row.method.pruner for row, _ in unanswered_in_rows]
        encoded = encode_questions(
            model,
            [questions[index] for index in chunk],
            batch_size=self._batching.batch_size,
            taps=[tap for pruner in pruners for tap in pruner.taps(model.config)],
            execution=self._options.execution,
            numbers=chunk,
        )
        lines_without_image = self._answer_without_image(encoded)
        with_image = encoded.take(np.flatnonzero(encoded.prompts.has_image))
        # Rows that differ only in their budget are adjacent.
        for _, group in itertools.groupby(
            unanswered_in_rows, lambda pair: pair[0].method.method_key
        ):
            self._answer_group(list(group), with_image, lines_without_image, bar)

    def _answer_group(
        self,
        group: Sequence[tuple[_OpenRow, list[int]]],
        with_image: EncodedQuestions,
        lines_without_image: dict[int, AnswerLine],
        bar: tqdm,
    ) -> None:
        """Answers rows that differ only in their budget, and writes the answers.

        The pruning method orders the tokens of each image once for all of these rows.

        Args:
            group: the rows, each with the indices of its unanswered questions.
            with_image: all questions of the chunk with an image.
            lines_without_image: answers to the questions without an image, by question index.
            bar: progress bar, which counts answers.
        """
        # Positions in `with_image` of the unanswered questions of each row.
        positions_of_rows = [
            np.flatnonzero(np.isin(with_image.prompts.number, indices)) for _, indices in group
        ]
        pruners = [row.method.pruner for row, _ in group]
        generator = Generator(self._model, pruners[0], options=self._options)
        variants = list(zip(pruners, positions_of_rows, strict=True))
        answers_of_rows = generator.answer_set(with_image, self._batching, variants, partial=True)
        for (row, indices), positions, answers in zip(
            group, positions_of_rows, answers_of_rows, strict=True
        ):
            bar.set_postfix_str(row.file.path.stem, refresh=False)
            lines = self._make_lines(with_image.take(positions), row.method, answers)
            lines |= lines_without_image
            objects = []
            for index in indices:
                if index in lines:
                    question = self._task.questions[index]
                    objects.append(answer_object(row.file, index, question, lines[index]))
                else:
                    self.not_finite.add(index)
            append(row.file.part(jax.process_index()), objects)
            bar.update(len(indices))
            if not self._has_estimated_time:
                self._estimate_time(row.method.label, answers, bar)

    def _estimate_time(self, label: str, answers: Answers, bar: tqdm) -> None:
        """Logs an estimate of the time for the remaining answers, if the answers have times.

        Args:
            label: name of the row with the first answers, usually the slow row of all tokens.
            answers: the first answers. Batches that compiled a program have no time.
            bar: progress bar, which counts answers.
        """
        num_remaining = bar.total - bar.n
        measured_seconds = answers.seconds[np.isfinite(answers.seconds)]
        if num_remaining and len(measured_seconds):
            self._has_estimated_time = True
            seconds = num_remaining * float(np.mean(measured_seconds))
            distributed.say(
                f"{self._task.benchmark.name}: about {format_duration(seconds)} for the remaining "
                f"{num_remaining:,} answers at the speed of {label!r}, without compilation; after "
                "Ctrl-C, the report covers what is answered"
            )

    def _make_lines(
        self, with_image: EncodedQuestions, row: TableRow, answers: Answers
    ) -> dict[int, AnswerLine]:
        """Builds the lines of a row's answer file by question index.

        Args:
            with_image: the questions, with one image each.
            row: the row.
            answers: answers of the row to these questions.

        Returns:
            One line per question, without the questions whose logits are not finite.
        """
        lines = {}
        prompts = with_image.prompts
        grids = with_image.images.grid[prompts.image_of[:, 0]].tolist()
        num_tokens = with_image.sizes.tolist()
        num_text_tokens = prompts.num_text.tolist()
        clips = with_image.images.clips
        num_patches = np.ones(len(grids), int)
        if clips is not None:
            num_patches = np.asarray(clips.frames)[prompts.image_of[:, 0]]
        num_words, num_kept = prompts.num_words.tolist(), answers.kept.tolist()
        for position, index in enumerate(prompts.number.tolist()):
            if not answers.finite[position]:
                continue
            grid, kept_count = grids[position], num_kept[position]
            patches = int(num_patches[position])
            patch_grid = grid[0] // patches, grid[1]
            flops = first_token_flops(
                self._model.backbone,
                row.pruner.without_weights,
                patch_grid,
                num_patches=patches,
                num_text_tokens=num_text_tokens[position],
                num_words=num_words[position],
                num_kept=kept_count,
            )
            fields: dict[str, Any] = {"gflops": sum(flops.values()) / 1e9}
            fields |= _count_bound(row, kept_count, num_tokens[position])
            if self._task.questions[index].video is not None:
                order = answers.order[position].tolist()
                fields["kept_per_patch"] = kept_per_patch(order, (patches, *patch_grid))
            if index in self._sampled_indices and row.budget.kind != "all":
                order = answers.order[position].tolist()
                fields |= {
                    "order": self._model.backbone.token_cells(grid, order).tolist(),
                    "grid": grid,
                    "visual_tokens": num_tokens[position],
                }
            answer_ms = milliseconds(answers.seconds[position])
            lines[index] = AnswerLine(answers.texts[position], kept_count, answer_ms, fields)
        return lines

    def _answer_without_image(self, encoded: EncodedQuestions) -> dict[int, AnswerLine]:
        """Answers the questions without an image, whose answers are equal for all methods.

        Args:
            encoded: all questions of a chunk.

        Returns:
            The lines of these answers by question index, without the questions whose logits are
            not finite.
        """
        positions = np.flatnonzero(~encoded.prompts.has_image)
        if not len(positions):
            return {}
        without_image = encoded.take(positions)._replace(seconds=0.0)  # no time in the tower
        generator = Generator(self._model, AllTokens(), options=self._options)
        (answers,) = generator.answer_set(without_image, self._batching, partial=True)
        indices = without_image.prompts.number.tolist()
        columns = zip(indices, answers.texts, answers.seconds, answers.finite, strict=True)
        return {
            index: AnswerLine(text, kept=0, ms=milliseconds(seconds))
            for index, text, seconds, is_finite in columns
            if is_finite
        }
