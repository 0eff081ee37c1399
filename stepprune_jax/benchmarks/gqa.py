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

    `structural` is "query" for open questions; `steps` are the operations of its program, except
    those of naming and of existence; answers are distributed within a global `group`, or None.
    """

    answer: str
    structural: str
    semantic: str
    steps: int
    words: int
    group: str | None


def predicted(text: str) -> str:
    """Normalises an answer: no full stops at its end, lower case, otherwise unchanged."""
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

    For each group, the chi-square statistic of the predicted counts of the right answers against
    their true counts; the mean over groups, weighted by questions; divided by 100. Answers that
    are right to no question of the group do not count. Lower is better. The pairs are the global
    group, the right answer and the prediction of each question that has a group.
    """
    right, said = defaultdict(Counter), defaultdict(Counter)
    for group, answer, prediction in pairs:
        right[group][answer] += 1
        said[group][prediction] += 1
    weighted = sum(
        counts.total() * sum((said[group][a] - n) ** 2 / n for a, n in counts.items())
        for group, counts in right.items()
    )
    return weighted / sum(counts.total() for counts in right.values()) / 100


def score(root: str | Path, answers: str | Path, *, missing: str = "refuse") -> Score:
    """Scores answers to the balanced test-dev questions.

    The headline is the accuracy in percent. Parts: `binary` and `open` accuracy; accuracy per
    `structural` type, `semantic` type, number of `steps` and of `words`; `distribution`, as there;
    the number of `questions` scored. If some have no answer, the official program refuses the file;
    `missing="leave-out"` scores the others.
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
        right = prediction == question.answer
        kinds["kind"]["open" if question.structural == "query" else "binary"].append(right)
        for kind in ("structural", "semantic", "steps", "words"):
            kinds[kind][getattr(question, kind)].append(right)
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
    known = read_questions(_questions_path(root))
    return worth_by_id(known, lambda text, question: predicted(text) == question.answer)


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
