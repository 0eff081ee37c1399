"""GQA, test-dev balanced: exact match as in the official program.

Hudson and Manning, "GQA" (CVPR 2019). Four figures of the official program are not reported:
validity, plausibility and grounding need files that were never published for test-dev, and
consistency needs answers to the unbalanced questions.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import GivenAnswer, latest_answers, read_answers, require_all
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, grade_by_id, mean_percent
from stepprune_jax.data.json_files import JsonObject, read_json_object
from stepprune_jax.user_input import UserError

QUESTIONS = "testdev_balanced_questions.json"
NUM_QUESTIONS = 12_578
_SOURCE = "questions1.2.zip at https://cs.stanford.edu/people/dorarad/gqa/download.html"

# Operations that the official program does not count as steps of reasoning.
_UNCOUNTED_OPERATIONS = ("exist", "query: name", "choose name")


class GqaQuestion(NamedTuple):
    """Fields of a question that the official program reads.

    Attributes:
        answer: the correct answer.
        structural: structural type; "query" for open questions.
        semantic: semantic type.
        steps: number of operations of the question's program, without naming and existence.
        words: number of words of the question.
        group: group of questions whose answers are compared by `distribution`; None without one.
    """

    answer: str
    structural: str
    semantic: str
    steps: int
    words: int
    group: str | None


def normalize_prediction(text: str) -> str:
    """Normalizes an answer: strips full stops at its end and converts to lower case."""
    return text.rstrip(".").lower()


def read_questions(path: Path) -> dict[str, GqaQuestion]:
    """Reads the balanced questions of an official question file by id, in its order."""
    fields = "isBalanced, question, answer, types, groups.global and semantic"
    questions = {}
    for name, record in read_json_object(path).items():
        with layout.expected(f"{path}: question {name!r}", fields):
            if record["isBalanced"]:
                questions[name] = _question(record)
    if not questions:
        raise UserError(f"{path}: expected questions with isBalanced true, got none")
    return questions


def _question(record: JsonObject) -> GqaQuestion:
    """Extracts the fields that the official program reads from a record."""
    group = record["groups"]["global"]
    operations = [f"{part['operation']}: {part['argument']}" for part in record["semantic"]]
    return GqaQuestion(
        answer=record["answer"],
        structural=str(record["types"]["structural"]),
        semantic=str(record["types"]["semantic"]),
        steps=sum(
            not any(text in operation for text in _UNCOUNTED_OPERATIONS) for operation in operations
        ),
        words=len(record["question"].split()),
        group=None if group is None else str(group),
    )


def distribution(pairs: Iterable[tuple[str, str, str]]) -> float:
    """Measures how much the distributions of predictions and of correct answers differ.

    For each group, the chi-square statistic compares the counts of predictions with the counts of
    correct answers. A prediction that is correct for no question of its group does not count.

    Args:
        pairs: (group, correct answer, prediction) of each question that has a group.

    Returns:
        The mean of the statistic over groups, weighted by their numbers of questions, divided by
        100. Lower is better.
    """
    true_counts, predicted_counts = defaultdict(Counter), defaultdict(Counter)
    for group, answer, prediction in pairs:
        true_counts[group][answer] += 1
        predicted_counts[group][prediction] += 1
    weighted = sum(
        counts.total() * sum((predicted_counts[group][a] - n) ** 2 / n for a, n in counts.items())
        for group, counts in true_counts.items()
    )
    return weighted / sum(counts.total() for counts in true_counts.values()) / 100


def score(root: str | Path, answers: str | Path, *, missing: str = "refuse") -> Score:
    """Scores answers to the balanced test-dev questions.

    Args:
        root: folder of LLaVA's layout.
        answers: the answer file.
        missing: "refuse" raises an error for unanswered questions, as the official program does.
            "leave-out" scores the answered questions.

    Returns:
        The headline is the accuracy in percent. Parts: accuracy of `binary` and `open` questions;
        accuracy per `structural` type, `semantic` type, number of `steps` and of `words`; the
        result of `distribution`; and the number of scored `questions`.
    """
    questions = read_questions(_questions_path(root))
    warnings = layout.size_warnings(
        f"{QUESTIONS}, balanced questions", len(questions), NUM_QUESTIONS
    )
    answer_of = latest_answers(read_answers(answers), questions, warnings)
    if missing == "refuse":
        require_all(answers, questions, answer_of)
    predictions = [
        (questions[name], normalize_prediction(answer.text)) for name, answer in answer_of.items()
    ]
    accuracy, parts = _accuracies(predictions)
    return Score(accuracy, parts, warnings)


def _accuracies(predictions: list[tuple[GqaQuestion, str]]) -> tuple[float, JsonObject]:
    """Returns the accuracy over all questions, and the parts of `score`."""
    grades: dict[str, dict[str | int, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for question, prediction in predictions:
        is_correct = prediction == question.answer
        grades["kind"]["open" if question.structural == "query" else "binary"].append(is_correct)
        for kind in ("structural", "semantic", "steps", "words"):
            grades[kind][getattr(question, kind)].append(is_correct)
    tables = {
        kind: {str(name): mean_percent(values) for name, values in sorted(table.items())}
        for kind, table in grades.items()
    }
    parts = {**tables.pop("kind"), **tables, "questions": len(predictions)}
    pairs = [(q.group, q.answer, text) for q, text in predictions if q.group is not None]
    if pairs:
        parts["distribution"] = distribution(pairs)
    return mean_percent([text == question.answer for question, text in predictions]), parts


def _questions_path(root: str | Path) -> Path:
    """Returns the path of the official questions of test-dev."""
    return layout.file(Path(root) / "gqa" / "data" / QUESTIONS, _SOURCE)


def _make_grader(root: Path) -> Callable[[GivenAnswer], float | None]:
    """Grades an answer as right or wrong; see `Benchmark.make_grader`."""
    questions = read_questions(_questions_path(root))
    return grade_by_id(
        questions, lambda text, question: normalize_prediction(text) == question.answer
    )


def convert(root: str | Path, answers: str | Path, out: str | Path) -> list[str]:
    """Writes the file that the official program reads, with `questionId` and `prediction`."""
    lines = [
        {"questionId": answer.id, "prediction": normalize_prediction(answer.text)}
        for answer in read_answers(answers)
    ]
    layout.write_submission(out, json.dumps(lines).encode())
    return []


BENCHMARK = Benchmark(
    name="gqa",
    title="GQA",
    headline="accuracy in percent, test-dev balanced",
    question_files=("gqa/llava_gqa_testdev_balanced.jsonl",),
    images="gqa/data/images",
    image_source="images.zip at https://cs.stanford.edu/people/dorarad/gqa/download.html",
    max_new_tokens=128,
    score=score,
    options={"missing": ("refuse", "leave-out")},
    make_grader=_make_grader,
    convert=convert,
)
