"""The first stage on the public benchmarks: a model and question files give answer files.

Questions are taken in chunks. A chunk goes through the tower once, each policy is rolled out on it
once, and every row of the table is answered from that; each row's answers are on the disk before
the next row begins.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.answer_files import (
    ANSWERS,
    AnswerFile,
    AnswerLine,
    answer_object,
    append,
    check_claim,
    claim,
    outstanding,
)
from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.checkpoints.folder import Source, inspect_folder
from stepprune_jax.checkpoints.frozen import model_folders
from stepprune_jax.checkpoints.identity import model_identity
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.checkpoints.policy import Policy
from stepprune_jax.evaluation.answers import Answering, Selection, answer, cut_prompts
from stepprune_jax.evaluation.methods import (
    Making,
    Method,
    make_row,
    plan,
    policy_digest,
    random_orders,
)
from stepprune_jax.evaluation.names import CLS, DEFAULT
from stepprune_jax.evaluation.orders import Ordering, trained_order
from stepprune_jax.evaluation.progress import Progress
from stepprune_jax.evaluation.rows import Row
from stepprune_jax.evaluation.settings import (
    POLICY_FILE,
    Settings,
    check_policies,
    load_policies,
    own_policy,
    read_settings,
)
from stepprune_jax.evaluation.sources import load_model
from stepprune_jax.evaluation.split import Encoded, encode_split
from stepprune_jax.evaluation.stop_biases import find_biases, known_biases
from stepprune_jax.models.llava.prompts import CONTEXT_LIMIT
from stepprune_jax.parallel import distributed
from stepprune_jax.parallel.placement import mesh_of, row_count
from stepprune_jax.policy import bucket_ladder
from stepprune_jax.user_input import user_input

# Questions that share a pass through the tower: with 576 tokens of width 1024 in bfloat16, 300 MB.
CHUNK = 256
# Widths of prompts and of the user's words.
WIDTHS = bucket_ladder(CONTEXT_LIMIT)


class Stage(NamedTuple):
    """What every benchmark is answered with.

    Attributes:
        model: the frozen model.
        policies: by row name.
        methods: the rows.
        making: what answers are made with.
        batch_size: questions that go through a program together, on all devices.
        attention: "matmul", "xla" or "cudnn".
    """

    model: VLM
    policies: Mapping[str, Policy]
    methods: Sequence[Method]
    making: Making
    batch_size: int
    attention: str


class Task(NamedTuple):
    """One benchmark.

    Attributes:
        name: of the benchmark.
        questions: all of them.
        files: for each row of the table.
        missing: for each row, the questions without an answer.
        chunks: of the questions that some row lacks, this process's share. There are as many in
            each process; some may be empty.
        samples: questions whose selections are kept for pictures.
    """

    name: str
    questions: list[BenchmarkQuestion]
    files: list[AnswerFile]
    missing: list[frozenset[int]]
    chunks: list[list[int]]
    samples: frozenset[int]

    @property
    def work(self) -> int:
        """Answers that this process has to give."""
        return sum(number in lacking for chunk in self.chunks for number in chunk
                   for lacking in self.missing)  # fmt: skip


def generate_answers(
    config: Any, workdir: str | Path, *, policy: str | Path | None = None
) -> dict[str, Path]:
    """Answers the questions of the public benchmarks that have no answer yet.

    Args:
        config: the run's `ConfigDict`; for the group `eval` see `settings.Settings`.
        workdir: folder of the run; answers go to workdir/answers/BENCHMARK/METHOD.jsonl. Several
            processes must all see it.
        policy: a policy file, or folder of a run, for the default row; otherwise that of the
            working directory, if it has one.

    Returns:
        Name of the benchmark to its folder of answer files.

    Raises:
        FileNotFoundError: a policy, the model, questions or pictures are missing.
        ValueError: bad settings or files, policies that do not fit the model, or answer files that
            were made otherwise.
    """
    workdir = Path(workdir)
    folder = workdir / ANSWERS
    with user_input():
        settings = read_settings(config)
        asked = {name: questions_of(name, settings) for name in settings.public}
        policies = _policies(settings, workdir, policy)
        source = inspect_folder(*model_folders(config))
        check_policies(policies, source.config, settings)
        making = Making(
            _model_name(source), source.config.num_image_tokens, config.seed, settings,
            {name: policy_digest(found) for name, found in policies.items()},
            model_identity(source)[:16], config.model.dtype,
        )  # fmt: skip
        # What is known to be in vain is refused before the model is loaded.
        methods = plan(settings, policies, known_biases(folder, making))
        for name, questions in asked.items():
            for file in making.files(folder, methods, name, questions):
                check_claim(file)
        model = load_model(config)
    size = settings.batch_size * row_count(mesh_of(model.params))
    with user_input():
        biases = find_biases(
            folder, model, policies, asked, making, batch_size=size,
            attention=config.model.attention, sizes=WIDTHS,
        )  # fmt: skip
        methods = plan(settings, policies, biases)
        stage = Stage(model, policies, methods, making, size, config.model.attention)
        tasks = [_task(stage, folder, name, asked[name]) for name in asked]
    progress = Progress(sum(task.work for task in tasks))
    for task in tasks:
        _answer_task(stage, task, progress)
    progress.close()
    return {name: folder / name for name in asked}


def _policies(settings: Settings, workdir: Path, policy: str | Path | None) -> dict[str, Policy]:
    """The policies whose rows are wanted. The default row may be left out, which is told."""
    wanted = {
        name: {row: path for row, path in getattr(settings, name).items() if settings.wants(row)}
        for name in ("rows", "ablations")
    }
    own = None
    if settings.wants(DEFAULT):
        named = policy is not None or settings.methods
        if named or (workdir / POLICY_FILE).is_file():
            own = own_policy(workdir, policy)
        else:
            distributed.say(f"no row {DEFAULT!r}: there is no {workdir / POLICY_FILE}")
    return load_policies(settings._replace(**wanted), own)


def _model_name(source: Source) -> str:
    """The last part of the folder or hub id that was given; a hub's own folders are numbers."""
    return Path(source.origins[0]).expanduser().resolve().name


def questions_of(name: str, settings: Settings) -> list[BenchmarkQuestion]:
    """Reads a benchmark's questions."""
    file = settings.questions.get(name, "")
    return BENCHMARKS[name].read_questions(settings.data, file, ocr=settings.textvqa_ocr)


def _task(stage: Stage, folder: Path, name: str, questions: list[BenchmarkQuestion]) -> Task:
    """Takes the answer files of a benchmark, and finds out what is missing."""
    files = stage.making.files(folder, stage.methods, name, questions)

    def look() -> list[frozenset[int]]:
        if distributed.is_main():
            for file in files:
                claim(file)
        return [frozenset(outstanding(file, questions)) for file in files]

    missing = distributed.main_first(look)
    distributed.any_process(False)  # nobody writes while another still reads
    todo = sorted(frozenset().union(*missing))
    chunks = share(todo, stage.batch_size, jax.process_index(), jax.process_count())
    shown = [number for number, question in enumerate(questions) if question.image is not None]
    most = min(stage.making.settings.samples, len(shown))
    samples = frozenset(shown[number * len(shown) // most] for number in range(most))
    return Task(name, questions, files, missing, chunks, samples)


def share(todo: Sequence[int], batch_size: int, index: int, count: int) -> list[list[int]]:
    """Deals questions out to processes, and each its own to chunks of whole batches.

    Args:
        todo: numbers of questions.
        batch_size: questions that go through a program together.
        index: of this process.
        count: processes.

    Returns:
        The chunks of this process, of about `CHUNK` questions; as many as every process has, the
        last ones may be empty.
    """
    size = max(1, CHUNK // batch_size) * batch_size
    begin, end = (len(todo) * place // count for place in (index, index + 1))
    chunks = math.ceil(math.ceil(len(todo) / count) / size)
    cuts = [min(begin + size * number, end) for number in range(chunks + 1)]
    return [list(todo[first:last]) for first, last in itertools.pairwise(cuts)]


def _answer_task(stage: Stage, task: Task, progress: Progress) -> None:
    """Answers what is missing; each process its share, chunk by chunk in step with the others."""
    for numbers in task.chunks:
        failure = None
        try:
            _answer_chunk(stage, task, numbers, progress)
        except Exception as error:  # the others wait below, and must not do so in vain
            failure = error
        failed = distributed.any_process(failure is not None)
        if failure is not None:
            raise failure
        if failed:
            raise ValueError("another process of this run failed and says why")

    def merge() -> None:
        if distributed.is_main():
            for file in task.files:
                outstanding(file, task.questions)

    if jax.process_count() > 1:
        distributed.main_first(merge)


def _answer_chunk(stage: Stage, task: Task, numbers: list[int], progress: Progress) -> None:
    """Answers some questions in every row that lacks them."""
    lacking = [
        (method, file, [number for number in numbers if number in missing])
        for method, file, missing in zip(stage.methods, task.files, task.missing, strict=True)
    ]
    lacking = [(method, file, mine) for method, file, mine in lacking if mine]
    if not lacking:
        return
    methods = [method for method, _, _ in lacking]
    encoded = encode_split(
        stage.model, [task.questions[number] for number in numbers],
        batch_size=stage.batch_size, with_attention=any(m.name == CLS for m in methods),
        attention=stage.attention, sizes=WIDTHS,
    )  # fmt: skip
    encoded = cut_prompts(encoded, stage.making.num_tokens, numbers)
    plain = _answer_plain(stage, task, encoded, numbers)
    places = np.flatnonzero(encoded.has_image)
    seen, shown = encoded.take(places), [numbers[place] for place in places]
    orders = _roll_out(stage, seen, methods) if shown else {}
    drawn = random_orders(stage.making.seed, shown, stage.making.num_tokens)
    for method, file, mine in lacking:
        wanted = frozenset(mine)
        report = progress.task(f"{task.name}, {file.path.stem}", len(mine), len(mine))
        lines = dict(plain)
        rows = np.array([row for row, number in enumerate(shown) if number in wanted], np.int64)
        if len(rows):
            row = make_row(method, seen, stage.model.config, stage.policies, orders, drawn)
            lines |= _answer_row(stage, task, seen, row, rows, shown, report)
        append(
            file.part(jax.process_index()),
            [answer_object(file, number, task.questions[number], lines[number]) for number in mine],
        )
        report(len(mine))


def _answer_row(
    stage: Stage,
    task: Task,
    seen: Encoded,
    row: Row,
    rows: np.ndarray,
    numbers: Sequence[int],
    report: Any,
) -> dict[int, AnswerLine]:
    """The lines of one row of the table, by number of the question.

    Args:
        stage: what is answered with.
        task: the benchmark.
        seen: questions with a picture.
        row: of the table.
        rows: [r] which of the questions to answer.
        numbers: of all these questions.
        report: called with the number of questions done at each batch.
    """
    selection = Selection(row.selection.order[rows], row.selection.count[rows])
    found = answer(stage.model, seen.take(rows), selection, _how(stage, task.name), report)
    lines = {}
    for place, at in enumerate(rows.tolist()):
        kept, number = int(selection.count[place]), numbers[at]
        order = selection.order[place, :kept] if number in task.samples else None
        taken = 1000 * float(seen.seconds + row.seconds + found.seconds[place])
        lines[number] = AnswerLine(found.texts[place], kept, taken, order)
    return lines


def _answer_plain(
    stage: Stage, task: Task, encoded: Encoded, numbers: Sequence[int]
) -> dict[int, AnswerLine]:
    """Questions without a picture, which no method answers otherwise than another."""
    rows = np.flatnonzero(~encoded.has_image)
    if not len(rows):
        return {}
    nothing = Selection(np.zeros((len(rows), 1), np.int32), np.zeros(len(rows), np.int32))
    found = answer(stage.model, encoded.take(rows), nothing, _how(stage, task.name))
    return {
        numbers[row]: AnswerLine(text, 0, 1000 * float(taken))
        for row, text, taken in zip(rows.tolist(), found.texts, found.seconds, strict=True)
    }


def _how(stage: Stage, name: str) -> Answering:
    """Sizes and settings of a benchmark's answers."""
    making, settings = stage.making, stage.making.settings
    sizes = {making.num_tokens, *(m.budget for m in stage.methods if m.budget is not None)}
    sizes |= {
        stage.policies[m.policy].config.steps(making.num_tokens)
        for m in stage.methods
        if m.stop_bias is not None
    }
    return Answering(
        tuple(sorted(sizes)), stage.batch_size, settings.longest_answer(BENCHMARKS[name]),
        settings.positions, stage.attention, WIDTHS,
    )  # fmt: skip


def _roll_out(stage: Stage, seen: Encoded, methods: Sequence[Method]) -> dict[str, Ordering]:
    """The order of each policy that these rows need, as long as they need it."""
    orders = {}
    for name in dict.fromkeys(m.policy for m in methods if m.policy is not None):
        policy = stage.policies[name]
        rows = [method for method in stage.methods if method.policy == name]
        if any(method.stop_bias is not None for method in rows):
            steps = policy.config.steps(stage.making.num_tokens)
        else:
            steps = max(stage.making.settings.budgets)
        orders[name] = trained_order(
            stage.model, policy, seen, steps=steps, batch_size=stage.batch_size
        )
    return orders
