"""Benchmark of a user's data folder in LLaVA's format: exact match of short answers."""

from collections.abc import Callable, Iterator
from pathlib import Path

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import GivenAnswer, latest_answers, read_answers
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, grade_by_id
from stepprune_jax.benchmarks.percent import percent_by_group
from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.data.json_files import Record, identity, read_json_lines, words
from stepprune_jax.data.llava import read_questions
from stepprune_jax.user_input import UserError

QUESTIONS = "test.jsonl"
ANSWERS = "test_answers.jsonl"
_SOURCE = "a data folder as described in docs/your-own-data.md"


def is_right(text: str, truth: str) -> bool:
    """Returns whether an answer is correct, ignoring case and surrounding white space."""
    return text.strip().casefold() == truth.strip().casefold()


def _read_split(path: Path, images: Path) -> Iterator[BenchmarkQuestion]:
    """Reads the questions of a split; see `Benchmark.read`."""
    for question in read_questions(path, images):
        text = question.text
        yield BenchmarkQuestion(
            question.question_id, text, text, question.image, video=question.video
        )


def _make_grader(root: Path) -> Callable[[GivenAnswer], float | None]:
    """Grades an answer as right or wrong; see `Benchmark.make_grader`."""
    return grade_by_id(_read_truths(root), is_right)


def check_answers(root: str | Path) -> None:
    """Checks that each test question has a correct answer, before a model answers the questions.

    Args:
        root: data folder; `test.jsonl` and `test_answers.jsonl` are read.

    Raises:
        FileNotFoundError: a file is missing.
        UserError: a file is malformed, or a question has no correct answer.
    """
    truths = _read_truths(Path(root))
    missing_ids = [name for name in _records_by_id(Path(root) / QUESTIONS) if name not in truths]
    if missing_ids:
        names = ", ".join(map(repr, missing_ids[:3]))
        more = f" and {len(missing_ids) - 3} more" if len(missing_ids) > 3 else ""
        raise UserError(f"{Path(root) / ANSWERS}: no answer to question {names}{more}")


def score(root: str | Path, answers: str | Path) -> Score:
    """Scores answers to the test split.

    Args:
        root: data folder; `test.jsonl` and `test_answers.jsonl` are read.
        answers: the answer file.

    Returns:
        The headline is the accuracy in percent over all questions. An unanswered question is
        wrong. Parts: the accuracy per `category`, the number of `questions`, and the number
        `answered`.

    Raises:
        FileNotFoundError: a file is missing.
        UserError: a file is malformed, a question has no correct answer, or none of the questions
            is answered.
    """
    questions, truths = _records_by_id(Path(root) / QUESTIONS), _read_truths(Path(root))
    categories: dict[str, str] = {}
    for question_id, (place, record) in questions.items():
        has_category = "category" in record
        categories[question_id] = words(record, "category", place) if has_category else "default"
        if question_id not in truths:
            raise UserError(f"{place}: no answer to question {question_id!r} in {ANSWERS}")
    warnings = []
    if num_unmatched := len(truths.keys() - questions.keys()):
        warnings.append(f"{num_unmatched:,} answers of {ANSWERS} are to no question of {QUESTIONS}")
    answer_of = latest_answers(read_answers(answers), questions, warnings)
    is_correct = {
        question_id: question_id in answer_of
        and is_right(answer_of[question_id].text, truths[question_id])
        for question_id in questions
    }
    parts = {
        "category": percent_by_group((categories[name], is_correct[name]) for name in questions),
        "questions": len(questions),
        "answered": len(answer_of),
    }
    return Score(100 * (sum(is_correct.values()) / len(is_correct)), parts, warnings)


def _records_by_id(path: Path) -> dict[str, Record]:
    """Reads the objects of a JSON Lines file by question id.

    Raises:
        UserError: two objects have the same id.
    """
    records: dict[str, Record] = {}
    for record in read_json_lines(layout.require_file(path, _SOURCE)):
        question_id = identity(record.value, "question_id", record.place)
        if question_id in records:
            raise UserError(
                f'{record.place}: "question_id" {question_id!r} was already given at '
                f"{records[question_id].place}"
            )
        records[question_id] = record
    return records


def _read_truths(root: Path) -> dict[str, str]:
    """Reads the correct answers by question id."""
    records = _records_by_id(root / ANSWERS)
    return {name: words(value, "answer", place) for name, (place, value) in records.items()}


BENCHMARK = Benchmark(
    name="folder",
    title="folder",
    headline="accuracy in percent",
    column="accuracy",
    decimals=2,
    question_files=(QUESTIONS,),
    question_source=_SOURCE,
    read=_read_split,
    images="images",
    calibration="validation.jsonl",
    keep_order=True,
    max_new_tokens=3,
    score=score,
    make_grader=_make_grader,
)
