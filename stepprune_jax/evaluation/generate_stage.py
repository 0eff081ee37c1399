"""First stage of an evaluation: answers the questions of benchmarks and writes answer files.

Questions are processed in chunks. A chunk passes through the vision tower once, and each ranking
method orders its tokens once. All rows of the table are answered from these results. The answers of
a row are written before the next row begins. An interrupted run resumes with the unanswered
questions.
"""

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

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
from stepprune_jax.evaluation.calibrate import FILE, Biases, CalibrationSet, StopBiases, spread
from stepprune_jax.evaluation.operations import first_token_flops
from stepprune_jax.evaluation.rows import Conditions, TableRow
from stepprune_jax.evaluation.settings import EvaluationRun, check_policies, read_policies
from stepprune_jax.evaluation.split import spread_over
from stepprune_jax.inference.base import RunOptions
from stepprune_jax.inference.dataset import Answers, Batching, milliseconds
from stepprune_jax.inference.decoding import NotFiniteError, listed
from stepprune_jax.inference.encode import WIDTHS, EncodedQuestions, chunk_size, encode_questions
from stepprune_jax.inference.generate import Generator
from stepprune_jax.parallel import distributed
from stepprune_jax.parallel.placement import mesh_of, row_count
from stepprune_jax.parallel.sharding import build_mesh
from stepprune_jax.pruning import AllTokens
from stepprune_jax.selectors import Policy
from stepprune_jax.user_input import expect, require


def generate_answers(
    run: EvaluationRun, workdir: str | Path, *, policy: str | Path | None = None
) -> dict[str, Path]:
    """Answers the unanswered questions of all benchmarks.

    Args:
        run: settings of the evaluation.
        workdir: folder of the run, which all processes must see.
        policy: policy of the default row; None selects the policy of the run in `workdir`.

    Returns:
        The folder of answer files by benchmark: workdir/answers/BENCHMARK.
    """
    folder = Path(workdir) / ANSWERS
    source = run.model.inspect()
    policies = read_policies(run.eval, workdir, policy, source)
    check_policies(policies, source.config, run.eval)
    tasks = read_tasks(Conditions(run, source, policies, folder))
    run.model.execution.check_backend()
    positions = source.config.text.max_positions
    expected = f"at most {positions}, the positions that the model was trained with"
    for task in tasks:
        longest = task.options.max_tokens
        expect("config.eval.max_new_tokens", longest, longest <= positions, expected)
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
        **run.model.image_bounds,
    )


def answer_tasks(tasks: Sequence["Task"], load: Callable[[], VLM]) -> None:
    """Answers the missing questions of several tasks.

    Args:
        tasks: the tasks.
        load: loads the model; only called if a question is missing.

    Raises:
        ValueError: some questions gave logits that are not finite. All other answers are written.
    """
    # All tasks are checked first, so a file of another run is refused before the model is loaded.
    incomplete_tasks = [task for task in tasks if task.is_missing()]
    if not incomplete_tasks:
        return
    model, problems = load(), []
    for task in incomplete_tasks:
        problem = task.run(model)
        problems += [problem] if problem else []
    reason = f"{'; '.join(problems)}: {NotFiniteError.REASON}. All other answers are written"
    distributed.together(lambda: require(not problems, reason))


def read_tasks(conditions: Conditions) -> list["Task"]:
    """Reads the questions of all benchmarks, and the questions for their stop biases.

    A benchmark without calibration questions shares a sample of the questions of all such
    benchmarks.
    """
    run, names = conditions.run, conditions.settings.benchmark_names
    questions_of = {name: run.questions(name) for name in names}
    uncalibrated = {name: q for name, q in questions_of.items() if not BENCHMARKS[name].calibration}
    has_stop = any(policy.has_stop for policy in conditions.policies.values())
    question_limit, shared_sample, tasks = conditions.settings.validation_questions, None, []
    if uncalibrated and has_stop:
        shared_sample = CalibrationSet({}, spread(uncalibrated, question_limit), decimals=3)
    for name, questions in questions_of.items():
        sample = shared_sample
        if name not in uncalibrated:
            sample = read_sample(run, name) if has_stop else None
        tasks.append(Task(conditions, BENCHMARKS[name], questions, sample))
    return tasks


def read_sample(run: EvaluationRun, name: str) -> CalibrationSet:
    """Reads the calibration questions of a benchmark, at most `eval.validation_questions`."""
    benchmark, root = BENCHMARKS[name], run.root(name)
    questions = benchmark.read_questions(root, benchmark.calibration)
    positions = spread_over(len(questions), run.eval.validation_questions)
    questions = [questions[position] for position in positions]
    sample_digest = digest([f"{question.image.name} {question.text}" for question in questions])
    return CalibrationSet({"split": "validation", "sample": sample_digest}, questions)


class _OpenRow(NamedTuple):
    """A row of the table with its open answer file.

    Attributes:
        row: the row.
        file: the answer file.
        missing: numbers of the questions without an answer in the file.
    """

    row: TableRow
    file: AnswerFile
    missing: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Task:
    """The questions of one benchmark, which every row of the table answers.

    Attributes:
        conditions: everything that the answers depend on.
        benchmark: the benchmark.
        questions: the questions.
        sample: questions for stop biases; None if there are no rows with a mean budget.
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
    def _biases(self) -> StopBiases:
        """The cached stop biases of the run."""
        conditions, policies = self.conditions, self.conditions.policies
        digests = {
            name: digest for name, digest in conditions.digests.items() if policies[name].has_stop
        }
        path, config = conditions.folder / FILE, conditions.source.config
        model = {"weights": conditions.weights, "num_tokens": conditions.num_tokens}
        model |= config.image_bounds
        return StopBiases(path, model, digests, conditions.settings.budgets)

    def _files(self, biases: Biases) -> list[tuple[TableRow, AnswerFile]]:
        """Returns the rows that exist with these biases, each with its answer file."""
        rows = self.conditions.rows(biases)
        files = self.conditions.files(rows, self.benchmark, self.questions)
        return list(zip(rows, files, strict=True))

    def is_missing(self) -> bool:
        """Returns whether an answer or a stop bias is missing.

        Raises:
            ValueError: an answer file belongs to a run with other conditions.
        """

        def has_missing() -> bool:
            biases = {} if self.sample is None else self._biases.known(self.sample)
            files = [file for _, file in self._files(biases)]
            for file in files:
                check_claim(file)
            lacks_biases = self.sample is not None and biases.keys() < self._biases.digests.keys()
            return lacks_biases or any([find_unanswered(file, self.questions) for file in files])

        # This also waits until all processes have read the files, before any process writes.
        return distributed.any_process(distributed.main_first(has_missing))

    def run(self, model: VLM) -> str:
        """Answers the missing questions, chunk by chunk. Each process answers its own chunks.

        Returns:
            A message about the questions with logits that are not finite; "" if there are none.
        """
        settings, run = self.conditions.settings, self.conditions.run
        devices = row_count(mesh_of(model.params))
        size = -(-settings.batch_size // devices) * devices
        biases = {}
        if self.sample is not None:
            biases = self._biases.compute(
                model, self.conditions.policies, self.sample, run.model.execution, size
            )
        rows = self._claim(self._files(biases))
        answerer = _Answerer(self, model, size, rows)
        missing_numbers = sorted(frozenset().union(*(row.missing for row in rows)))
        chunk_length = chunk_size(model, size)
        chunks = share(missing_numbers, chunk_length, jax.process_index(), jax.process_count())
        local_numbers = frozenset(itertools.chain.from_iterable(chunks))
        with tqdm(
            total=sum(len(local_numbers & row.missing) for row in rows),
            desc=self.benchmark.name,
            unit="answer",
            mininterval=0.2 if sys.stderr.isatty() else 10,
        ) as bar:
            for numbers in chunks:
                distributed.together(functools.partial(answerer.answer, numbers, bar))

        def merge() -> None:
            if distributed.is_main():
                for row in rows:
                    find_unanswered(row.file, self.questions)

        distributed.main_first(merge)
        names = [self.questions[number].question_id for number in sorted(answerer.without_answer)]
        return f"{self.benchmark.name}: {listed('question', names)}" if names else ""

    def _claim(self, rows: Sequence[tuple[TableRow, AnswerFile]]) -> list[_OpenRow]:
        """Creates or opens the answer files, and finds the missing answers of each."""

        def open_all() -> list[_OpenRow]:
            for _, file in rows if distributed.is_main() else ():
                claim(file)
            return [
                _OpenRow(row, file, frozenset(find_unanswered(file, self.questions)))
                for row, file in rows
            ]

        open_rows = distributed.main_first(open_all)
        distributed.any_process(False)  # waits until all processes have read the files
        return open_rows


def _bound(row: TableRow, kept: int, num_tokens: int) -> dict[str, str]:
    """Returns a field of an answer's line if the count of its learned stop is at a bound.

    Args:
        row: the row.
        kept: number of kept tokens.
        num_tokens: visual tokens of the image.

    Returns:
        The field `BOUND` with "minimum" or "T_max"; empty for a count between the bounds and for a
        row without a learned stop.
    """
    pruner = row.pruner
    if row.budget.kind != "adaptive" or not isinstance(pruner, Policy) or not pruner.has_stop:
        return {}
    max_tokens = min(num_tokens, pruner.longest(num_tokens))
    if pruner.min_tokens < max_tokens <= kept:
        return {BOUND: "T_max"}
    return {BOUND: "minimum"} if kept <= pruner.min_tokens < max_tokens else {}


def share(numbers: Sequence[int], size: int, index: int, count: int) -> list[list[int]]:
    """Returns the chunks of questions that one process answers.

    Args:
        numbers: numbers of all questions.
        size: questions per chunk.
        index: number of the process.
        count: number of processes.

    Returns:
        The chunks. Every process has the same number of chunks, so the last ones may be empty.
    """
    start, stop = (len(numbers) * place // count for place in (index, index + 1))
    num_chunks = math.ceil(math.ceil(len(numbers) / count) / size)
    bounds = [min(start + size * number, stop) for number in range(num_chunks + 1)]
    return [list(numbers[first:last]) for first, last in itertools.pairwise(bounds)]


class _Answerer:
    """Answers the questions of a task in all rows where they are missing.

    Attributes:
        without_answer: numbers of the questions with logits that are not finite in some row.
    """

    def __init__(self, task: Task, model: VLM, size: int, rows: Sequence[_OpenRow]):
        """Stores the task.

        Args:
            task: the task.
            model: the model.
            size: questions per batch.
            rows: the rows with their open files.
        """
        conditions, settings = task.conditions, task.conditions.settings
        self._task, self._model, self._rows = task, model, rows
        self.without_answer: set[int] = set()
        num_tokens, widths = conditions.num_tokens, None
        steps = [row.row.pruner.schedule(model.config, num_tokens).bound for row in rows]
        if not model.config.sizes_vary:  # otherwise kept tokens are padded to a ladder of widths
            widths = tuple(sorted({*steps, num_tokens}))
        self._batching = Batching(size, widths, WIDTHS)
        self._options = task.options
        with_image = [n for n, question in enumerate(task.questions) if question.image is not None]
        # Questions whose lines store the kept tokens, so that a report can draw them.
        num_samples = len(with_image) if task.benchmark.keep_order else settings.samples
        positions = spread_over(len(with_image), num_samples) if num_samples else []
        self._samples = {with_image[position] for position in positions}

    def answer(self, numbers: Sequence[int], bar: tqdm) -> None:
        """Answers the questions with these numbers, and writes the answers row by row."""
        rows_to_answer = [(row, [n for n in numbers if n in row.missing]) for row in self._rows]
        rows_to_answer = [pair for pair in rows_to_answer if pair[1]]
        if not rows_to_answer:
            return
        model, config, questions = self._model, self._model.config, self._task.questions
        encoded = encode_questions(
            model,
            [questions[number] for number in numbers],
            batch_size=self._batching.batch_size,
            taps=[tap for row, _ in rows_to_answer for tap in row.row.pruner.taps(config)],
            execution=self._options.execution,
            numbers=numbers,
        )
        lines_without_image = self._answer_plain(encoded)
        with_image = encoded.take(np.flatnonzero(encoded.prompts.has_image))
        for _, group in itertools.groupby(rows_to_answer, lambda pair: pair[0].row.shared):
            self._answer_group(list(group), with_image, lines_without_image, bar)

    def _answer_group(
        self,
        group: Sequence[tuple[_OpenRow, list[int]]],
        with_image: EncodedQuestions,
        lines_without_image: dict[int, AnswerLine],
        bar: tqdm,
    ) -> None:
        """Answers rows that differ only in their budget, and writes the answers.

        Their method orders the tokens of an image once.

        Args:
            group: the rows, each with the numbers of its missing questions.
            with_image: encoded questions with an image.
            lines_without_image: lines of the questions without an image, by number.
            bar: progress bar of answers.
        """
        numbers = with_image.prompts.number
        positions_of_rows = [np.flatnonzero(np.isin(numbers, missing)) for _, missing in group]
        variants = [
            (row.row.pruner, positions)
            for (row, _), positions in zip(group, positions_of_rows, strict=True)
        ]
        generator = Generator(self._model, variants[0][0], options=self._options)
        answers_of_rows = generator.answer_set(with_image, self._batching, variants, partial=True)
        for (row, missing_numbers), positions, answers in zip(
            group, positions_of_rows, answers_of_rows, strict=True
        ):
            bar.set_postfix_str(row.file.path.stem, refresh=False)
            lines = lines_without_image | self._lines(with_image.take(positions), row.row, answers)
            questions = self._task.questions
            self.without_answer |= {n for n in missing_numbers if n not in lines}
            answerable = [n for n in missing_numbers if n in lines]
            objects = [answer_object(row.file, n, questions[n], lines[n]) for n in answerable]
            append(row.file.part(jax.process_index()), objects)
            bar.update(len(missing_numbers))

    def _lines(
        self, with_image: EncodedQuestions, row: TableRow, answers: Answers
    ) -> dict[int, AnswerLine]:
        """Returns the lines of a row's answers by number of the question.

        Questions with logits that are not finite have no line.
        """
        lines = {}
        grids = with_image.images.grid[with_image.prompts.image_of[:, 0]].tolist()
        sizes = with_image.sizes.tolist()
        counts = np.stack(
            [with_image.prompts.length - 1, with_image.prompts.num_words, answers.kept], axis=1
        )
        for position, number in enumerate(with_image.prompts.number.tolist()):
            if not answers.finite[position]:
                continue
            text, words, kept = counts[position].tolist()
            flops = first_token_flops(
                self._model.backbone,
                row.pruner.without_weights,
                tuple(grids[position]),
                text=text,
                words=words,
                kept=kept,
            )
            fields = {"gflops": sum(flops.values()) / 1e9, **_bound(row, kept, sizes[position])}
            if number in self._samples and row.budget.kind != "all":
                order = answers.order[position].tolist()
                order = self._model.backbone.token_cells(grids[position], order).tolist()
                fields |= {
                    "order": order,
                    "grid": grids[position],
                    "visual_tokens": sizes[position],
                }
            answer_ms = milliseconds(answers.seconds[position])
            lines[number] = AnswerLine(
                answers.texts[position], int(answers.kept[position]), answer_ms, fields
            )
        return lines

    def _answer_plain(self, encoded: EncodedQuestions) -> dict[int, AnswerLine]:
        """Answers the questions without an image, whose answers are equal for all methods.

        Returns:
            The lines of the answers by number of the question.
        """
        positions = np.flatnonzero(~encoded.prompts.has_image)
        if not len(positions):
            return {}
        without_image = encoded.take(positions)._replace(seconds=0.0)
        generator = Generator(self._model, AllTokens(), options=self._options)
        (answers,) = generator.answer_set(without_image, self._batching, partial=True)
        numbers = without_image.prompts.number.tolist()
        columns = zip(numbers, answers.texts, answers.seconds, answers.finite, strict=True)
        return {
            number: AnswerLine(text, 0, milliseconds(seconds))
            for number, text, seconds, is_finite in columns
            if is_finite
        }
