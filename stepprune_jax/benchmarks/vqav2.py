"""VQAv2: submissions to the server, and soft accuracy on the validation split.

Papers report test-dev, whose answers are not public; only the server scores it. The answers of the
validation split are public. Goyal et al., "Making the V in VQA Matter" (CVPR 2017).
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.benchmarks import layout, questions
from stepprune_jax.benchmarks.answers import GivenAnswer, latest_answers, read_answers, require_all
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, grade_by_id
from stepprune_jax.benchmarks.percent import mean_percent, percent_by_group
from stepprune_jax.benchmarks.questions import WORD_OR_PHRASE, BenchmarkQuestion
from stepprune_jax.benchmarks.vqa_answers import (
    check_ten_answers,
    normalise,
    normalise_official,
    one_line,
    soft_accuracy,
)
from stepprune_jax.data.json_files import (
    JsonObject,
    as_object,
    field,
    identity,
    read_json_lines,
    read_json_object,
    words,
)

QUESTIONS = "llava_vqav2_mscoco_test2015.jsonl"
NUM_QUESTIONS = 447_793
ANNOTATIONS = "v2_mscoco_val2014_annotations.json"
NUM_ANNOTATIONS = 214_354
SERVER = "https://eval.ai/web/challenges/challenge-page/830"
_SOURCE = "https://visualqa.org/download.html"
# File names of COCO images contain the split of the image.
_COCO = re.compile("COCO_([a-z]+20[0-9]+)_")
_SUBMIT = (
    "test-dev is scored by the server only: write a submission with `stepprune-convert vqav2` "
    f"and upload it at {SERVER}"
)


def read_list(path: Path, images: Path) -> Iterator[BenchmarkQuestion]:
    """Reads LLaVA's question file of a split, or an official question file (.json).

    Args:
        path: the question file. Official questions get LLaVA's request for a short answer.
        images: folder with one folder of images per COCO split. The split of an image in LLaVA's
            file follows from its name; the default is test2015. Not used for an official file.
    """
    if path.suffix == ".json":
        return _read_official(path)
    return questions.read_list(path, images, _image_split)


def _image_split(image: str) -> str:
    """Returns the COCO split of an image, from its path."""
    match = _COCO.match(Path(image).name)
    return match[1] if match else "test2015"


def _read_official(path: Path) -> Iterator[BenchmarkQuestion]:
    """Reads an official question file. The folder of the images is next to the file."""
    content = read_json_object(path)
    split = str(content.get("data_subtype", "val2014"))
    # Images of test-dev2015 are in the folder test2015.
    image_split = "test2015" if split.startswith("test") else split
    for place, value in layout.list_records(content, "questions", path):
        record = as_object(value, place)
        identity(record, "question_id", place)
        text = words(record, "question", place) + WORD_OR_PHRASE
        image_id = _read_integer(record, "image_id", place)
        image = path.parent / image_split / f"COCO_{image_split}_{image_id:012d}.jpg"
        yield BenchmarkQuestion(record["question_id"], text, text, image)


class People(NamedTuple):
    """Human answers to a question.

    Attributes:
        answers: the answers of ten people, without newlines.
        question_type: the question's first words.
        answer_type: "yes/no", "number" or "other".
    """

    answers: tuple[str, ...]
    question_type: str
    answer_type: str


def read_people(path: Path) -> dict[str, People]:
    """Reads the official annotations by question id, in the order of the file."""
    content = read_json_object(layout.require_file(path, f"{_SOURCE}; {_SUBMIT}"))
    people = {}
    for place, record in layout.list_records(content, "annotations", path):
        with layout.refuse_malformed(place, "question_id, question_type, answer_type and answers"):
            answers = check_ten_answers(
                place, [one_line(answer["answer"]) for answer in record["answers"]]
            )
            people[identity(record, "question_id", place)] = People(
                tuple(answers), str(record["question_type"]), str(record["answer_type"])
            )
    return people


def accuracy(prediction: str, answers: tuple[str, ...]) -> float:
    """Computes the official accuracy of a prediction, from 0 to 1.

    Prediction and answers are normalized only if the ten people disagree. "Yes" is therefore wrong
    if all of them answered "yes".
    """
    prediction = one_line(prediction)
    if len(set(answers)) > 1:
        prediction = normalise_official(prediction)
        answers = tuple(map(normalise_official, answers))
    return soft_accuracy(prediction, answers)


def score(root: str | Path, answers: str | Path, *, missing: str = "refuse") -> Score:
    """Scores answers to the validation questions.

    Args:
        root: folder of LLaVA's layout.
        answers: the answer file.
        missing: "refuse" raises an error unless the answered questions are exactly the annotated
            questions, as the official program does. "leave-out" scores the annotated questions with
            an answer.

    Returns:
        The headline is the accuracy in percent of the normalized answers, which LLaVA submits.
        Parts: the accuracy per `question_type` and `answer_type`; `as_written`, the same three
        figures without normalization; and the number of `questions`. Figures are rounded to two
        decimals, as in the official program.
    """
    people = read_people(Path(root) / "vqav2" / ANNOTATIONS)
    lines = read_answers(answers)
    num_unknown = sum(line.id not in people for line in lines)
    warnings = layout.size_warnings(f"{ANNOTATIONS}, questions", len(people), NUM_ANNOTATIONS)
    answer_of = latest_answers(lines, people, warnings, f"; {_SUBMIT}")
    if missing == "refuse":
        require_all(answers, people, answer_of, num_unknown)
    overall, parts = _compute_accuracies(answer_of, people, normalise)
    written_overall, written_parts = _compute_accuracies(answer_of, people, str)
    parts["as_written"] = {"overall": written_overall, **written_parts}
    parts["questions"] = len(answer_of)
    return Score(overall, parts, warnings)


def _make_grader(root: Path) -> Callable[[GivenAnswer], float | None]:
    """Grades an answer by its accuracy; see `Benchmark.make_grader`."""
    people = read_people(Path(root) / "vqav2" / ANNOTATIONS)
    return grade_by_id(people, lambda text, truth: accuracy(normalise(text), truth.answers))


def _compute_accuracies(
    answer_of: dict[str, GivenAnswer],
    people: dict[str, People],
    normaliser: Callable[[str], str],
) -> tuple[float, dict]:
    """Computes the accuracy over all questions, and per type of question and answer.

    Args:
        answer_of: the answers by question id.
        people: human answers by question id.
        normaliser: normalizes the text of an answer.

    Returns:
        The overall accuracy in percent, and the accuracy by type under "question_type" and
        "answer_type".
    """
    grades = {
        question_id: accuracy(normaliser(answer.text), people[question_id].answers)
        for question_id, answer in answer_of.items()
    }
    parts = {}
    for kind in ("question_type", "answer_type"):
        accuracies = percent_by_group(
            (getattr(people[question_id], kind), grade) for question_id, grade in grades.items()
        )
        parts[kind] = {name: round(value, 2) for name, value in accuracies.items()}
    return round(mean_percent(grades.values()), 2), parts


def convert(root: str | Path, answers: str | Path, out: str | Path) -> list[str]:
    """Writes a submission to the server, with the test-dev answers.

    The server expects all test questions, so questions without an answer get an empty answer. The
    last answer to a question counts. Lines that are not JSON are skipped with a warning.

    Args:
        root: folder of LLaVA's layout.
        answers: the answer file.
        out: the submission, a JSON file.

    Returns:
        Warnings about skipped lines and about a question file of another size than published.
    """
    path = layout.require_file(Path(root) / "vqav2" / QUESTIONS, "LLaVA's eval.zip")
    ids = [_read_integer(record, "question_id", place) for place, record in read_json_lines(path)]
    broken_lines: list[str] = []
    warnings = layout.size_warnings(f"{QUESTIONS}, questions", len(ids), NUM_QUESTIONS)
    lines = read_answers(answers, broken_lines)
    # An answer file of test-dev lacks most test questions, so these warnings are dropped.
    answer_of = latest_answers(lines, map(str, ids), [], f", of {path}")
    if broken_lines:
        warnings.append(f"{len(broken_lines):,} lines skipped, such as {broken_lines[0]}")
    submission = []
    for question_id in ids:
        answer = answer_of.get(str(question_id))
        text = "" if answer is None else normalise(answer.text)
        submission.append({"question_id": question_id, "answer": text})
    layout.write_submission(out, json.dumps(submission).encode())
    return warnings


def _read_integer(record: JsonObject, name: str, place: str) -> int:
    """Reads a field as an integer. The value may be a text of digits, as in some files."""
    return int(field(record, name, place, lambda value: str(value).isdecimal(), "a whole number"))


BENCHMARK = Benchmark(
    name="vqav2",
    title="VQAv2",
    headline="accuracy in percent, validation; test-dev is scored by the server",
    question_files=("vqav2/llava_vqav2_mscoco_test-dev2015.jsonl",),
    read=read_list,
    images="vqav2",
    image_source=(
        "test2015.zip (of the validation split val2014.zip) at https://cocodataset.org/#download"
    ),
    max_new_tokens=128,
    score=score,
    options={"missing": ("refuse", "leave-out")},
    make_grader=_make_grader,
    convert=convert,
)
