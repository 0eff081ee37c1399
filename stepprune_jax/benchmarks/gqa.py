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
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, grade_by_id
from stepprune_jax.benchmarks.percent import mean_percent, percent_by_group
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
    """Reads the balanced questions of an official question file by id, in the order of the file."""
    expected_fields = "isBalanced, question, answer, types, groups.global and semantic"
    questions = {}
    for question_id, record in read_json_object(path).items():
        with layout.refuse_malformed(f"{path}: question {question_id!r}", expected_fields):
            if record["isBalanced"]:
                questions[question_id] = _question(record)
    if not questions:
        raise UserError(f"{path}: expected questions with isBalanced true, got none")
    return questions


def _question(record: JsonObject) -> GqaQuestion:
    """Extracts the fields that the official program reads from a question's JSON object."""
    group = record["groups"]["global"]
    operations = [f"{step['operation']}: {step['argument']}" for step in record["semantic"]]
    counted_operations = [
        operation
        for operation in operations
        if not any(text in operation for text in _UNCOUNTED_OPERATIONS)
    ]
    return GqaQuestion(
        answer=record["answer"],
        structural=str(record["types"]["structural"]),
        semantic=str(record["types"]["semantic"]),
        steps=len(counted_operations),
        words=len(record["question"].split()),
        group=None if group is None else str(group),
    )


def distribution(pairs: Iterable[tuple[str, str, str]]) -> float:
    """Measures how much the distributions of predictions and of correct answers differ.

    For each group of questions, the chi-square statistic is the sum over its correct answers a of
    (p[a] - n[a])^2 / n[a], where p[a] and n[a] are the numbers of predictions and of correct
    answers equal to a. A prediction that is correct for no question of its group has no term.

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
    weighted_sum, num_questions = 0.0, 0
    for group, answer_counts in true_counts.items():
        chi_square = sum(
            (predicted_counts[group][answer] - n) ** 2 / n for answer, n in answer_counts.items()
        )
        weighted_sum += answer_counts.total() * chi_square
        num_questions += answer_counts.total()
    return weighted_sum / num_questions / 100


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
        (questions[question_id], normalize_prediction(answer.text))
        for question_id, answer in answer_of.items()
    ]
    accuracy, parts = _compute_accuracies(predictions)
    return Score(accuracy, parts, warnings)


def _compute_accuracies(
    predictions: list[tuple[GqaQuestion, str]],
) -> tuple[float, JsonObject]:
    """Computes the accuracy over all questions, and the parts of `score`.

    Args:
        predictions: pairs (question, normalized answer).
    """
    graded_questions = [
        (question, prediction == question.answer) for question, prediction in predictions
    ]
    parts: JsonObject = percent_by_group(
        ("open" if question.structural == "query" else "binary", is_correct)
        for question, is_correct in graded_questions
    )
    for name in ("structural", "semantic", "steps", "words"):
        parts[name] = percent_by_group(
            (getattr(question, name), is_correct) for question, is_correct in graded_questions
        )
    parts["questions"] = len(predictions)
    pairs = [
        (question.group, question.answer, prediction)
        for question, prediction in predictions
        if question.group is not None
    ]
    if pairs:
        parts["distribution"] = distribution(pairs)
    return mean_percent(is_correct for _, is_correct in graded_questions), parts


def _questions_path(root: str | Path) -> Path:
    """Returns the path of the official questions of test-dev."""
    return layout.require_file(Path(root) / "gqa" / "data" / QUESTIONS, _SOURCE)


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
