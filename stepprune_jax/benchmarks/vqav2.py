"""VQAv2: the submission to the server, and soft accuracy on the validation split.

Tables print test-dev, whose answers are not public: only the server scores it. Validation answers
are. Goyal et al., "Making the V in VQA Matter" (CVPR 2017).
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.benchmarks import layout, questions
from stepprune_jax.benchmarks.answers import GivenAnswer, latest, read_answers, require_all
from stepprune_jax.benchmarks.benchmark import Benchmark, Score, mean_percent, worth_by_id
from stepprune_jax.benchmarks.questions import WORD_OR_PHRASE, BenchmarkQuestion
from stepprune_jax.benchmarks.vqa_answers import (
    normalise,
    official,
    one_line,
    soft_accuracy,
    ten,
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
_COCO = re.compile("COCO_([a-z]+20[0-9]+)_")  # names of images contain their split
_SUBMIT = (
    "test-dev is scored by the server only: write a submission with `stepprune-convert vqav2` "
    f"and upload it at {SERVER}"
)


def read_list(path: Path, images: Path) -> Iterator[BenchmarkQuestion]:
    """Reads LLaVA's list of a split, or the official questions (.json).

    The name of an image in LLaVA's list contains its folder; without it the folder is test2015/.
    Official questions get LLaVA's request for a short answer.
    """
    if path.suffix == ".json":
        yield from _read_official(path)
        return
    for question in questions.read_list(path, Path()):
        split = _COCO.match(question.image.name)
        folder = split[1] if split else "test2015"
        yield question._replace(image=images / folder / question.image)


def _read_official(path: Path) -> Iterator[BenchmarkQuestion]:
    """Reads the official questions of a split; its images are in a folder next to the file."""
    value = read_json_object(path)
    split = str(value.get("data_subtype", "val2014"))
    # The folder test2015 also has the images of test-dev2015.
    split = "test2015" if split.startswith("test") else split
    for where, entry in layout.records(value, "questions", path):
        record = as_object(entry, where)
        identity(record, "question_id", where)
        text = words(record, "question", where) + WORD_OR_PHRASE
        number = _whole_number(record, "image_id", where)
        image = path.parent / split / f"COCO_{split}_{number:012d}.jpg"
        yield BenchmarkQuestion(record["question_id"], text, text, image)


class People(NamedTuple):
    """Ten human answers to a question, each on one line, and the question's types."""

    answers: tuple[str, ...]
    question_type: str
    answer_type: str


def read_people(path: Path) -> dict[str, People]:
    """Reads the official annotations by question id, in the order of the file."""
    people, value = {}, read_json_object(layout.file(path, f"{_SOURCE}; {_SUBMIT}"))
    for where, record in layout.records(value, "annotations", path):
        with layout.expected(where, "question_id, question_type, answer_type and answers"):
            answers = ten(where, [one_line(answer["answer"]) for answer in record["answers"]])
            people[identity(record, "question_id", where)] = People(
                tuple(answers), str(record["question_type"]), str(record["answer_type"])
            )
    return people


def accuracy(prediction: str, answers: tuple[str, ...]) -> float:
    """Computes the official accuracy of one prediction.

    Prediction and answers are normalized only if people disagree: "Yes" is wrong if all ten people
    said "yes".
    """
    prediction = one_line(prediction)
    if len(set(answers)) > 1:
        prediction, answers = official(prediction), tuple(official(answer) for answer in answers)
    return soft_accuracy(prediction, answers)


def score(root: str | Path, answers: str | Path, *, missing: str = "refuse") -> Score:
    """Scores answers to the validation questions.

    The headline is the accuracy in percent of the normalized answers, which LLaVA submits. Parts:
    the same per `question_type` and `answer_type`; `as_written`, the same three figures without
    normalization; the number of `questions`. All figures are rounded to two decimals, as in the
    official program. The official program refuses a file unless the answered questions are exactly
    the annotated questions; `missing="leave-out"` scores the questions that are both.
    """
    people = read_people(Path(root) / "vqav2" / ANNOTATIONS)
    rows = read_answers(answers)
    matched_lines = sum(row.id in people for row in rows)
    warnings = layout.size_warnings(f"{ANNOTATIONS}, questions", len(people), NUM_ANNOTATIONS)
    kept = latest(rows, people, warnings, f"; {_SUBMIT}")
    if missing == "refuse":
        require_all(answers, people, kept, len(rows) - matched_lines)
    overall, parts = _accuracies(kept, people, normalise)
    as_written, written_parts = _accuracies(kept, people, str)
    parts |= {"as_written": {"overall": as_written, **written_parts}, "questions": len(kept)}
    return Score(overall, parts, warnings)


def _worth(root: Path) -> Callable[[GivenAnswer], float | None]:
    """Grades an answer by its accuracy; see `Benchmark.worth`."""
    people = read_people(Path(root) / "vqav2" / ANNOTATIONS)
    return worth_by_id(people, lambda text, truth: accuracy(normalise(text), truth.answers))


def _accuracies(
    kept: dict[str, GivenAnswer], people: dict[str, People], normaliser: Callable[[str], str]
) -> tuple[float, dict]:
    """Computes accuracy over all questions, and per type of question and answer."""
    every, tables = [], {"question_type": defaultdict(list), "answer_type": defaultdict(list)}
    for name, answer in kept.items():
        agreement = accuracy(normaliser(answer.text), people[name].answers)
        every.append(agreement)
        for kind, table in tables.items():
            table[getattr(people[name], kind)].append(agreement)
    parts = {
        kind: {name: _rounded(values) for name, values in sorted(table.items())}
        for kind, table in tables.items()
    }
    return _rounded(every), parts


def _rounded(values: list[float]) -> float:
    """Returns the mean in percent, to two decimals."""
    return round(mean_percent(values), 2)


def convert(root: str | Path, answers: str | Path, out: str | Path) -> list[str]:
    """Writes a submission to the server: test-dev answers in a list of all test questions.

    Lines that are not JSON are skipped with a warning, the last answer to a question counts, and
    an unanswered question gets the empty answer.
    """
    path = layout.file(Path(root) / "vqav2" / QUESTIONS, "LLaVA's eval.zip")
    ids = [_whole_number(row, "question_id", where) for where, row in read_json_lines(path)]
    broken: list[str] = []
    warnings = layout.size_warnings(f"{QUESTIONS}, questions", len(ids), NUM_QUESTIONS)
    kept = latest(read_answers(answers, broken), map(str, ids), [], f", of {path}")
    if broken:
        warnings.append(f"{len(broken):,} lines skipped, such as {broken[0]}")
    lines = [
        {"question_id": number, "answer": normalise(kept[name].text) if name in kept else ""}
        for number, name in zip(ids, map(str, ids), strict=True)
    ]
    layout.write_submission(out, json.dumps(lines).encode())
    return warnings


def _whole_number(row: JsonObject, name: str, where: str) -> int:
    """Returns an id as a number, as the server and the names of images require."""
    return int(field(row, name, where, lambda value: str(value).isdecimal(), "a whole number"))


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
    worth=_worth,
    convert=convert,
)
