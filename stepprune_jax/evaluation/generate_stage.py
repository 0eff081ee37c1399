"""The first stage on the public benchmarks: a model and question files give answer files.

Questions are taken in chunks. A chunk goes through the tower once, each policy is rolled out on it
once, and every row of the table is answered from that; each row's answers are on the disk before
the next row begins.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from stepprune_jax import distributed
from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.checkpoints.policy import Policy
from stepprune_jax.data.prompts import CONTEXT_LIMIT
from stepprune_jax.evaluation.answer_files import (
    FOLDER,
    AnswerFile,
    Card,
    Line,
    append,
    as_object,
    claim,
    outstanding,
    questions_digest,
)
from stepprune_jax.evaluation.answers import Answering, Selection, answer
from stepprune_jax.evaluation.benchmarks import BENCHMARKS
from stepprune_jax.evaluation.benchmarks.questions import Asked, read_questions
from stepprune_jax.evaluation.methods import (
    Method,
    make_row,
    plan,
    policy_digest,
    random_orders,
)
from stepprune_jax.evaluation.orders import Ordering, trained_order
from stepprune_jax.evaluation.progress import Progress
from stepprune_jax.evaluation.rows import CLS, RANDOM, Row
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
from stepprune_jax.evaluation.stop_biases import find_biases
from stepprune_jax.policy import bucket_ladder
from stepprune_jax.training.checkpoints import model_identity
from stepprune_jax.training.settings import model_folders
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
        settings: of the evaluation.
        seed: of the random rows.
        attention: "matmul", "xla" or "cudnn".
        made: what answers depend on besides their row, for their cards.
    """

    model: VLM
    policies: Mapping[str, Policy]
    methods: Sequence[Method]
    settings: Settings
    seed: int
    attention: str
    made: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.model.config.num_image_tokens


class Task(NamedTuple):
    """One benchmark.

    Attributes:
        name: of the benchmark.
        questions: all of them.
        files: for each row of the table.
        missing: for each row, the questions without an answer.
        samples: questions whose selections are kept for pictures.
    """

    name: str
    questions: list[Asked]
    files: list[AnswerFile]
    missing: list[list[int]]
    samples: frozenset[int]


def generate_answers(
    config: Any, workdir: str | Path, *, policy: str | Path | None = None
) -> dict[str, Path]:
    """Answers the questions of the public benchmarks that have no answer yet.

    Args:
        config: the run's `ConfigDict`; for the group `eval` see `settings.Settings`.
        workdir: folder of the run; answers go to workdir/answers/BENCHMARK/METHOD.jsonl.
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
    with user_input():
        settings = read_settings(config)
        own = None
        if policy is not None or (workdir / POLICY_FILE).is_file():
            own = own_policy(workdir, policy)
        policies = load_policies(settings, own)
        asked = {name: questions_of(name, settings) for name in settings.public}
        source = inspect_folder(*model_folders(config))
        weights = model_identity(source)[:16]
        check_policies(policies, source.config, settings)
        model = load_model(config)
    wanted = {name: found for name, found in policies.items() if settings.wants(name)}
    made = {"weights": weights, "dtype": config.model.dtype, "positions": settings.positions}
    biases = find_biases(
        workdir / FOLDER, model, wanted, asked, settings, weights=weights,
        attention=config.model.attention, sizes=WIDTHS,
    )  # fmt: skip
    methods = plan(settings, wanted, biases)
    stage = Stage(model, wanted, methods, settings, config.seed, config.model.attention, made)
    with user_input():
        tasks = [_task(stage, workdir / FOLDER, name, asked[name]) for name in asked]
    progress = Progress(sum(len(missing) for task in tasks for missing in task.missing))
    for task in tasks:
        _answer_task(stage, task, progress)
    progress.close()
    return {name: workdir / FOLDER / name for name in asked}


def questions_of(name: str, settings: Settings) -> list[Asked]:
    """Reads a benchmark's questions."""
    return read_questions(
        BENCHMARKS[name], settings.data, settings.questions.get(name, ""),
        ocr=settings.textvqa_ocr,
    )  # fmt: skip


def _task(stage: Stage, folder: Path, name: str, questions: list[Asked]) -> Task:
    """Takes the answer files of a benchmark, and finds out what is missing."""
    files = [
        AnswerFile.of(folder, _card(stage, method, name, questions)) for method in stage.methods
    ]

    def look() -> list[list[int]]:
        if distributed.is_main():
            for file in files:
                claim(file)
        return [outstanding(file, questions) for file in files]

    missing = distributed.main_first(look)
    distributed.any_process(False)  # nobody writes while another still reads
    shown = [number for number, question in enumerate(questions) if question.image is not None]
    most = min(stage.settings.samples, len(shown))
    samples = frozenset(shown[number * len(shown) // most] for number in range(most))
    return Task(name, questions, files, missing, samples)


def _card(stage: Stage, method: Method, name: str, questions: list[Asked]) -> Card:
    """All that the answers of a row depend on."""
    made = dict(stage.made)
    made["max_new_tokens"] = stage.settings.longest_answer(BENCHMARKS[name])
    if method.policy is not None:
        made["policy"] = policy_digest(stage.policies[method.policy])
    if method.name == RANDOM:
        made["seed"] = stage.seed
    return Card(
        benchmark=name, questions=questions_digest(questions), asked=len(questions),
        method=method.name, mode=method.mode, pruning_rate=method.pruning_rate(stage.num_tokens),
        num_tokens=stage.num_tokens, stop_bias=method.stop_bias, model=stage.model.folder.name,
        made=made,
    )  # fmt: skip


def _answer_task(stage: Stage, task: Task, progress: Progress) -> None:
    """Answers what is missing; each process its share, chunk by chunk in step with the others."""
    todo = sorted(set().union(*task.missing))
    size = max(1, CHUNK // stage.settings.batch_size) * stage.settings.batch_size
    together = size * jax.process_count()
    for first in range(0, len(todo), together):
        begin = first + size * jax.process_index()
        failure = None
        try:
            _answer_chunk(stage, task, todo[begin : begin + size], progress)
        except Exception as error:  # the others wait below, and must not do so in vain
            failure = error
        failed = distributed.any_process(failure is not None)
        if failure is not None:
            raise failure
        if failed:
            raise ValueError("another process of this run failed and says why")
    if jax.process_count() > 1:
        distributed.main_first(
            lambda: (
                [outstanding(file, task.questions) for file in task.files]
                if distributed.is_main()
                else None
            )
        )


def _answer_chunk(stage: Stage, task: Task, numbers: list[int], progress: Progress) -> None:
    """Answers some questions in every row that lacks them."""
    if not numbers:
        return
    settings, questions = stage.settings, [task.questions[number] for number in numbers]
    encoded = encode_split(
        stage.model, questions, batch_size=settings.batch_size,
        with_attention=any(method.name == CLS for method in stage.methods),
        attention=stage.attention, sizes=WIDTHS,
    )  # fmt: skip
    encoded = _cut(encoded, stage.num_tokens, numbers)
    shown, where = encoded.has_image, {number: row for row, number in enumerate(numbers)}
    orders = _roll_out(stage, encoded) if shown.any() else {}
    drawn = random_orders(stage.seed, numbers, stage.num_tokens)
    plain = _answer_plain(stage, task, encoded)
    for method, file, missing in zip(stage.methods, task.files, task.missing, strict=True):
        rows = np.array([where[number] for number in missing if number in where], np.int64)
        if not len(rows):
            continue
        report = progress.task(f"{task.name}, {file.path.stem}", len(rows), len(rows))
        lines = {row: plain[row] for row in rows.tolist() if not shown[row]}
        asked = rows[shown[rows]]
        if len(asked):
            row = make_row(method, encoded, stage.model.config, stage.policies, orders, drawn)
            lines |= _answer_row(stage, task, encoded, row, asked, numbers, report)
        append(
            file.part(jax.process_index()),
            [as_object(file, numbers[r], questions[r], lines[r]) for r in rows.tolist()],
        )
        report(len(rows))


def _answer_row(
    stage: Stage,
    task: Task,
    encoded: Encoded,
    row: Row,
    asked: np.ndarray,
    numbers: Sequence[int],
    report: Any,
) -> dict[int, Line]:
    """The lines of one row of the table, by row of the chunk."""
    selection = Selection(row.selection.order[asked], row.selection.count[asked])
    found = answer(stage.model, encoded.take(asked), selection, _how(stage, task.name), report)
    before = encoded.seconds + row.seconds
    lines = {}
    for place, at in enumerate(asked.tolist()):
        kept = int(selection.count[place])
        order = selection.order[place, :kept] if numbers[at] in task.samples else None
        taken = 1000 * float(before + found.seconds[place])
        lines[at] = Line(found.texts[place], kept, taken, order)
    return lines


def _answer_plain(stage: Stage, task: Task, encoded: Encoded) -> dict[int, Line]:
    """Questions without a picture, which no method answers otherwise than another."""
    rows = np.flatnonzero(~encoded.has_image)
    if not len(rows):
        return {}
    nothing = Selection(np.zeros((len(rows), 1), np.int32), np.zeros(len(rows), np.int32))
    found = answer(stage.model, encoded.take(rows), nothing, _how(stage, task.name))
    return {
        row: Line(text, 0, 1000 * float(taken))
        for row, text, taken in zip(rows.tolist(), found.texts, found.seconds, strict=True)
    }


def _how(stage: Stage, name: str) -> Answering:
    """Sizes and settings of a benchmark's answers."""
    settings = stage.settings
    sizes = {stage.num_tokens, *(m.budget for m in stage.methods if m.budget is not None)}
    sizes |= {
        stage.policies[m.policy].config.steps(stage.num_tokens)
        for m in stage.methods
        if m.stop_bias is not None
    }
    return Answering(
        tuple(sorted(sizes)), settings.batch_size, settings.longest_answer(BENCHMARKS[name]),
        settings.positions, stage.attention, WIDTHS,
    )  # fmt: skip


def _roll_out(stage: Stage, encoded: Encoded) -> dict[str, Ordering]:
    """The order of each policy, as long as its rows need."""
    orders = {}
    for name, policy in stage.policies.items():
        rows = [method for method in stage.methods if method.policy == name]
        if any(method.stop_bias is not None for method in rows):
            steps = policy.config.steps(stage.num_tokens)
        else:
            steps = max(stage.settings.budgets)
        orders[name] = trained_order(
            stage.model, policy, encoded, steps=steps, batch_size=stage.settings.batch_size
        )
    return orders


def _cut(encoded: Encoded, num_tokens: int, numbers: Sequence[int]) -> Encoded:
    """Cuts prompts at the right end that are too long with all visual tokens, as LLaVA does."""
    most = CONTEXT_LIMIT - np.where(encoded.has_image, num_tokens - 1, 0)
    long = np.flatnonzero(encoded.length > most)
    if len(long):
        warnings.warn(
            f"question {numbers[int(long[0])]} and {len(long) - 1} more take more than "
            f"{CONTEXT_LIMIT} embeddings: the ends of their prompts were cut",
            stacklevel=2,
        )
    return encoded._replace(length=np.minimum(encoded.length, most).astype(np.int32))
