"""Benchmark of a user's data folder in LLaVA's format: exact match of short answers."""

from collections.abc import Callable, Iterator
from pathlib import Path

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import GivenAnswer, latest_answers, read_answers
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, grade_by_id, mean_percent
from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.data.json_files import Record, identity, read_json_lines, words
from stepprune_jax.data.llava import read_questions
from stepprune_jax.user_input import UserError, require

QUESTIONS = "test.jsonl"
ANSWERS = "test_answers.jsonl"
_SOURCE = "a data folder as described in docs/your-own-data.md"


def is_right(text: str, truth: str) -> bool:
    """Returns whether an answer is correct, ignoring case and surrounding white space."""
    return text.strip().casefold() == truth.strip().casefold()


def _read(path: Path, images: Path) -> Iterator[BenchmarkQuestion]:
    """Reads the questions of a split; see `Benchmark.read`."""
    for question in read_questions(path, images):
        yield BenchmarkQuestion(question.question_id, question.text, question.text, question.image)


def _make_grader(root: Path) -> Callable[[GivenAnswer], float | None]:
    """Grades an answer as right or wrong; see `Benchmark.make_grader`."""
    return grade_by_id(_read_truths(root), is_right)


def score(root: str | Path, answers: str | Path) -> Score:
    """Scores answers to the test split.

    Args:
        root: data folder; `test.jsonl` and `test_answers.jsonl` are read.
        answers: answer file.

    Returns:
        The headline is the accuracy in percent over all questions. An unanswered question is
        wrong. Parts: the accuracy per `category`, the number of `questions`, and the number
        `answered`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a malformed file, or no answer to any of the questions.
    """
    questions, truths, warnings = _by_id(Path(root) / QUESTIONS), _read_truths(Path(root)), []
    kinds: dict[str, list[str]] = {}
    for name, (place, row) in questions.items():
        kind = words(row, "category", place) if "category" in row else "default"
        require(name in truths, f"{place}: no answer to question {name!r} in {ANSWERS}")
        kinds.setdefault(kind, []).append(name)
    if num_unmatched := len(truths.keys() - questions.keys()):
        warnings.append(f"{num_unmatched:,} answers of {ANSWERS} are to no question of {QUESTIONS}")
    answer_of = latest_answers(read_answers(answers), questions, warnings)
    is_correct = {
        name: name in answer_of and is_right(answer_of[name].text, truths[name])
        for name in questions
    }
    parts = {
        "category": {
            kind: mean_percent(is_correct[name] for name in kinds[kind]) for kind in sorted(kinds)
        },
        "questions": len(questions),
        "answered": len(answer_of),
    }
    return Score(100 * (sum(is_correct.values()) / len(is_correct)), parts, warnings)


def _by_id(path: Path) -> dict[str, Record]:
    """Reads the objects of a file by question id; a repeated id is an error."""
    records: dict[str, Record] = {}
    for record in read_json_lines(layout.file(path, _SOURCE)):
        name = identity(record.value, "question_id", record.place)
        if name in records:
            place = f"was already given at {records[name].place}"
            raise UserError(f'{record.place}: "question_id" {name!r} {place}')
        records[name] = record
    return records


def _read_truths(root: Path) -> dict[str, str]:
    """Reads the correct answers by question id."""
    records = _by_id(root / ANSWERS).items()
    return {name: words(row, "answer", place) for name, (place, row) in records}


BENCHMARK = Benchmark(
    name="folder",
    title="folder",
    headline="accuracy in percent",
    column="accuracy",
    decimals=2,
    question_files=(QUESTIONS,),
    question_source=_SOURCE,
    read=_read,
    images="images",
    calibration="validation.jsonl",
    keep_order=True,
    max_new_tokens=3,
    score=score,
    make_grader=_make_grader,
)
