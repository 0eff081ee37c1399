"""The first stage: a model and questions give answer files.

Questions are processed in chunks. A chunk goes through the tower once, each ranker orders its
tokens once, and every row of the table is answered from that; each row's answers are written before
the next row begins. An interrupted run resumes with the unanswered questions.
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
    outstanding,
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
        policy: policy of the default row; None for the policy of the run in `workdir`.

    Returns:
        The folder of answer files of each benchmark, workdir/answers/BENCHMARK.
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
    """Loads the model of a run; every process has all of it, on its own devices."""
    folder, vision = run.model.folders
    mesh = None if run.mesh == "single" else build_mesh(run.mesh, jax.local_devices())
    return load_vlm(
        folder,
        mesh,
        jnp.dtype(run.model.dtype),
        vision_folder=vision,
        weights=run.model.weights,
        **run.model.image_bounds,
    )


def answer_tasks(tasks: Sequence["Task"], load: Callable[[], VLM]) -> None:
    """Answers the missing questions of tasks; loads the model only if there are any."""
    # In every task first: the provenance of all files is checked before the model is loaded.
    todo = [task for task in tasks if task.is_missing()]
    if not todo:
        return
    model, problems = load(), []
    for task in todo:
        problem = task.run(model)
        problems += [problem] if problem else []
    reason = f"{'; '.join(problems)}: {NotFiniteError.REASON}. All other answers are written"
    distributed.together(lambda: require(not problems, reason))


def read_tasks(conditions: Conditions) -> list["Task"]:
    """Reads the questions of every benchmark, and those that stop biases are computed on."""
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
    """Reads the questions that a benchmark has for calibration."""
    benchmark, root = BENCHMARKS[name], run.root(name)
    questions = benchmark.read_questions(root, benchmark.calibration)
    positions = spread_over(len(questions), run.eval.validation_questions)
    questions = [questions[position] for position in positions]
    digest_of_questions = digest(
        [f"{question.image.name} {question.text}" for question in questions]
    )
    return CalibrationSet({"split": "validation", "sample": digest_of_questions}, questions)


class _OpenRow(NamedTuple):
    """A row of the table, its file, and the questions that it lacks."""

    row: TableRow
    file: AnswerFile
    missing: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Task:
    """The questions of a benchmark, to be answered by every row of the table.

    Stop biases are computed on `sample`; without one, no budget is a mean.
    """

    conditions: Conditions
    benchmark: Benchmark
    questions: Sequence[BenchmarkQuestion]
    sample: CalibrationSet | None = None

    @property
    def options(self) -> RunOptions:
        """Options of a run of the model, with the longest answer to the benchmark."""
        settings, run = self.conditions.settings, self.conditions.run
        longest = settings.longest_answer(self.benchmark)
        return RunOptions(longest, settings.positions, execution=run.model.execution)

    @property
    def _biases(self) -> StopBiases:
        conditions, policies = self.conditions, self.conditions.policies
        digests = {n: d for n, d in conditions.digests.items() if policies[n].has_stop}
        path, config = conditions.folder / FILE, conditions.source.config
        model = {"weights": conditions.weights, "num_tokens": conditions.num_tokens}
        model |= config.image_bounds
        return StopBiases(path, model, digests, conditions.settings.budgets)

    def _files(self, biases: Biases) -> list[tuple[TableRow, AnswerFile]]:
        rows = self.conditions.rows(biases)
        files = self.conditions.files(rows, self.benchmark, self.questions)
        return list(zip(rows, files, strict=True))

    def is_missing(self) -> bool:
        """Returns whether an answer or a stop bias is missing; checks the provenance of files."""

        def has_missing() -> bool:
            biases = {} if self.sample is None else self._biases.known(self.sample)
            files = [file for _, file in self._files(biases)]
            for file in files:
                check_claim(file)
            lacks_biases = self.sample is not None and biases.keys() < self._biases.digests.keys()
            return lacks_biases or any([outstanding(file, self.questions) for file in files])

        # The processes agree, and none writes while another still reads.
        return distributed.any_process(distributed.main_first(has_missing))

    def run(self, model: VLM) -> str:
        """Answers missing questions, chunk by chunk; all processes work on their chunks in step.

        Returns:
            The questions with logits that are not finite; empty if there are none.
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
        chunk = chunk_size(model, size)
        chunks = share(missing_numbers, chunk, jax.process_index(), jax.process_count())
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
                    outstanding(row.file, self.questions)

        distributed.main_first(merge)
        names = [self.questions[number].question_id for number in sorted(answerer.without_answer)]
        return f"{self.benchmark.name}: {listed('question', names)}" if names else ""

    def _claim(self, rows: Sequence[tuple[TableRow, AnswerFile]]) -> list[_OpenRow]:
        """Opens the answer files, and lists missing answers."""

        def open_rows() -> list[_OpenRow]:
            for _, file in rows if distributed.is_main() else ():
                claim(file)
            return [
                _OpenRow(row, file, frozenset(outstanding(file, self.questions)))
                for row, file in rows
            ]

        opened = distributed.main_first(open_rows)
        distributed.any_process(False)  # none writes while another still reads
        return opened


def _bound(row: TableRow, kept: int, num_tokens: int) -> dict[str, str]:
    """Returns the bound that a learned stop's own count is at, for its line; none between them."""
    pruner = row.pruner
    if row.budget.kind != "own" or not isinstance(pruner, Policy) or not pruner.has_stop:
        return {}
    longest = min(num_tokens, pruner.longest(num_tokens))
    if pruner.min_tokens < longest <= kept:
        return {BOUND: "T_max"}
    return {BOUND: "minimum"} if kept <= pruner.min_tokens < longest else {}


def share(numbers: Sequence[int], size: int, index: int, count: int) -> list[list[int]]:
    """Returns one process's share of questions, in chunks of `size`.

    Every process has the same number of chunks. The last chunks may be empty.
    """
    begin, end = (len(numbers) * place // count for place in (index, index + 1))
    chunks = math.ceil(math.ceil(len(numbers) / count) / size)
    bounds = [min(begin + size * number, end) for number in range(chunks + 1)]
    return [list(numbers[first:last]) for first, last in itertools.pairwise(bounds)]


class _Answerer:
    """Answers questions of a task in every row that lacks them.

    Attributes:
        without_answer: numbers of the questions with logits that are not finite in some row.
    """

    def __init__(self, task: Task, model: VLM, size: int, rows: Sequence[_OpenRow]):
        """Takes the rows of the task, and the questions that go through a program together."""
        conditions, settings = task.conditions, task.conditions.settings
        self._task, self._model, self._rows = task, model, rows
        self.without_answer: set[int] = set()
        n, sizes = conditions.num_tokens, None
        steps = [row.row.pruner.schedule(model.config, n).bound for row in rows]
        if not model.config.sizes_vary:  # otherwise kept tokens are padded to a ladder
            sizes = tuple(sorted({*steps, n}))
        self._batching = Batching(size, sizes, WIDTHS)
        self._options = task.options
        with_image = [n for n, question in enumerate(task.questions) if question.image is not None]
        sample_count = (
            len(with_image) if task.benchmark.keep_order else min(settings.samples, len(with_image))
        )
        self._samples = {
            with_image[number * len(with_image) // sample_count] for number in range(sample_count)
        }

    def answer(self, numbers: Sequence[int], bar: tqdm) -> None:
        """Answers some questions, and writes each row's answers before the next row begins."""
        rows_to_answer = [(row, [n for n in numbers if n in row.missing]) for row in self._rows]
        rows_to_answer = [
            (row, missing_numbers) for row, missing_numbers in rows_to_answer if missing_numbers
        ]
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
        """Answers the rows of one method, whose tokens are put in order once, and writes them."""
        numbers = with_image.prompts.number
        places = [np.flatnonzero(np.isin(numbers, missing_numbers)) for _, missing_numbers in group]
        variants = [
            (row.row.pruner, positions) for (row, _), positions in zip(group, places, strict=True)
        ]
        generator = Generator(self._model, variants[0][0], options=self._options)
        answered = generator.answer_set(with_image, self._batching, variants, partial=True)
        for (row, missing_numbers), positions, answers in zip(group, places, answered, strict=True):
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
        """Returns the lines of one row of the table by number of the question, if it has one."""
        lines = {}
        grids, sizes = (
            with_image.images.grid[with_image.prompts.image_of[:, 0]].tolist(),
            with_image.sizes.tolist(),
        )
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
                text,
                words,
                kept,
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
        """Answers questions without an image; the answers are the same for all methods."""
        rows = np.flatnonzero(~encoded.prompts.has_image)
        if not len(rows):
            return {}
        without_image = encoded.take(rows)._replace(seconds=0.0)
        generator = Generator(self._model, AllTokens(), options=self._options)
        (answers,) = generator.answer_set(without_image, self._batching, partial=True)
        numbers = without_image.prompts.number.tolist()
        rows = zip(numbers, answers.texts, answers.seconds, answers.finite, strict=True)
        return {
            number: AnswerLine(text, 0, milliseconds(seconds))
            for number, text, seconds, is_finite in rows
            if is_finite
        }
