"""The first stage: a model and questions give answer files.

Questions are processed in chunks. A chunk goes through the tower once, each ranker orders its
tokens once, and every row of the table is answered from that; each row's answers are written before
the next row begins. An interrupted run resumes with the unanswered questions.
"""

import dataclasses
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
    digest,
    outstanding,
)
from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.checkpoints.folder import Source
from stepprune_jax.checkpoints.frozen import model_source
from stepprune_jax.checkpoints.identity import model_identity
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.evaluation.calibrate import Sample, StopBiases, spread
from stepprune_jax.evaluation.encode import (
    WIDTHS,
    Encoded,
    chunk_size,
    cut_prompts,
    encode_questions,
)
from stepprune_jax.evaluation.names import FIRST_STEP
from stepprune_jax.evaluation.progress import Progress
from stepprune_jax.evaluation.rows import (
    Conditions,
    TableRow,
    oracle_rows,
    plan_rows,
    policy_digest,
)
from stepprune_jax.evaluation.settings import (
    DEFAULT,
    POLICY_FILE,
    SHAPES,
    EvalSettings,
    EvaluationRun,
    check_policies,
    load_policies,
    own_policy,
)
from stepprune_jax.evaluation.sources import load_model, split_folders
from stepprune_jax.evaluation.split import read_split, thin
from stepprune_jax.inference.decoding import RunOptions
from stepprune_jax.inference.pipeline import place_method
from stepprune_jax.inference.sets import Answers, Batching, answer_all, rank_all
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel import distributed
from stepprune_jax.parallel.placement import mesh_of, row_count
from stepprune_jax.pruning import Policy, Ranking
from stepprune_jax.pruning.method import NO_PRUNING
from stepprune_jax.user_input import local_path, user_input

_MOST_TOKENS = 1 << 20  # more than any image has


class Benchmark(NamedTuple):
    """One benchmark of a run.

    Attributes:
        name: a name of `BENCHMARKS`.
        questions: all of them.
        sample: questions that stop biases are computed on; None if no row needs them.
        keep_order: whether every line records the kept tokens, not only those of a few samples.
        relevant: patches that the answer to each question depends on; None if unknown.
    """

    name: str
    questions: list[BenchmarkQuestion]
    sample: Sample | None
    keep_order: bool
    relevant: list[tuple[int, ...]] | None = None


class Stage(NamedTuple):
    """Model and settings common to all benchmarks.

    Attributes:
        model: the frozen model.
        conditions: what answers depend on besides row and question.
        batch_size: questions that go through a program together, on all devices.
        execution: how the layers of the model are run.
    """

    model: VLM
    conditions: Conditions
    batch_size: int
    execution: Execution

    @property
    def settings(self) -> EvalSettings:
        """The settings of the evaluation."""
        return self.conditions.settings


class Task(NamedTuple):
    """One benchmark with its rows and files.

    Attributes:
        benchmark: the questions.
        rows: rows of the table.
        files: for each row.
        missing: for each row, the questions without an answer.
        chunks: this process's share of the questions that some row lacks. Each process has the same
            number of chunks; some may be empty.
        samples: questions whose kept tokens are recorded.
    """

    benchmark: Benchmark
    rows: list[TableRow]
    files: list[AnswerFile]
    missing: list[frozenset[int]]
    chunks: list[list[int]]
    samples: frozenset[int]

    @property
    def work(self) -> int:
        """Number of answers that this process generates."""
        mine = list(itertools.chain.from_iterable(self.chunks))
        return sum(number in lacking for number in mine for lacking in self.missing)


def generate_answers(
    run: EvaluationRun, workdir: str | Path, *, policy: str | Path | None = None
) -> dict[str, Path]:
    """Answers the unanswered questions of all benchmarks.

    Args:
        run: the settings of the run.
        workdir: folder of the run; answers go to workdir/answers/BENCHMARK/METHOD.jsonl. Several
            processes must all see it.
        policy: a policy file, or folder of a run, for the default row; otherwise that of the
            working directory, if it has one.

    Returns:
        Folders of answer files by name of the benchmark.

    Raises:
        FileNotFoundError: a policy, the model, questions or images are missing.
        ValueError: bad settings or files, policies that do not fit the model, or answer files of
            another provenance.
    """
    workdir = Path(workdir)
    folder, settings = answers_folder(run, workdir), run.eval
    with user_input():
        policies = read_policies(settings, workdir, policy)
        source = model_source(run)
        check_policies(policies, source.config, settings)
        benchmarks = read_benchmarks(run, workdir, policies)
    return answer_benchmarks(run, benchmarks, policies, source, folder)


def answers_folder(run: EvaluationRun, workdir: Path) -> Path:
    """Returns the folder of a run's answers."""
    return workdir / ANSWERS


def read_benchmarks(
    run: EvaluationRun, workdir: Path, policies: Mapping[str, Policy]
) -> list[Benchmark]:
    """Reads the questions of every benchmark, and those that stop biases are computed on.

    Args:
        run: the settings of the run.
        workdir: folder of the run.
        policies: by row name.

    Returns:
        The benchmarks.

    Raises:
        FileNotFoundError: questions or images are missing.
        ValueError: a malformed file.
    """
    settings = run.eval
    stops = any(stops_itself(name, policy, settings) for name, policy in policies.items())
    asked = {name: public_questions(name, settings) for name in settings.public}
    benchmarks = []
    if SHAPES in settings.benchmark_names:
        places = distributed.main_first(lambda: split_folders(run, workdir))
        benchmarks.append(shapes_benchmark(places, settings, stops))
    if asked:
        sample = None
        if stops:
            sample = Sample({}, spread(asked, settings.validation_questions), decimals=3)
        benchmarks += [Benchmark(name, qs, sample, keep_order=False) for name, qs in asked.items()]
    return benchmarks


def shapes_benchmark(places: Mapping[str, Path], settings: EvalSettings, stops: bool) -> Benchmark:
    """Reads the test split of the shapes world, or of a data folder in its format.

    Args:
        places: folders of the "test" and "validation" splits.
        settings: settings of the evaluation.
        stops: whether a row needs stop biases.

    Returns:
        The benchmark.

    Raises:
        FileNotFoundError: a file or an image is missing.
        ValueError: a malformed file.
    """
    test, sample = read_split(places["test"], "test"), None
    if stops:
        split = read_split(places["validation"], "validation")
        questions = thin(split, settings.validation_questions).questions
        about = digest([f"{q.image.name} {q.text}" for q in questions])
        sample = Sample({"split": "validation", "sample": about}, questions)
    asked = [BenchmarkQuestion(q.question_id, q.text, q.text, q.image) for q in test.questions]
    relevant = test.scenes and [scene.relevant for scene in test.scenes]
    return Benchmark(SHAPES, asked, sample, keep_order=True, relevant=relevant)


def stops_itself(name: str, policy: Policy, settings: EvalSettings) -> bool:
    """Returns whether the learned stop of a row is also evaluated."""
    return name in settings.adaptive and policy.has_stop


def public_questions(name: str, settings: EvalSettings) -> list[BenchmarkQuestion]:
    """Reads a public benchmark's questions."""
    return BENCHMARKS[name].read_questions(
        settings.data, settings.questions.get(name, ""), ocr=settings.textvqa_ocr
    )


def answer_benchmarks(
    run: EvaluationRun,
    benchmarks: Sequence[Benchmark],
    policies: Mapping[str, Policy],
    source: Source,
    folder: Path,
    *,
    untrained: bool = True,
    model: VLM | None = None,
) -> dict[str, Path]:
    """Answers the unanswered questions of benchmarks.

    Args:
        run: the settings of the run.
        benchmarks: result of `read_benchmarks`.
        policies: by row name.
        source: source of the model.
        folder: folder for the answers.
        untrained: whether methods without training have rows.
        model: the model, if already loaded.

    Returns:
        Folders of answer files by name of the benchmark.

    Raises:
        ValueError: answer files of another provenance, or questions that the model cannot take.
    """
    settings = run.eval
    digests = {name: policy_digest(policy) for name, policy in policies.items()}
    conditions = Conditions(
        model=_model_name(source),
        weights=model_identity(source)[:16],
        dtype=run.model.dtype,
        num_tokens=source.config.max_image_tokens,
        seed=run.seed,
        settings=settings,
        policies=digests,
        min_pixels=source.config.min_pixels if source.config.sizes_vary else None,
    )
    stopping = {n: d for n, d in digests.items() if stops_itself(n, policies[n], settings)}
    biases = StopBiases(folder, conditions.weights, stopping, settings.budgets)

    def planned(benchmark: Benchmark, known: Mapping[str, Any]) -> list[TableRow]:
        rows = plan_rows(settings, source.config, policies, known, run.seed, untrained)
        if untrained:
            rows += oracle_rows(settings, benchmark.name, benchmark.relevant, run.seed)
        return rows

    def has_work() -> bool:
        """Returns whether an answer or a stop bias is missing; checks the provenance."""
        missing, claimed = False, []
        for benchmark in benchmarks:
            known = {} if benchmark.sample is None else biases.known(benchmark.sample.about)
            missing |= known.keys() < stopping.keys()
            rows = planned(benchmark, known)
            files = conditions.files(folder, rows, benchmark.name, benchmark.questions)
            for file in files:
                check_claim(file)
            claimed += [(file, benchmark.questions) for file in files]
        return missing or any(outstanding(file, questions) for file, questions in claimed)

    answers = {benchmark.name: folder / benchmark.name for benchmark in benchmarks}
    with user_input():
        # The processes agree, and none writes while another still reads.
        if not distributed.any_process(distributed.main_first(has_work)):
            return answers
        model = load_model(run) if model is None else model
    devices = row_count(mesh_of(model.params))
    size = -(-settings.batch_size // devices) * devices
    stage = Stage(model, conditions, size, run.model.execution)
    tasks = []
    with user_input():
        for benchmark in benchmarks:
            known = {}
            if benchmark.sample is not None:
                known = biases.compute(model, policies, benchmark.sample, stage.execution, size)
            tasks.append(_task(stage, folder, benchmark, planned(benchmark, known)))
    progress = Progress(sum(task.work for task in tasks))
    for task in tasks:
        _answer_task(stage, task, progress)
    progress.close()
    return answers


def read_policies(
    settings: EvalSettings, workdir: Path, policy: str | Path | None = None
) -> dict[str, Policy]:
    """Loads the policies of requested rows; a missing default row is skipped with a message.

    Args:
        settings: the settings.
        workdir: folder of the run, with the default row's policy.
        policy: another policy for the default row, as in `own_policy`.

    Returns:
        Policies by row name.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file that is not a policy, or a first step of a policy without steps.
    """
    wanted = {
        name: {row: path for row, path in getattr(settings, name).items() if settings.wants(row)}
        for name in ("rows", "ablations")
    }
    own = None
    first = settings.wants(FIRST_STEP)
    if settings.wants(DEFAULT) or first:
        needed = policy is not None or settings.methods or SHAPES in settings.benchmark_names
        if needed or (workdir / POLICY_FILE).is_file():
            own = own_policy(workdir, policy)
        else:
            distributed.say(f"no row {DEFAULT!r}: there is no {workdir / POLICY_FILE}")
    policies = load_policies(dataclasses.replace(settings, **wanted), own)
    if first and own is not None:
        policies[FIRST_STEP] = _first_step(policies[DEFAULT])
        if not settings.wants(DEFAULT):
            del policies[DEFAULT]
    return policies


def _first_step(policy: Policy) -> Policy:
    """Returns a policy that takes all its tokens from its first pointer distribution."""
    if policy.pruner.pointer_steps(1) is None:
        raise ValueError(f"the row {FIRST_STEP!r} needs a policy with steps, not {policy.method!r}")
    return policy.replace(config=dataclasses.replace(policy.config, group=_MOST_TOKENS))


def _model_name(source: Source) -> str:
    """Returns the last part of the given folder or hub id; the hub's own folders are hashes."""
    return local_path(source.origins[0]).resolve().name


def _task(stage: Stage, folder: Path, benchmark: Benchmark, rows: list[TableRow]) -> Task:
    """Opens the answer files of a benchmark, and lists missing answers."""
    questions = benchmark.questions
    files = stage.conditions.files(folder, rows, benchmark.name, questions)

    def look() -> list[frozenset[int]]:
        if distributed.is_main():
            for file in files:
                claim(file)
        return [frozenset(outstanding(file, questions)) for file in files]

    missing = distributed.main_first(look)
    distributed.any_process(False)  # none writes while another still reads
    todo = sorted(frozenset().union(*missing))
    chunk = chunk_size(stage.model, stage.batch_size)
    chunks = share(todo, chunk, jax.process_index(), jax.process_count())
    shown = [number for number, question in enumerate(questions) if question.image is not None]
    # Samples are drawn on the common grid of all images.
    samples = 0 if stage.model.config.sizes_vary else stage.settings.samples
    most = len(shown) if benchmark.keep_order else min(samples, len(shown))
    samples = frozenset(shown[number * len(shown) // most] for number in range(most))
    return Task(benchmark, rows, files, missing, chunks, samples)


def share(todo: Sequence[int], size: int, index: int, count: int) -> list[list[int]]:
    """Divides questions among processes, and each process's share into chunks.

    Args:
        todo: numbers of questions.
        size: questions per chunk.
        index: index of this process.
        count: number of processes.

    Returns:
        The chunks of this process, equally many in every process; the last ones may be empty.
    """
    begin, end = (len(todo) * place // count for place in (index, index + 1))
    chunks = math.ceil(math.ceil(len(todo) / count) / size)
    cuts = [min(begin + size * number, end) for number in range(chunks + 1)]
    return [list(todo[first:last]) for first, last in itertools.pairwise(cuts)]


def _answer_task(stage: Stage, task: Task, progress: Progress) -> None:
    """Answers missing questions, chunk by chunk in step with the others; then sorts the lines."""
    for numbers in task.chunks:
        failure = None
        try:
            _answer_chunk(stage, task, numbers, progress)
        except Exception as error:  # the others wait below and must be told
            failure = error
        failed = distributed.any_process(failure is not None)
        if failure is not None:
            raise failure
        if failed:
            raise ValueError("another process of this run failed; its message gives the reason")

    def merge() -> None:
        if distributed.is_main():
            for file in task.files:
                outstanding(file, task.benchmark.questions)

    distributed.main_first(merge)


def _answer_chunk(stage: Stage, task: Task, numbers: list[int], progress: Progress) -> None:
    """Answers some questions in every row that lacks them."""
    questions = task.benchmark.questions
    lacking = [
        (row, file, [number for number in numbers if number in missing])
        for row, file, missing in zip(task.rows, task.files, task.missing, strict=True)
    ]
    lacking = [(row, file, mine) for row, file, mine in lacking if mine]
    if not lacking:
        return
    rows, config = [row for row, _, _ in lacking], stage.model.config
    taps = [tap for row in rows for tap in row.method.pruner.taps(config)]
    encoded = encode_questions(
        stage.model,
        [questions[number] for number in numbers],
        batch_size=stage.batch_size,
        taps=taps,
        execution=stage.execution,
        numbers=numbers,
    )
    encoded = cut_prompts(encoded, config.family.CONTEXT_LIMIT)
    plain = _answer_plain(stage, task, encoded)
    seen = encoded.take(np.flatnonzero(encoded.prompts.has_image))
    rankings = _rank(stage, task, seen, rows)
    for row, file, mine in lacking:
        report = progress.task(f"{task.benchmark.name}, {file.path.stem}", len(mine))
        wanted = np.flatnonzero(np.isin(seen.prompts.number, mine))
        lines = plain | _answer_row(stage, task, seen.take(wanted), row, rankings, wanted, report)
        append(
            file.part(jax.process_index()),
            [answer_object(file, number, questions[number], lines[number]) for number in mine],
        )
        report(len(mine))


def _rank(
    stage: Stage, task: Task, seen: Encoded, rows: Sequence[TableRow]
) -> dict[Any, tuple[Ranking, float]]:
    """Computes one ranking for all rows that share it, if any row of the task needs it."""
    rankings, n = {}, stage.conditions.num_tokens
    for row in rows:
        key = row.ranking
        if key is None or key in rankings or not len(seen.prompts.number):
            continue
        steps = max(other.steps(n) for other in task.rows if other.ranking == key)
        rankings[key] = rank_all(
            stage.model,
            place_method(stage.model, row.method),
            seen.prompts,
            seen.images,
            steps=steps,
            batch_size=stage.batch_size,
        )
    return rankings


def _answer_row(
    stage: Stage,
    task: Task,
    seen: Encoded,
    row: TableRow,
    rankings: Mapping[Any, tuple[Ranking, float]],
    places: np.ndarray,
    report: Any,
) -> dict[int, AnswerLine]:
    """Answers one row of the table; returns the lines by number of the question."""
    if not len(places):
        return {}
    ranking, ranked = rankings.get(row.ranking, (None, 0.0))
    if ranking is not None:
        ranking = jax.tree.map(lambda part: part[places], ranking)
    answers = _answer(stage, task, row.method, seen, ranking, report)
    lines = {}
    for at, number in enumerate(seen.prompts.number.tolist()):
        keep = number in task.samples and row.budget.kind != "all"
        order = answers.order[at] if keep else None
        taken = 1000 * float(seen.seconds + ranked + answers.seconds[at])
        lines[number] = AnswerLine(answers.texts[at], int(answers.kept[at]), taken, order)
    return lines


def _answer_plain(stage: Stage, task: Task, encoded: Encoded) -> dict[int, AnswerLine]:
    """Answers questions without an image, for which all methods agree."""
    rows = np.flatnonzero(~encoded.prompts.has_image)
    if not len(rows):
        return {}
    some = encoded.take(rows)
    answers = _answer(stage, task, NO_PRUNING, some, None, lambda done: None)
    pairs = zip(some.prompts.number.tolist(), answers.texts, answers.seconds, strict=True)
    return {number: AnswerLine(text, 0, 1000 * float(taken)) for number, text, taken in pairs}


def _answer(
    stage: Stage, task: Task, method: Any, seen: Encoded, ranking: Ranking | None, report: Any
) -> Answers:
    """Answers questions by one method."""
    settings, name = stage.settings, task.benchmark.name
    n, sizes = stage.conditions.num_tokens, None
    if not stage.model.config.sizes_vary:  # otherwise kept tokens are padded to a ladder
        sizes = tuple(sorted({row.steps(n) for row in task.rows} | {n}))
    longest = settings.longest_answer(BENCHMARKS[name])
    options = RunOptions(settings.positions, stage.execution, max_tokens=longest)
    return answer_all(
        stage.model,
        place_method(stage.model, method),
        seen.prompts,
        seen.images,
        options,
        Batching(stage.batch_size, sizes, WIDTHS),
        ranking=ranking,
        report=report,
    )
