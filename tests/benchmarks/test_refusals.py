"""Errors name files of benchmarks that are missing or malformed."""

import json
import re

import pytest
from benchmark_files import answer, write_lines
from benchmark_folders import write_benchmarks

from stepprune_jax.benchmarks import BENCHMARKS

GQA = "gqa/data/testdev_balanced_questions.json"
MMBENCH = "mmbench/mmbench_dev_20230712.tsv"
MME = "MME/MME_Benchmark_release_version/scene/questions_answers_YN/1.txt"
POPE, LIST = "pope/coco/coco_pope_random.json", "pope/llava_pope_test.jsonl"
SPLITS, PROBLEMS = "scienceqa/pid_splits.json", "scienceqa/problems.json"
TEXTVQA = "textvqa/TextVQA_0.5.1_val.json"
VQA = "vqav2/v2_mscoco_val2014_annotations.json"
VQA_LIST = "vqav2/llava_vqav2_mscoco_test2015.jsonl"

ROW = {"question_id": 1, "image": "COCO_val2014_000000000001.jpg", "text": "Is it?"}
# One of the two questions of the split "random".
CIRCLE = ROW | {"text": "Is there a circle in the image?", "label": "yes"}
PEOPLE = {"image_id": "i", "question": "x", "answers": ["a"] * 9}
PROBLEM = {"choices": ["a", "b"], "answer": 1}
COLUMNS = b"index\tquestion\tA\tB\tanswer\timage\n"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_benchmarks(tmp_path_factory.mktemp("eval") / "eval")


@pytest.fixture
def answers(tmp_path):
    return write_lines(tmp_path / "answers.jsonl", [answer(1, "yes")])


def score(name, root, answers):
    return BENCHMARKS[name].score(root, answers)


def convert(name, root, answers):
    return BENCHMARKS[name].convert(root, answers, answers.with_name("out"))


def read(name, root, answers):
    return BENCHMARKS[name].read_questions(root)


@pytest.mark.parametrize(
    ("name", "stage", "file", "content"),
    [
        ("gqa", score, GQA, {}),
        ("gqa", score, GQA, {"1": {"isBalanced": True}}),
        ("mmbench", score, MMBENCH, b"index\tquestion\tB\n"),
        ("mmbench", score, MMBENCH, COLUMNS + b"1\tx\ty\tz\tA\n"),
        ("mmbench", score, MMBENCH, COLUMNS + b"1\tx\ty\tz\tA\t\n\n01\tx\ty\tz\tA\t\n"),
        ("mmbench", score, MMBENCH, COLUMNS + b"1\t\xff\ty\tz\tA\t\n"),
        ("mmbench", read, MMBENCH, COLUMNS),
        ("mmbench", read, MMBENCH, COLUMNS + b"5\ta\tb\tc\tA\t????\n"),
        ("mme", score, MME, b"Is it?\tYes\nIs it not?\tNo\nmore\n"),
        ("mme", score, MME, b"Is it?\tYes\nIs it not?\tMaybe\n"),
        ("pope", score, POPE, ROW | {"label": "no"}),
        ("pope", score, POPE, CIRCLE),
        ("pope", score, LIST, ROW | {"category": "common"}),
        ("scienceqa", score, SPLITS, {"test": None}),
        ("scienceqa", score, PROBLEMS, {"11": PROBLEM}),
        ("scienceqa", score, PROBLEMS, {"11": PROBLEM | {"answer": 2}}),
        ("scienceqa", read, "scienceqa/llava_test_CQM-A.json", [{"id": "1"}]),
        ("textvqa", score, TEXTVQA, {"data": []}),
        ("textvqa", score, TEXTVQA, {"data": [PEOPLE]}),
        ("vqav2", score, VQA, {"annotations": [{"question_id": 1}]}),
        ("vqav2", convert, VQA_LIST, {"question_id": 1000}),
        ("vqav2", convert, VQA_LIST, {"question_id": "x7"}),
    ],
)
def test_the_error_names_a_malformed_file(root, answers, name, stage, file, content):
    path = root / file
    contents = path.read_bytes()
    try:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        with pytest.raises(ValueError, match=re.escape(str(path))):
            stage(name, root, answers)
    finally:
        path.write_bytes(contents)
    assert not answers.with_name("out").exists()


@pytest.mark.parametrize(
    ("name", "stage", "file", "source"),
    [
        ("mmbench", score, MMBENCH, "get it from https"),
        ("mme", score, MME, "get MME_Benchmark"),
        ("pope", score, POPE, "e3e3926"),
        ("pope", read, "pope/val2014/COCO_val2014_000000000001.jpg", "1 of 2 images are missing"),
        ("vqav2", score, VQA, "convert vqav2` and upload it at https://eval"),
    ],
)
def test_the_error_names_a_missing_file_and_its_source(root, answers, name, stage, file, source):
    path, hidden_path = root / file, root / "hidden"
    path.rename(hidden_path)
    try:
        with pytest.raises(FileNotFoundError, match=source) as error:
            stage(name, root, answers)
    finally:
        hidden_path.rename(path)
    assert str(path.parent if name == "mme" else path.name) in str(error.value)
