"""GQA, test-dev balanced: exact match, as the official program counts it.

Hudson and Manning, "GQA" (CVPR 2019). The official program's validity, plausibility and grounding
need files that were never published for test-dev, and its consistency needs answers to the
unbalanced questions: none of the four is reported.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import GivenAnswer, latest, read_answers, require_all
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, mean_percent, worth_by_id
from stepprune_jax.data.json_files import JsonObject, read_json_object
from stepprune_jax.user_input import UserError

QUESTIONS = "testdev_balanced_questions.json"
NUM_QUESTIONS = 12_578
_SOURCE = "questions1.2.zip at https://cs.stanford.edu/people/dorarad/gqa/download.html"

# Operations that the official program does not count as steps of reasoning.
_NO_STEP = ("exist", "query: name", "choose name")


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


def predicted(text: str) -> str:
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
    """Extracts the relevant fields of a record."""
    group = record["groups"]["global"]
    operations = (f"{each['operation']}: {each['argument']}" for each in record["semantic"])
    return GqaQuestion(
        answer=record["answer"],
        structural=str(record["types"]["structural"]),
        semantic=str(record["types"]["semantic"]),
        steps=sum(not any(part in each for part in _NO_STEP) for each in operations),
        words=len(record["question"].split()),
        group=None if group is None else str(group),
    )


def distribution(pairs: Iterable[tuple[str, str, str]]) -> float:
    """Measures how much the distribution of answers in each group differs from the correct one.

    Computes, for each group, the chi-square statistic of the predicted counts against the counts
    of the correct answers. Returns the mean over groups, weighted by their numbers of questions,
    divided by 100. A prediction that is correct for no question of its group does not count. Lower
    is better.

    Args:
        pairs: (group, correct answer, prediction) of each question that has a group.
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

    The headline is the accuracy in percent. Parts: `binary` and `open` accuracy; accuracy per
    `structural` type, `semantic` type, number of `steps` and of `words`; `distribution`, as there;
    the number of `questions` scored. The official program refuses a file with unanswered questions;
    `missing="leave-out"` scores the answered questions.
    """
    questions = read_questions(_questions_path(root))
    warnings = layout.size_warnings(
        f"{QUESTIONS}, balanced questions", len(questions), NUM_QUESTIONS
    )
    kept = latest(read_answers(answers), questions, warnings)
    if missing == "refuse":
        require_all(answers, questions, kept)
    scored = [(questions[name], predicted(answer.text)) for name, answer in kept.items()]
    accuracy, parts = _accuracies(scored)
    return Score(accuracy, parts, warnings)


def _accuracies(scored: list[tuple[GqaQuestion, str]]) -> tuple[float, JsonObject]:
    """Computes accuracy over all questions, and over each kind of them."""
    kinds: dict[str, dict[str | int, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for question, prediction in scored:
        is_correct = prediction == question.answer
        kinds["kind"]["open" if question.structural == "query" else "binary"].append(is_correct)
        for kind in ("structural", "semantic", "steps", "words"):
            kinds[kind][getattr(question, kind)].append(is_correct)
    tables = {
        kind: {str(name): mean_percent(rights) for name, rights in sorted(table.items())}
        for kind, table in kinds.items()
    }
    parts = {**tables.pop("kind"), **tables, "questions": len(scored)}
    pairs = [(q.group, q.answer, prediction) for q, prediction in scored if q.group is not None]
    if pairs:
        parts["distribution"] = distribution(pairs)
    return mean_percent([prediction == question.answer for question, prediction in scored]), parts


def _questions_path(root: str | Path) -> Path:
    """Returns the path of the official questions of test-dev."""
    return layout.file(Path(root) / "gqa" / "data" / QUESTIONS, _SOURCE)


def _worth(root: Path) -> Callable[[GivenAnswer], float | None]:
    """Grades an answer as right or wrong; see `Benchmark.worth`."""
    questions = read_questions(_questions_path(root))
    return worth_by_id(questions, lambda text, question: predicted(text) == question.answer)


def convert(root: str | Path, answers: str | Path, out: str | Path) -> list[str]:
    """Writes the file that the official program reads: `questionId` and `prediction` per line."""
    lines = [
        {"questionId": answer.id, "prediction": predicted(answer.text)}
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
    worth=_worth,
    convert=convert,
)
