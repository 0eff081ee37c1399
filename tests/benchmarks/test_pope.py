import json
import re

import pytest
from benchmark_files import answer, write_lines
from hypothesis import given
from hypothesis import strategies as st

from stepprune_jax.benchmarks.pope import Counts, says_yes, score

OFFSETS = {"adversarial": 0, "random": 10_000_000, "popular": 20_000_000}
# Label and answer of each question, by split.
CASES = {
    "adversarial": [("yes", "Yes"), ("yes", "No"), ("no", "Yes"), ("no", "No")],
    "random": [("yes", "yes."), ("no", "No"), ("no", "No.")],
    "popular": [("yes", "Yes"), ("no", "Yes")],
}


def layout(root):
    """Writes questions and labels in LLaVA's layout, and returns the answers in their order."""
    questions, answers = [], []
    for split, cases in CASES.items():
        rows = []
        for number, (label, reply) in enumerate(cases, start=1):
            image, name = f"COCO_val2014_{number // 3:012d}.jpg", OFFSETS[split] + number
            text = f"Is there a thing {number} in the image?"
            rows.append({"image": image, "text": text, "label": label})
            text += "\nAnswer the question using a single word or phrase."
            questions.append({"question_id": name, "image": image, "text": text, "category": split})
            answers.append(answer(name, reply, text))
        write_lines(root / "pope" / "coco" / f"coco_pope_{split}.json", rows)
    write_lines(root / "pope" / "llava_pope_test.jsonl", questions)
    return answers


def parse_officially(text):
    """Returns "yes" or "no" by the code of the official program."""
    if text.find(".") != -1:
        text = text.split(".")[0]
    words = text.replace(",", "").split(" ")
    return "no" if "No" in words or "not" in words or "no" in words else "yes"


_WORDS = st.sampled_from(["No", "no", "not", "NO", "yes", "Nope", ""])
_MARKS = st.sampled_from([" ", ",", ", ", ".", "\n", "!"])
_ANSWERS = st.lists(st.tuples(_WORDS, _MARKS).map("".join), max_size=4).map("".join)


@given(st.text() | _ANSWERS)
def test_any_text_is_parsed_as_by_the_official_program(text):
    assert says_yes(text) == (parse_officially(text) == "yes")


def test_figures_equal_those_computed_by_hand():
    # 3 of 4 predicted yes are correct, 2 of 5 yes were missed, 7 of 10 answers are correct.
    assert Counts(tp=3, fp=1, tn=4, fn=2).figures() == {
        "accuracy": 70.0,
        "precision": 75.0,
        "recall": 60.0,
        "f1": pytest.approx(200 / 3),
        "yes_ratio": 40.0,
    }
    # Without any yes the official program divides by zero. Here precision and F1 are 0.
    assert Counts(tp=0, fp=0, tn=5, fn=5).figures()["f1"] == 0.0


def test_the_headline_is_the_mean_of_three_f1(tmp_path):
    answers = write_lines(tmp_path / "a.jsonl", layout(tmp_path))
    result = score(tmp_path, answers)
    # adversarial TP 1 FP 1 TN 1 FN 1, F1 1/2; random all correct, F1 1; popular TP 1 FP 1, F1 2/3.
    assert result.headline == pytest.approx(100 * (1 / 2 + 1 + 2 / 3) / 3)
    assert result.parts["mean_accuracy"] == pytest.approx(100 * (1 / 2 + 1 + 1 / 2) / 3)
    # Pooled: TP 3, FP 2, FN 1.
    assert result.parts["pooled_f1"] == pytest.approx(100 * 6 / 9)
    assert result.parts["adversarial"]["f1"] == 50.0
    assert result.parts["by_position"]["mean_f1"] == result.headline
    assert (result.parts["questions"], result.parts["answered"]) == (9, 9)
    assert len(result.warnings) == 3  # other sizes


def test_the_order_of_answers_only_matters_for_the_join_by_position(tmp_path):
    rows = layout(tmp_path)
    expected = score(tmp_path, write_lines(tmp_path / "a.jsonl", rows))
    reversed_file = write_lines(tmp_path / "b.jsonl", rows[::-1])
    result = score(tmp_path, reversed_file)
    assert result.headline == expected.headline
    # Reversed answers and labels: adversarial no yes no yes, yes yes no no, F1 1/2; random no no
    # yes, yes no no, F1 0; popular yes yes, yes no, F1 2/3.
    official = pytest.approx(100 * (1 / 2 + 0 + 2 / 3) / 3)
    assert result.parts["by_position"]["mean_f1"] == official
    assert "38.89" in result.warnings[-1]
    assert score(tmp_path, reversed_file, join="position").headline == official


def test_missing_answers_do_not_count_but_each_split_needs_one(tmp_path):
    rows = layout(tmp_path)
    result = score(tmp_path, write_lines(tmp_path / "a.jsonl", rows[:-1]))
    # Without its second answer, the split popular has one true positive.
    assert result.parts["popular"]["f1"] == 100.0 and result.parts["answered"] == 8
    with pytest.raises(ValueError, match="no answer to a question of split popular"):
        score(tmp_path, write_lines(tmp_path / "a.jsonl", rows[:7]))


@pytest.mark.parametrize(
    ("split", "field", "value", "message"),
    [
        ("random", "label", "No", 'random.json: line 2: "label" is "No", expected "yes" or "no"'),
        (None, "question_id", 1, "line 5: \"question_id\" '1' is also the id of another question"),
    ],
)
def test_bad_labels_and_repeated_ids_are_refused(tmp_path, split, field, value, message):
    """The official program reads a label in capitals as yes, and each split has its own id 1."""
    answers = write_lines(tmp_path / "a.jsonl", layout(tmp_path))
    name = "llava_pope_test.jsonl" if split is None else f"coco/coco_pope_{split}.json"
    file = tmp_path / "pope" / name
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[4 if split is None else 1][field] = value
    write_lines(file, rows)
    with pytest.raises(ValueError, match=re.escape(message)):
        score(tmp_path, answers)
