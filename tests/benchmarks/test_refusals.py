"""Files of benchmarks that are missing or of another form are refused by name."""

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
SQA_LIST = "scienceqa/llava_test_CQM-A.json"
TEXTVQA = "textvqa/TextVQA_0.5.1_val.json"
VQA = "vqav2/v2_mscoco_val2014_annotations.json"
VQA_LIST = "vqav2/llava_vqav2_mscoco_test2015.jsonl"

ROW = {"question_id": 1, "image": "COCO_val2014_000000000001.jpg", "text": "Is it?"}
# One of the two questions of its split.
CIRCLE = ROW | {"text": "Is there a circle in the image?", "label": "yes"}
PEOPLE = {"image_id": "i", "question": "x"}
VOTES = {"question_id": 1, "question_type": "a", "answer_type": "b"}
IDS = ("11", "12", "13", "14")
PROBLEM = {"choices": ["a", "b"], "answer": 1}
LINE = {"question_id": "1", "conversations": [{"from": "human"}]}


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


def ask(name, root, answers):
    return BENCHMARKS[name].read_questions(root)


def columns(cells):
    return b"index\tquestion\tA\tB\tanswer\timage\n" + cells


@pytest.mark.parametrize(
    ("name", "stage", "file", "content"),
    [
        ("gqa", score, GQA, []),
        ("gqa", score, GQA, {}),
        ("gqa", score, GQA, {"1": {"isBalanced": True}}),
        ("gqa", score, GQA, {"1": 7}),
        ("mmbench", score, MMBENCH, b"index\tquestion\tB\n"),
        ("mmbench", score, MMBENCH, columns(b"1\tx\ty\tz\tA\n")),
        ("mmbench", score, MMBENCH, columns(b"x\tx\ty\tz\tA\t\n")),
        ("mmbench", score, MMBENCH, columns(b"1\tx\ty\tz\tA\t\n\n01\tx\ty\tz\tA\t\n")),
        ("mmbench", score, MMBENCH, columns(b"1\t\xff\ty\tz\tA\t\n")),
        ("mmbench", ask, MMBENCH, columns(b"")),
        *(
            ("mmbench", ask, MMBENCH, columns(b"5\ta\tb\tc\tA\t" + x + b"\n"))
            for x in (b"", b"????")
        ),
        ("mme", score, MME, b"Is it?\tYes\n"),
        ("mme", score, MME, b"Is it?\tYes\nIs it not?\tNo\nmore\n"),
        ("mme", score, MME, b"Is it?\tYes\nIs it not? No\n"),
        ("mme", score, MME, b"Is it?\tYes\nIs it not?\tMaybe\n"),
        ("mme", score, MME, b"Is it?\tYes\nIs it \xff?\tNo\n"),
        ("pope", score, POPE, [ROW | {"label": "no"}]),
        ("pope", score, POPE, [CIRCLE]),
        ("pope", score, POPE, [{"text": "a?"}]),
        ("pope", score, LIST, [ROW | {"category": "common"}]),
        ("pope", ask, LIST, [ROW | {"text": " "}]),
        ("scienceqa", score, SPLITS, {"test": None}),
        ("scienceqa", score, PROBLEMS, {"11": PROBLEM}),
        ("scienceqa", score, PROBLEMS, dict.fromkeys(IDS, PROBLEM | {"answer": 2})),
        ("scienceqa", score, PROBLEMS, dict.fromkeys(IDS, PROBLEM | {"choices": 3})),
        ("scienceqa", score, PROBLEMS, {"11": ["a"]}),
        *(("scienceqa", ask, SQA_LIST, [x]) for x in (LINE, LINE | {"id": "1"}, {"id": "1"}, "1")),
        ("textvqa", score, TEXTVQA, {"data": []}),
        ("textvqa", score, TEXTVQA, {"data": [PEOPLE]}),
        ("textvqa", score, TEXTVQA, {"data": [PEOPLE | {"answers": ["a"] * 9}]}),
        ("textvqa", score, TEXTVQA, {"data": [PEOPLE | {"answers": [1] * 10}]}),
        ("vqav2", score, VQA, {}),
        ("vqav2", score, VQA, {"annotations": [{"question_id": 1}]}),
        ("vqav2", score, VQA, {"annotations": [VOTES | {"answers": [{"answer": "a"}] * 9}]}),
        ("vqav2", convert, VQA_LIST, [{"question_id": 1000}]),
        ("vqav2", convert, VQA_LIST, [{"question_id": "x7"}]),
        ("vqav2", convert, VQA_LIST, [{}]),
    ],
)
def test_other_files_are_refused_by_name(root, answers, name, stage, file, content):
    path = root / file
    whole = path.read_bytes()
    try:
        if isinstance(content, list) and file not in (GQA, SQA_LIST):
            write_lines(path, content)
        else:
            path.write_bytes(
                content if isinstance(content, bytes) else json.dumps(content).encode()
            )
        with pytest.raises(ValueError, match=re.escape(str(path))):
            stage(name, root, answers)
    finally:
        path.write_bytes(whole)
    assert not answers.with_name("out").exists()


@pytest.mark.parametrize(
    ("name", "stage", "file", "source"),
    [
        ("gqa", score, GQA, "questions1.2.zip"),
        ("mmbench", score, MMBENCH, "get it from https"),
        ("mme", score, MME, "get MME_Benchmark"),
        ("pope", score, POPE, "e3e3926"),
        ("pope", ask, LIST, "eval.zip"),
        ("pope", ask, "pope/val2014/COCO_val2014_000000000001.jpg", "1 of 2 images are missing"),
        ("scienceqa", score, SPLITS, "lupantech"),
        ("scienceqa", score, PROBLEMS, "lupantech"),
        ("textvqa", score, TEXTVQA, "fbaipublicfiles"),
        ("vqav2", score, VQA, "convert vqav2` and upload it at https://eval"),
        ("folder", score, "test_answers.jsonl", "your-own-data"),
    ],
)
def test_what_is_missing_is_named_with_its_source(root, answers, name, stage, file, source):
    path, aside = root / file, root / "aside"
    if path.exists():
        path.rename(aside)
    try:
        with pytest.raises(FileNotFoundError, match=source) as missing:
            stage(name, root, answers)
    finally:
        if aside.exists():
            aside.rename(path)
    assert str(path.parent if name == "mme" else path.name) in str(missing.value)
