"""The example benchmarks, whose correct answers must score all points."""

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


def correct_answers(world):
    """Returns the correct answers by the bytes of the image and the question."""
    answers = {row["question_id"]: row["answer"] for row in lines(world / "test_answers.jsonl")}
    return {
        ((world / "images" / row["image"]).read_bytes(), row["text"]): answers[row["question_id"]]
        for row in lines(world / "test.jsonl")
    }


@pytest.mark.parametrize(("name", "best"), [("gqa", 100.0), ("mme", 2800.0), ("pope", 100.0)])
def test_correct_answers_score_all_points_and_wrong_answers_none(folder, tmp_path, name, best):
    answers, benchmark, root = correct_answers(folder / "world"), BENCHMARKS[name], folder / "eval"
    questions = benchmark.read_questions(root)
    assert len(questions) >= 10
    for change, expected in ((str, best), (wrong_answer, 0.0)):
        with (tmp_path / "answers.jsonl").open("w") as file:
            for question in questions:
                text = change(answers[question.image.read_bytes(), question.text])
                line = {"question_id": question.question_id, "prompt": question.prompt}
                file.write(json.dumps(line | {"text": text}) + "\n")
        assert benchmark.score(root, tmp_path / "answers.jsonl").headline == expected


def wrong_answer(text):
    return {"yes": "no", "no": "yes"}.get(text, "nothing")
