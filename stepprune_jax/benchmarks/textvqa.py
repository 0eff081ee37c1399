"""TextVQA, validation split: soft accuracy against ten human answers.

LLaVA's questions are identified by their image, which is not unique; the question itself is read
back from the prompt that the answer file records. Singh et al., "Towards VQA Models That Can Read"
(CVPR 2019).
"""

import re
from collections.abc import Callable
from pathlib import Path

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import GivenAnswer, read_answers
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, mean_percent
from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.benchmarks.vqa_answers import normalise, soft_accuracy, ten
from stepprune_jax.data.json_files import read_json_object
from stepprune_jax.user_input import UserError

ANNOTATIONS = "TextVQA_0.5.1_val.json"
NUM_QUESTIONS = 5000
_SOURCE = f"https://dl.fbaipublicfiles.com/textvqa/data/{ANNOTATIONS}"

_OCR_LINE = "Reference OCR token:"
_OLD_OCR = "OCR tokens: "
_OLD_QUESTION = re.compile(r"Question: (.*?) Short answer:", re.DOTALL)


def without_ocr(question: BenchmarkQuestion) -> BenchmarkQuestion:
    """Removes the line of OCR tokens from a question's text and prompt."""
    lines = [line for line in question.text.split("\n") if not line.startswith(_OCR_LINE)]
    text = "\n".join(lines)
    return question._replace(text=text, prompt=text)


def question_of(prompt: str) -> str | None:
    """Returns the question of a recorded prompt in lower case; None for an unknown format.

    A prompt of two lines begins with the question. A prompt of three lines has a line of OCR
    tokens, and the question is the first other line. A prompt of an older model begins with
    `OCR tokens: `, and has the question between `Question: ` and ` Short answer:`.
    """
    lines = prompt.split("\n")
    if prompt.startswith(_OLD_OCR):
        match = _OLD_QUESTION.search(prompt)
        return match[1].lower() if match else None
    if len(lines) == 3 and f"{_OCR_LINE} " in prompt:
        return lines[1 if prompt.startswith(_OCR_LINE) else 0].lower()
    return lines[0].lower() if len(lines) == 2 else None


def read_people(path: Path) -> dict[tuple[str, str], list[str]]:
    """Reads ten human answers, as written, by image and lower-cased question."""
    people, value = {}, read_json_object(layout.file(path, _SOURCE))
    for where, record in layout.records(value, "data", path):
        with layout.expected(where, "image_id, question and answers"):
            key = str(record["image_id"]), record["question"].lower()
            people[key] = ten(where, record["answers"])
    return people


def score(root: str | Path, answers: str | Path) -> Score:
    """Scores answers to the validation questions.

    As in the reference program, every line of the answer file is one sample. An unanswered question
    does not count, and a question that was answered twice counts twice. Warnings report both. The
    headline is 100 x the mean soft accuracy. Parts: the number of `samples`, and the number of
    samples whose prompt has OCR tokens, `with_ocr`.
    """
    path = Path(root) / "textvqa" / ANNOTATIONS
    people, rows = read_people(path), read_answers(answers)
    keys = [_key(row, people, path) for row in rows]
    accuracies = [_accuracy(row.text, people[key]) for row, key in zip(rows, keys, strict=True)]
    with_ocr = sum(_OCR_LINE in row.prompt or row.prompt.startswith(_OLD_OCR) for row in rows)
    warnings = layout.size_warnings(f"{ANNOTATIONS}, questions", len(people), NUM_QUESTIONS)
    if not len(rows) == len(set(keys)) == len(people):
        warnings.append(
            f"{len(rows):,} answers to {len(set(keys)):,} of {len(people):,} questions: unanswered "
            "questions do not count, those answered repeatedly count repeatedly"
        )
    if with_ocr < len(rows):
        warnings.append(
            f"{len(rows) - with_ocr:,} of {len(rows):,} prompts carry no OCR tokens: not "
            "comparable with the figures of LLaVA and of pruning papers, whose prompts do"
        )
    parts = {"samples": len(rows), "with_ocr": with_ocr}
    return Score(mean_percent(accuracies), parts, warnings)


def _worth(root: Path) -> Callable[[GivenAnswer], float | None]:
    """Soft accuracy of an answer; see `Benchmark.worth`."""
    path = Path(root) / "textvqa" / ANNOTATIONS
    people = read_people(path)
    return lambda row: _accuracy(row.text, people[_key(row, people, path)])


def _accuracy(text: str, answers: list[str]) -> float:
    """Soft accuracy of one answer."""
    return soft_accuracy(normalise(text), [normalise(answer) for answer in answers])


def _key(row: GivenAnswer, people: dict[tuple[str, str], list[str]], path: Path) -> tuple[str, str]:
    """Returns image and question that a line answers."""
    key = row.id, question_of(row.prompt)
    if key not in people:
        raise UserError(
            f"{row.where}: {path.name} has no question {key[1]!r} on image {key[0]!r}, with the "
            f"prompt {row.prompt[:80]!r}"
        )
    return key


BENCHMARK = Benchmark(
    name="textvqa",
    title="TextVQA",
    headline="100 x mean soft accuracy, validation",
    question_files=("textvqa/llava_textvqa_val_v051_ocr.jsonl",),
    images="textvqa/train_images",
    image_source="https://dl.fbaipublicfiles.com/textvqa/images/train_val_images.zip",
    without_ocr=without_ocr,
    max_new_tokens=128,
    score=score,
    worth=_worth,
)
