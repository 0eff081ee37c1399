"""GQA, test-dev balanced: exact match, as the official program counts it.

Hudson and Manning, "GQA" (CVPR 2019). The official program's validity, plausibility and grounding
need files that were never published for test-dev, and its consistency needs answers to the
unbalanced questions: none of the four is reported.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import Answer, latest, read_answers
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, mean_percent, worth_by_id
from stepprune_jax.data.json_files import read_json_object

QUESTIONS = "testdev_balanced_questions.json"
NUM_QUESTIONS = 12_578
_SOURCE = "questions1.2.zip at https://cs.stanford.edu/people/dorarad/gqa/download.html"

# Operations that the official program does not count as steps of reasoning.
_NO_STEP = ("exist", "query: name", "choose name")


class Question(NamedTuple):
    """What the official program reads of a question.

    Attributes:
        answer: the one right answer.
        structural: structural type, as "verify"; "query" questions are the open ones.
        semantic: semantic type, as "attr".
        steps: operations of its program, those of naming and of existence left out.
        words: words of the question.
        group: global group, within which answers are distributed, or None.
    """

    answer: str
    structural: str
    semantic: str
    steps: int
    words: int
    group: str | None


def predicted(text: str) -> str:
    """The answer that is compared.

    Args:
        text: what the model said.

    Returns:
        It without the full stops at its end, in lower case; nothing else is changed.
    """
    return text.rstrip(".").lower()


def read_questions(path: Path) -> dict[str, Question]:
    """Reads the balanced questions of an official question file.

    Args:
        path: a JSON object from question id to record.

    Returns:
        The questions by id, in the order of the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no such object, a record lacks a field, or no question is balanced.
    """
    questions = {}
    for name, record in read_json_object(path).items():
        try:
            if record["isBalanced"]:
                questions[name] = _question(record)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: question {name!r}: expected isBalanced, question, answer, "
                f"types.structural, types.semantic, groups.global and semantic ({error!r})"
            ) from error
    if not questions:
        raise ValueError(f"{path}: expected questions with isBalanced true, got none")
    return questions


def _question(record: Mapping[str, Any]) -> Question:
    """Picks the fields that count from a record."""
    operations = (f"{each['operation']}: {each['argument']}" for each in record["semantic"])
    return Question(
        answer=record["answer"],
        structural=record["types"]["structural"],
        semantic=record["types"]["semantic"],
        steps=sum(not any(part in each for part in _NO_STEP) for each in operations),
        words=len(record["question"].split()),
        group=record["groups"]["global"],
    )


def distribution(pairs: Iterable[tuple[str, str, str]]) -> float:
    """Measures how far the answers in each group are distributed from the right ones.

    For each group, the chi-square statistic of the predicted counts of the right answers against
    their true counts; the mean over groups, weighted by questions; divided by 100. Answers that
    are right to no question of the group do not count. Lower is better.

    Args:
        pairs: global group, right answer and prediction of each question that has a group; at
            least one.

    Returns:
        The official program's "distribution".
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

    Args:
        root: LLaVA's evaluation folder; `gqa/data/testdev_balanced_questions.json` is read.
        answers: an answer file.
        missing: "refuse" as the official program does, or "leave-out" to score the questions that
            were answered.

    Returns:
        Accuracy in per cent as headline. Parts: `binary` and `open` accuracy; accuracy per
        `structural` type, `semantic` type, number of `steps` and of `words`; `distribution`
        (see there); the number of `questions` scored.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not what it should be, or a question has no answer.
    """
    questions = read_questions(_questions_path(root))
    warnings = layout.size_warnings(
        f"{QUESTIONS}, balanced questions", len(questions), NUM_QUESTIONS
    )
    kept = latest(read_answers(answers), questions, warnings)
    if missing == "refuse" and len(kept) < len(questions):
        first = next(name for name in questions if name not in kept)
        raise ValueError(
            f"{answers}: {len(questions) - len(kept):,} of {len(questions):,} questions have no "
            f"answer, as {first!r}: the official program refuses this; leave them out with "
            "--missing leave-out"
        )
    scored = [(questions[name], predicted(answer.text)) for name, answer in kept.items()]
    accuracy, parts = _accuracies(scored)
    return Score(accuracy, parts, warnings)


def _accuracies(scored: list[tuple[Question, str]]) -> tuple[float, dict[str, Any]]:
    """Accuracy over all questions, and over each kind of them."""
    kinds: dict[str, dict[Any, list[bool]]] = defaultdict(lambda: defaultdict(list))
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
    """The official questions of test-dev."""
    return layout.file(layout.folder(root, "gqa") / "data" / QUESTIONS, _SOURCE)


def _worth(root: Path) -> Callable[[Answer], float | None]:
    """Whether an answer is right; see `Benchmark.worth`."""
    known = read_questions(_questions_path(root))
    return worth_by_id(known, lambda text, question: predicted(text) == question.answer)


def convert(root: str | Path, answers: str | Path, out: str | Path) -> Path:
    """Writes the predictions file that the official program reads.

    Args:
        root: LLaVA's evaluation folder; nothing of it is read.
        answers: an answer file.
        out: where to write; the official program looks for
            gqa/data/testdev_balanced_predictions.json.

    Returns:
        `out`: a JSON list of `questionId` and `prediction`, one for each line of the answers.

    Raises:
        FileNotFoundError: there is no such answer file.
        ValueError: it is not what it should be.
    """
    lines = [
        {"questionId": answer.id, "prediction": predicted(answer.text)}
        for answer in read_answers(answers)
    ]
    return layout.write_submission(out, json.dumps(lines).encode())


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
