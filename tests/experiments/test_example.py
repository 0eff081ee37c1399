"""The example is three benchmarks in their official forms, and every answer has its place."""

import json

import pytest

from experiments.studies import example
from stepprune_jax.benchmarks import BENCHMARKS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("example")
    example.main(["--out", str(out)])
    return out


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def truths(world):
    """Right answers by the picture's content and the question."""
    right = {row["question_id"]: row["answer"] for row in lines(world / "test_answers.jsonl")}
    return {
        ((world / "images" / row["image"]).read_bytes(), row["text"]): right[row["question_id"]]
        for row in lines(world / "test.jsonl")
    }


@pytest.mark.parametrize(("name", "best"), [("gqa", 100.0), ("mme", 2800.0), ("pope", 100.0)])
def test_right_answers_score_all_points_and_wrong_ones_none(folder, tmp_path, name, best):
    right, benchmark, root = truths(folder / "world"), BENCHMARKS[name], folder / "eval"
    questions = benchmark.read_questions(root)
    assert len(questions) >= 10
    for change, expected in ((str, best), (other, 0.0)):
        with (tmp_path / "answers.jsonl").open("w") as out:
            for question in questions:
                text = change(right[question.image.read_bytes(), question.text])
                line = {"question_id": question.question_id, "prompt": question.prompt}
                out.write(json.dumps(line | {"text": text}) + "\n")
        assert benchmark.score(root, tmp_path / "answers.jsonl").headline == expected


def other(text):
    return {"yes": "no", "no": "yes"}.get(text, "nothing")
