"""TextVQA, validation split: soft accuracy against ten human answers.

LLaVA's questions are identified by their image, which is not unique; the question itself is read
back from the prompt that the answer file records. Singh et al., "Towards VQA Models That Can Read"
(CVPR 2019).
"""

import re
from collections.abc import Callable
from pathlib import Path

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import Answer, read_answers
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, mean_percent
from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.benchmarks.vqa_answers import NUM_PEOPLE, normalise, soft_accuracy
from stepprune_jax.data.json_files import read_json_object

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


def question_of(prompt: str) -> str:
    """Finds the question in a recorded prompt.

    Two lines: the first. Three lines of which one has OCR tokens: the first that is not the OCR
    line. Prompts of older models begin with `OCR tokens: ` and have it between `Question: ` and
    ` Short answer:`.

    Args:
        prompt: the prompt in the answer file.

    Returns:
        The question in lower case.

    Raises:
        ValueError: the prompt has another form.
    """
    lines = prompt.split("\n")
    if prompt.startswith(_OLD_OCR):
        if found := _OLD_QUESTION.search(prompt):
            return found[1].lower()
    elif len(lines) == 3 and f"{_OCR_LINE} " in prompt:
        return lines[1 if prompt.startswith(_OCR_LINE) else 0].lower()
    elif len(lines) == 2:
        return lines[0].lower()
    raise ValueError(
        f"expected a prompt of two lines, or of three with {_OCR_LINE!r}, or one that begins with "
        f"{_OLD_OCR!r}; got {prompt[:80]!r}"
    )


def read_people(path: Path) -> dict[tuple[str, str], list[str]]:
    """Reads the human answers.

    Args:
        path: the annotations: a JSON object whose `data` is a list of records with `image_id`,
            `question` and `answers`.

    Returns:
        The ten answers, as written, by image and lower-cased question.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is malformed; or a record, numbered from 1, does not have ten
            answers.
    """
    people = {}
    records = read_json_object(path).get("data")
    if not isinstance(records, list) or not records:
        raise ValueError(
            f'{path}: expected a list of questions under "data"; get it from {_SOURCE}'
        )
    for number, record in enumerate(records, start=1):
        try:
            key, answers = (str(record["image_id"]), record["question"].lower()), record["answers"]
            complete = len(answers) == NUM_PEOPLE and all(isinstance(a, str) for a in answers)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: question {number}: expected image_id, question and answers ({error!r})"
            ) from error
        if not complete:
            raise ValueError(f"{path}: question {number}: expected {NUM_PEOPLE} answers in words")
        people[key] = answers
    return people


def score(root: str | Path, answers: str | Path) -> Score:
    """Scores answers to the validation questions.

    As in the reference program, every line of the answer file is one sample: an unanswered question
    is excluded, and one that was answered twice counts twice. Warnings report both.

    Args:
        root: LLaVA's evaluation folder; `textvqa/TextVQA_0.5.1_val.json` is read.
        answers: answer file; its prompts are read.

    Returns:
        The headline is 100 x the mean soft accuracy. Parts: the number of `samples`, and how many
        of them were asked `with_ocr` tokens in the prompt.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a malformed file, or a line, which is named, has a prompt of
            another form or a question that the annotations do not have.
    """
    path = layout.file(layout.folder(root, "textvqa") / ANNOTATIONS, _SOURCE)
    people = read_people(path)
    rows = read_answers(answers)
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


def _worth(root: Path) -> Callable[[Answer], float | None]:
    """Soft accuracy of an answer; see `Benchmark.worth`."""
    path = layout.file(layout.folder(root, "textvqa") / ANNOTATIONS, _SOURCE)
    people = read_people(path)
    return lambda row: _accuracy(row.text, people[_key(row, people, path)])


def _accuracy(text: str, answers: list[str]) -> float:
    """Soft accuracy of one answer."""
    return soft_accuracy(normalise(text), [normalise(answer) for answer in answers])


def _key(row: Answer, people: dict[tuple[str, str], list[str]], path: Path) -> tuple[str, str]:
    """Returns image and question that a line answers."""
    prompt = row.prompt
    try:
        key = row.id, question_of(prompt)
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from error
    if key not in people:
        raise ValueError(f"{row.where}: {path.name} has no question {key[1]!r} on image {key[0]!r}")
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
