import json

import pytest
from benchmark_files import answer, write_json, write_lines

from stepprune_jax.benchmarks.gqa import convert, distribution, normalize_prediction, score


def question(correct, structural="query", group=None, semantic="attr", program=(), balanced=True):
    return {
        "question": "What colour is it?",
        "answer": correct,
        "isBalanced": balanced,
        "types": {"structural": structural, "semantic": semantic},
        "groups": {"global": group},
        "semantic": [{"operation": name, "argument": argument} for name, argument in program],
    }


QUESTIONS = {
    "1": question("red", group="colour", program=[("select", "cup"), ("query: name", "color")]),
    "2": question("blue", group="colour", semantic="rel"),
    "3": question("yes", "verify", program=[("exist", "?"), ("relate", "cat"), ("filter", "a")]),
    "4": question("no", balanced=False),
    "5": question("no", "choose", program=[("choose name", "a|b")]),
}


@pytest.fixture
def root(tmp_path):
    write_json(tmp_path / "gqa" / "data" / "testdev_balanced_questions.json", QUESTIONS)
    return tmp_path


def write(root, pairs):
    return write_lines(root / "a.jsonl", [answer(name, text) for name, text in pairs])


@pytest.mark.parametrize(
    "text, prediction",
    [
        ("Red...", "red"),
        ("Red. ", "red. "),  # the full stop is not at the end
        ("A red, old Cup", "a red, old cup"),
    ],
)
def test_normalisation_changes_only_case_and_trailing_full_stops(text, prediction):
    assert normalize_prediction(text) == prediction


def test_figures_equal_those_computed_by_hand(root):
    pairs = [("1", "Red."), ("2", "the blue"), ("3", "No"), ("5", "no"), ("3", "YES"), ("9", "no")]
    result = score(root, write(root, pairs))
    # 1, 3 (with its last answer) and 5 are correct; 2 is wrong due to its article; 4 is ignored.
    assert result.headline == 75
    assert result.parts == {
        "binary": 100,
        "open": 50,
        "structural": {"choose": 100, "query": 50, "verify": 100},
        "semantic": {"attr": 100, "rel": 0},
        # Naming and existence are not counted: 1 has one step, 3 has two, 2 and 5 have 0.
        "steps": {"0": 50, "1": 100, "2": 100},
        "words": {"4": 75},
        "questions": 4,
        # Red and blue are correct once each. Red was predicted once, and blue never:
        # ((1 - 1)^2 / 1 + (0 - 1)^2 / 1) / 100.
        "distribution": 0.01,
    }
    # Warnings: another size, an unknown question, a repeated answer.
    assert len(result.warnings) == 3


def test_the_distribution_equals_the_one_computed_by_hand():
    # Group g: correct 2 x a, 1 x b; predicted 1 x a, 2 x c: (1-2)^2/2 + (0-1)^2/1 = 1.5, weight 3.
    # Group h: correct and predicted 1 x d: 0, weight 1. Result: (3 x 1.5 + 0) / 4 / 100.
    pairs = [("g", "a", "a"), ("g", "a", "c"), ("g", "b", "c"), ("h", "d", "d")]
    assert distribution(pairs) == pytest.approx(0.01125)


def test_unanswered_questions_are_refused_unless_left_out(root):
    answers = write(root, [("1", "red"), ("2", "red")])
    with pytest.raises(ValueError, match="2 of 4 questions have no answer"):
        score(root, answers)
    result = score(root, answers, missing="leave-out")
    assert result.headline == 50 and result.parts["questions"] == 2
    assert any("2 of 4 questions have no answer" in warning for warning in result.warnings)


def test_a_submission_contains_every_line_of_the_answers(root):
    out = root / "new" / "p.json"
    assert convert(root, write(root, [("1", "Red."), ("7", "x"), ("1", "Blue")]), out) == []
    assert json.loads(out.read_text()) == [
        {"questionId": "1", "prediction": "red"},
        {"questionId": "7", "prediction": "x"},
        {"questionId": "1", "prediction": "blue"},
    ]
    with pytest.raises(IsADirectoryError):
        convert(root, root / "a.jsonl", root)


def test_a_failed_conversion_keeps_the_earlier_submission(root):
    out = root / "p.json"
    convert(root, write(root, [("1", "Red")]), out)
    first_submission = out.read_bytes()
    (root / "a.jsonl").write_text('{"question_id": "1", "te')
    with pytest.raises(ValueError, match="line 1"):
        convert(root, root / "a.jsonl", out)
    assert out.read_bytes() == first_submission
