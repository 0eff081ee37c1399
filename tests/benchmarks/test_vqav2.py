import json

import pytest
from benchmark_files import answer, write_json, write_lines

from stepprune_jax.benchmarks.vqav2 import accuracy, convert, score

ANNOTATIONS = "v2_mscoco_val2014_annotations.json"
TEST = "llava_vqav2_mscoco_test2015.jsonl"


def annotation(number, people, question_type="what is", answer_type="other"):
    return {
        "question_id": number,
        "question_type": question_type,
        "answer_type": answer_type,
        "answers": [{"answer": text} for text in people],
    }


PEOPLE = [
    annotation(1000, ["yes"] * 10, "is the", "yes/no"),
    annotation(1001, ["2"] * 8 + ["two", "3"], "how many", "number"),
    annotation(1002, ["mcdonald's"] * 3 + ["burger\tking"] * 7),
]


@pytest.fixture
def root(tmp_path):
    write_json(tmp_path / "vqav2" / ANNOTATIONS, {"annotations": PEOPLE})
    write_lines(tmp_path / "vqav2" / TEST, [{"question_id": n} for n in (1002, 5, 1000, 1001)])
    return tmp_path


def write(root, pairs):
    return write_lines(root / "a.jsonl", [answer(number, text) for number, text in pairs])


@pytest.mark.parametrize(
    "prediction, people, expected",
    [
        # All ten people agree, so nothing is normalized.
        ("Yes", ["yes"] * 10, 0),
        ("2.", ["2"] * 10, 0),
        ("new\tyork\n", ["new york"] * 10, 1),
        # They disagree, so prediction and answers are normalized.
        ("Yes.", ["yes"] * 9 + ["no"], 1),
        ("Two", ["2"] * 2 + ["two"] + ["no"] * 7, 0.9),
        ("the kite", ["a kite"] + ["bird"] * 9, 0.3),
        # Answers that differ only before normalization count as disagreement.
        ("KITE", ["Kite"] * 9 + ["kite"], 1),
    ],
)
def test_the_accuracy_equals_the_one_computed_by_hand(prediction, people, expected):
    assert accuracy(prediction, tuple(people)) == pytest.approx(expected)


def test_figures_equal_those_computed_by_hand(root):
    result = score(root, write(root, [(1000, "Yes,"), (1001, "the two"), (1002, "McDonald's")]))
    # As submitted: "yes" 1, "2" 1 (nine of ten), "mcdonald 's" 0.
    # As written: "Yes," 0, "2" 1, "mcdonald's" 0.9 (three of ten).
    assert result.headline == 66.67
    assert result.parts == {
        "question_type": {"how many": 100, "is the": 100, "what is": 0},
        "answer_type": {"number": 100, "other": 0, "yes/no": 100},
        "as_written": {
            "overall": 63.33,
            "question_type": {"how many": 100, "is the": 0, "what is": 90},
            "answer_type": {"number": 100, "other": 90, "yes/no": 0},
        },
        "questions": 3,
    }
    assert len(result.warnings) == 1  # another number of questions


@pytest.mark.parametrize("numbers", [(1000, 1001), (1000, 1001, 1002, 7)])
def test_missing_and_unknown_questions_are_refused_unless_left_out(root, numbers):
    answers = write(root, [(number, "no") for number in numbers])
    with pytest.raises(ValueError, match="--missing leave-out"):
        score(root, answers)
    result = score(root, answers, missing="leave-out")
    assert result.headline == 0 and result.parts["questions"] == len({*numbers} - {7})


def test_answers_to_test_dev_are_refused_with_the_address_of_the_server(root):
    with pytest.raises(ValueError, match=r"convert vqav2` and upload it at https://eval\.ai/"):
        score(root, write(root, [(5, "no")]))


def test_a_submission_equals_the_one_written_by_hand(root):
    answers = write(
        root, [(1000, "No"), (1001, "The Two, dogs"), (1000, "Yes, McDonald's"), (9, "x")]
    )
    with answers.open("a") as lines:
        lines.write('{"question_id": 1002, "te')
    out = root / "new" / "s.json"
    warnings = convert(root, answers, out)
    # In the order of the question file. 5 has no answer, and 1002 is on the broken line.
    assert json.loads(out.read_text()) == [
        {"question_id": 1002, "answer": ""},
        {"question_id": 5, "answer": ""},
        {"question_id": 1000, "answer": "yes mcdonald 's"},
        {"question_id": 1001, "answer": "2 dogs"},
    ]
    assert len(warnings) == 2  # another number of questions, and a line that is not JSON
    assert f"{answers}: line 5" in warnings[1]
