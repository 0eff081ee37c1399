import json

import pytest
from benchmark_files import answer, write_json, write_lines

from stepprune_jax.benchmarks.gqa import convert, distribution, predicted, score


def question(right, structural="query", group=None, semantic="attr", program=(), balanced=True):
    return {
        "question": "What colour is it?",
        "answer": right,
        "isBalanced": balanced,
        "types": {"structural": structural, "semantic": semantic},
        "groups": {"global": group},
        "semantic": [{"operation": name, "argument": given} for name, given in program],
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


def write(root, said):
    return write_lines(root / "a.jsonl", [answer(name, text) for name, text in said])


@pytest.mark.parametrize(
    "text, prediction",
    [
        ("Red...", "red"),
        ("Red. ", "red. "),  # the stops are not at the end
        ("A red, old Cup", "a red, old cup"),
    ],
)
def test_only_trailing_stops_and_case_go(text, prediction):
    assert predicted(text) == prediction


def test_figures_by_hand(root):
    said = [("1", "Red."), ("2", "the blue"), ("3", "No"), ("5", "no"), ("3", "YES"), ("9", "no")]
    found = score(root, write(root, said))
    # 1, 3 (its later answer) and 5 are right, 2 is wrong for its article; 4 does not count.
    assert found.headline == 75
    assert found.parts == {
        "binary": 100,
        "open": 50,
        "structural": {"choose": 100, "query": 50, "verify": 100},
        "semantic": {"attr": 100, "rel": 0},
        # Naming and existence are no steps: 1 has one, 3 has two, 2 and 5 have none.
        "steps": {"0": 50, "1": 100, "2": 100},
        "words": {"4": 75},
        "questions": 4,
        # Of red and blue one each was right, and one each was said of red and nothing known:
        # (1 - 1)^2 / 1 + (0 - 1)^2 / 1, over 100.
        "distribution": 0.01,
    }
    assert len(found.warnings) == 3  # another size, an unknown question, two answers to one


def test_distribution_by_hand():
    # Group g: right 2 x a and 1 x b, said 1 x a and 2 x c: (1-2)^2/2 + (0-1)^2/1 = 1.5, weight 3.
    # Group h: right and said 1 x d: 0, weight 1. (3 x 1.5 + 0) / 4 / 100.
    pairs = [("g", "a", "a"), ("g", "a", "c"), ("g", "b", "c"), ("h", "d", "d")]
    assert distribution(pairs) == pytest.approx(0.01125)


def test_an_unanswered_question_is_refused_unless_it_is_left_out(root):
    answers = write(root, [("1", "red"), ("2", "red")])
    with pytest.raises(ValueError, match="2 of 4 questions have no answer"):
        score(root, answers)
    found = score(root, answers, missing="leave-out")
    assert found.headline == 50 and found.parts["questions"] == 2
    assert any("2 of 4 questions have no answer" in warning for warning in found.warnings)


def test_a_submission_has_each_line(root):
    out = root / "new" / "p.json"
    assert convert(root, write(root, [("1", "Red."), ("7", "x"), ("1", "Blue")]), out) == []
    assert json.loads(out.read_text()) == [
        {"questionId": "1", "prediction": "red"},
        {"questionId": "7", "prediction": "x"},
        {"questionId": "1", "prediction": "blue"},
    ]
    with pytest.raises(IsADirectoryError):
        convert(root, root / "a.jsonl", root)


def test_a_submission_stands_until_the_next_one_is_whole(root):
    out = root / "p.json"
    convert(root, write(root, [("1", "Red")]), out)
    before = out.read_bytes()
    (root / "a.jsonl").write_text('{"question_id": "1", "te')
    with pytest.raises(ValueError, match="line 1"):
        convert(root, root / "a.jsonl", out)
    assert out.read_bytes() == before
