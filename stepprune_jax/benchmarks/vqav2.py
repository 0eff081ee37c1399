"""VQAv2: submissions to the server, and soft accuracy on the validation split.

Papers report test-dev, whose answers are not public; only the server scores it. The answers of the
validation split are public. Goyal et al., "Making the V in VQA Matter" (CVPR 2017).
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.benchmarks import layout, questions
from stepprune_jax.benchmarks.answers import GivenAnswer, latest_answers, read_answers, require_all
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, grade_by_id, mean_percent
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

    In LLaVA's file, the folder of an image follows from its name; the default is test2015. Official
    questions get LLaVA's request for a short answer.
    """
    if path.suffix == ".json":
        yield from _read_official(path)
        return
    for question in questions.read_list(path, Path()):
        split = _COCO.match(question.image.name)
        folder = split[1] if split else "test2015"
        yield question._replace(image=images / folder / question.image)


def _read_official(path: Path) -> Iterator[BenchmarkQuestion]:
    """Reads an official question file. The folder of the images is next to the file."""
    value = read_json_object(path)
    split = str(value.get("data_subtype", "val2014"))
    # Images of test-dev2015 are in the folder test2015.
    split = "test2015" if split.startswith("test") else split
    for place, entry in layout.records(value, "questions", path):
        record = as_object(entry, place)
        identity(record, "question_id", place)
        text = words(record, "question", place) + WORD_OR_PHRASE
        number = _read_integer(record, "image_id", place)
        image = path.parent / split / f"COCO_{split}_{number:012d}.jpg"
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
    people, value = {}, read_json_object(layout.file(path, f"{_SOURCE}; {_SUBMIT}"))
    for place, record in layout.records(value, "annotations", path):
        with layout.expected(place, "question_id, question_type, answer_type and answers"):
            answers = check_ten_answers(
                place, [one_line(answer["answer"]) for answer in record["answers"]]
            )
            people[identity(record, "question_id", place)] = People(
                tuple(answers), str(record["question_type"]), str(record["answer_type"])
            )
    return people


def accuracy(prediction: str, answers: tuple[str, ...]) -> float:
    """Computes the official accuracy of a prediction, from 0 to 1.

    Prediction and answers are normalised only if the ten people disagree. "Yes" is therefore wrong
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
            questions, as the official program does. "leave-out" scores the questions in both.

    Returns:
        The headline is the accuracy in percent of the normalised answers, which LLaVA submits.
        Parts: the accuracy per `question_type` and `answer_type`; `as_written`, the same three
        figures without normalisation; and the number of `questions`. Figures are rounded to two
        decimals, as in the official program.
    """
    people = read_people(Path(root) / "vqav2" / ANNOTATIONS)
    rows = read_answers(answers)
    num_matched = sum(row.id in people for row in rows)
    warnings = layout.size_warnings(f"{ANNOTATIONS}, questions", len(people), NUM_ANNOTATIONS)
    answer_of = latest_answers(rows, people, warnings, f"; {_SUBMIT}")
    if missing == "refuse":
        require_all(answers, people, answer_of, len(rows) - num_matched)
    overall, parts = _accuracies(answer_of, people, normalise)
    as_written, written_parts = _accuracies(answer_of, people, str)
    parts |= {"as_written": {"overall": as_written, **written_parts}, "questions": len(answer_of)}
    return Score(overall, parts, warnings)


def _make_grader(root: Path) -> Callable[[GivenAnswer], float | None]:
    """Grades an answer by its accuracy; see `Benchmark.make_grader`."""
    people = read_people(Path(root) / "vqav2" / ANNOTATIONS)
    return grade_by_id(people, lambda text, truth: accuracy(normalise(text), truth.answers))


def _accuracies(
    answer_of: dict[str, GivenAnswer], people: dict[str, People], normaliser: Callable[[str], str]
) -> tuple[float, dict]:
    """Computes the accuracy over all questions, and per type of question and answer.

    Args:
        answer_of: the answers by question id.
        people: human answers by question id.
        normaliser: normalises the text of an answer.
    """
    grades, tables = [], {"question_type": defaultdict(list), "answer_type": defaultdict(list)}
    for name, answer in answer_of.items():
        grade = accuracy(normaliser(answer.text), people[name].answers)
        grades.append(grade)
        for kind, table in tables.items():
            table[getattr(people[name], kind)].append(grade)
    parts = {
        kind: {name: _rounded_percent(values) for name, values in sorted(table.items())}
        for kind, table in tables.items()
    }
    return _rounded_percent(grades), parts


def _rounded_percent(values: list[float]) -> float:
    """Returns the mean in percent, to two decimals."""
    return round(mean_percent(values), 2)


def convert(root: str | Path, answers: str | Path, out: str | Path) -> list[str]:
    """Writes a submission to the server: a list of all test questions with the test-dev answers.

    Lines that are not JSON are skipped with a warning. The last answer to a question counts, and an
    unanswered question gets an empty answer.
    """
    path = layout.file(Path(root) / "vqav2" / QUESTIONS, "LLaVA's eval.zip")
    ids = [_read_integer(row, "question_id", place) for place, row in read_json_lines(path)]
    broken: list[str] = []
    warnings = layout.size_warnings(f"{QUESTIONS}, questions", len(ids), NUM_QUESTIONS)
    answer_of = latest_answers(read_answers(answers, broken), map(str, ids), [], f", of {path}")
    if broken:
        warnings.append(f"{len(broken):,} lines skipped, such as {broken[0]}")
    lines = [
        {
            "question_id": number,
            "answer": normalise(answer_of[name].text) if name in answer_of else "",
        }
        for number, name in zip(ids, map(str, ids), strict=True)
    ]
    layout.write_submission(out, json.dumps(lines).encode())
    return warnings


def _read_integer(row: JsonObject, name: str, place: str) -> int:
    """Reads a field as an integer. It may be text of digits, as ids in some files are."""
    return int(field(row, name, place, lambda value: str(value).isdecimal(), "a whole number"))


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
