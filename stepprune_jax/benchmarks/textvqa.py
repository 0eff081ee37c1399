"""TextVQA, validation split: soft accuracy against ten human answers.

LLaVA's question ids name the image and are not unique. Therefore the question is read from the
prompt that the answer file stores. Singh et al., "Towards VQA Models That Can Read" (CVPR 2019).
"""

import re
from collections.abc import Callable
from pathlib import Path

from stepprune_jax.benchmarks import layout
from stepprune_jax.benchmarks.answers import GivenAnswer, read_answers
from stepprune_jax.benchmarks.benchmark import Benchmark, Score
from stepprune_jax.benchmarks.percent import mean_percent
from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.benchmarks.vqa_answers import check_ten_answers, normalise, soft_accuracy
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


def parse_question(prompt: str) -> str | None:
    """Parses the question of a stored prompt.

    Three formats are accepted:

    1. Two lines. The question is the first line.
    2. Three lines, including a line of OCR tokens. The question is the first remaining line.
    3. The format of an older model, which starts with `OCR tokens: `. The question is between
       `Question: ` and ` Short answer:`.

    Args:
        prompt: field `prompt` of an answer line.

    Returns:
        The question in lower case, or None for another format.
    """
    if prompt.startswith(_OLD_OCR):
        match = _OLD_QUESTION.search(prompt)
        return match[1].lower() if match else None
    lines = prompt.split("\n")
    if len(lines) == 3 and f"{_OCR_LINE} " in prompt:
        return lines[1 if prompt.startswith(_OCR_LINE) else 0].lower()
    return lines[0].lower() if len(lines) == 2 else None


def read_people(path: Path) -> dict[tuple[str, str], list[str]]:
    """Reads the ten human answers to each question, by image and lower-cased question."""
    people, value = {}, read_json_object(layout.require_file(path, _SOURCE))
    for place, record in layout.list_records(value, "data", path):
        with layout.refuse_malformed(place, "image_id, question and answers"):
            key = str(record["image_id"]), record["question"].lower()
            people[key] = check_ten_answers(place, record["answers"])
    return people


def score(root: str | Path, answers: str | Path) -> Score:
    """Scores answers to the validation questions.

    As in the reference program, every line of the answer file is one sample. An unanswered question
    does not count, and a question that was answered twice counts twice. Warnings report both.

    Args:
        root: folder of LLaVA's layout.
        answers: the answer file.

    Returns:
        The headline is 100 times the mean soft accuracy. Parts: the number of `samples`, and the
        number of samples `with_ocr` tokens in their prompt.
    """
    path = Path(root) / "textvqa" / ANNOTATIONS
    human_answers, lines = read_people(path), read_answers(answers)
    keys = [_question_key(line, human_answers, path) for line in lines]
    accuracies = [
        _accuracy(line.text, human_answers[key]) for line, key in zip(lines, keys, strict=True)
    ]
    num_with_ocr = sum(
        _OCR_LINE in line.prompt or line.prompt.startswith(_OLD_OCR) for line in lines
    )
    num_answered = len(set(keys))
    warnings = layout.size_warnings(f"{ANNOTATIONS}, questions", len(human_answers), NUM_QUESTIONS)
    if not len(lines) == num_answered == len(human_answers):
        warnings.append(
            f"{len(lines):,} answers to {num_answered:,} of {len(human_answers):,} questions: "
            "unanswered questions do not count, those answered repeatedly count repeatedly"
        )
    if num_with_ocr < len(lines):
        warnings.append(
            f"{len(lines) - num_with_ocr:,} of {len(lines):,} prompts carry no OCR tokens: not "
            "comparable with the figures of LLaVA and of pruning papers, whose prompts do"
        )
    parts = {"samples": len(lines), "with_ocr": num_with_ocr}
    return Score(mean_percent(accuracies), parts, warnings)


def _make_grader(root: Path) -> Callable[[GivenAnswer], float | None]:
    """Grades an answer by its soft accuracy; see `Benchmark.make_grader`."""
    path = Path(root) / "textvqa" / ANNOTATIONS
    human_answers = read_people(path)
    return lambda line: _accuracy(
        line.text, human_answers[_question_key(line, human_answers, path)]
    )


def _accuracy(text: str, human_answers: list[str]) -> float:
    """Returns the soft accuracy of an answer after normalization."""
    return soft_accuracy(normalise(text), [normalise(answer) for answer in human_answers])


def _question_key(
    line: GivenAnswer, human_answers: dict[tuple[str, str], list[str]], path: Path
) -> tuple[str, str]:
    """Returns the image and the question that a line answers.

    Args:
        line: line of an answer file.
        human_answers: annotations from `read_people`.
        path: the file of annotations, for the error.

    Raises:
        UserError: the annotations do not contain the question.
    """
    question = parse_question(line.prompt)
    if question is None or (line.id, question) not in human_answers:
        raise UserError(
            f"{line.place}: {path.name} has no question {question!r} on image {line.id!r}, with "
            f"the prompt {line.prompt[:80]!r}"
        )
    return line.id, question


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
    make_grader=_make_grader,
)
