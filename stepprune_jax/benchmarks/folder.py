"""A data folder in LLaVA's format, such as a user's own: exact match of short answers."""

from collections.abc import Callable, Iterator
from pathlib import Path

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import Answer, latest, read_answers
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, mean_percent, worth_by_id
from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.data.json_files import identity, read_json_lines, words
from stepprune_jax.data.llava import read_questions

QUESTIONS = "test.jsonl"
ANSWERS = "test_answers.jsonl"
_SOURCE = "a data folder as described in docs/your-own-data.md"


def is_right(text: str, truth: str) -> bool:
    """Returns whether an answer is correct, ignoring case and surrounding white space."""
    return text.strip().casefold() == truth.strip().casefold()


def _read(path: Path, images: Path) -> Iterator[BenchmarkQuestion]:
    for question in read_questions(path, images):
        yield BenchmarkQuestion(question.question_id, question.text, question.text, question.image)


def _worth(root: Path) -> Callable[[Answer], float | None]:
    return worth_by_id(_read_truths(root), is_right)


def score(root: str | Path, answers: str | Path) -> Score:
    """Scores answers to the test split.

    Args:
        root: data folder; `test.jsonl` and `test_answers.jsonl` are read.
        answers: answer file.

    Returns:
        The headline is the accuracy in percent over all questions; one without an answer is
        wrong. Parts: the accuracy per `category`, the number of `questions` and of those
        `answered`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a malformed file, or no answer to any of the questions.
    """
    truths, warnings = _read_truths(Path(root)), []
    kept = latest(read_answers(answers), truths, warnings)
    right = {name: name in kept and is_right(kept[name].text, truths[name]) for name in truths}
    kinds: dict[str, list[bool]] = {}
    for where, row in read_json_lines(layout.file(Path(root) / QUESTIONS, _SOURCE)):
        name = identity(row, "question_id", where)
        kind = words(row, "category", where) if "category" in row else "default"
        if name not in right:
            raise ValueError(f"{where}: no answer to question {name!r} in {ANSWERS}")
        kinds.setdefault(kind, []).append(right[name])
    parts = {
        "category": {kind: mean_percent(kinds[kind]) for kind in sorted(kinds)},
        "questions": len(truths),
        "answered": len(kept),
    }
    return Score(100 * (sum(right.values()) / len(right)), parts, warnings)


def _read_truths(root: Path) -> dict[str, str]:
    """Reads the correct answers by question."""
    path = layout.file(root / ANSWERS, _SOURCE)
    return {
        identity(row, "question_id", where): words(row, "answer", where)
        for where, row in read_json_lines(path)
    }


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
    worth=_worth,
)
