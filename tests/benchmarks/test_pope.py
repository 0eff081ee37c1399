import json
import re

import pytest
from benchmark_files import answer, write_lines
from hypothesis import given
from hypothesis import strategies as st

from stepprune_jax.benchmarks.pope import Counts, says_yes, score

OFFSETS = {"adversarial": 0, "random": 10_000_000, "popular": 20_000_000}
# Labels of the questions of each split, with an answer to each.
CASES = {
    "adversarial": [("yes", "Yes"), ("yes", "No"), ("no", "Yes"), ("no", "No")],
    "random": [("yes", "yes."), ("no", "No"), ("no", "No.")],
    "popular": [("yes", "Yes"), ("no", "Yes")],
}


def layout(root):
    """A list with these labels in LLaVA's layout; its answers, in its order."""
    questions, answers = [], []
    for split, cases in CASES.items():
        rows = []
        for number, (label, said) in enumerate(cases, start=1):
            image, name = f"COCO_val2014_{number // 3:012d}.jpg", OFFSETS[split] + number
            text = f"Is there a thing {number} in the image?"
            rows.append({"image": image, "text": text, "label": label})
            text += "\nAnswer the question using a single word or phrase."
            questions.append({"question_id": name, "image": image, "text": text, "category": split})
            answers.append(answer(name, said, text))
        write_lines(root / "pope" / "coco" / f"coco_pope_{split}.json", rows)
    write_lines(root / "pope" / "llava_pope_test.jsonl", questions)
    return answers


def official(text):
    """The reading of the official program, as it is written there."""
    if text.find(".") != -1:
        text = text.split(".")[0]
    words = text.replace(",", "").split(" ")
    return "no" if "No" in words or "not" in words or "no" in words else "yes"


_WORDS = st.sampled_from(["No", "no", "not", "NO", "yes", "Nope", ""])
_MARKS = st.sampled_from([" ", ",", ", ", ".", "\n", "!"])
_SAYINGS = st.lists(st.tuples(_WORDS, _MARKS).map("".join), max_size=4).map("".join)


@given(st.text() | _SAYINGS)
def test_any_text_is_read_as_the_official_program_reads_it(text):
    assert says_yes(text) == (official(text) == "yes")


def test_figures_by_hand():
    # 3 of 4 predicted yes are right, 2 of 5 yes were missed, 7 of 10 answers are right.
    assert Counts(tp=3, fp=1, tn=4, fn=2).figures() == {
        "accuracy": 70.0,
        "precision": 75.0,
        "recall": 60.0,
        "f1": pytest.approx(200 / 3),
        "yes_ratio": 40.0,
    }
    # Never yes: the official program divides by zero, here precision and F1 are 0.
    assert Counts(tp=0, fp=0, tn=5, fn=5).figures()["f1"] == 0.0


def test_the_headline_is_the_mean_of_three_f1(tmp_path):
    answers = write_lines(tmp_path / "a.jsonl", layout(tmp_path))
    result = score(tmp_path, answers)
    # adversarial TP 1 FP 1 TN 1 FN 1, F1 1/2; random all right, F1 1; popular TP 1 FP 1, F1 2/3.
    assert result.headline == pytest.approx(100 * (1 / 2 + 1 + 2 / 3) / 3)
    assert result.parts["mean_accuracy"] == pytest.approx(100 * (1 / 2 + 1 + 1 / 2) / 3)
    # Pooled: TP 3, FP 2, FN 1.
    assert result.parts["pooled_f1"] == pytest.approx(100 * 6 / 9)
    assert result.parts["adversarial"]["f1"] == 50.0
    assert result.parts["by_position"]["mean_f1"] == result.headline
    assert (result.parts["questions"], result.parts["answered"]) == (9, 9)
    assert len(result.warnings) == 3  # other sizes


def test_order_does_not_matter_unless_asked(tmp_path):
    rows = layout(tmp_path)
    straight = score(tmp_path, write_lines(tmp_path / "a.jsonl", rows))
    turned = write_lines(tmp_path / "b.jsonl", rows[::-1])
    result = score(tmp_path, turned)
    assert result.headline == straight.headline
    # Reversed: adversarial no yes no yes on yes yes no no, F1 1/2; random no no yes on yes no no,
    # F1 0; popular yes yes on yes no, F1 2/3.
    official = pytest.approx(100 * (1 / 2 + 0 + 2 / 3) / 3)
    assert result.parts["by_position"]["mean_f1"] == official
    assert "38.89" in result.warnings[-1]
    assert score(tmp_path, turned, join="position").headline == official


def test_missing_answers_do_not_count_and_a_split_has_some(tmp_path):
    rows = layout(tmp_path)
    result = score(tmp_path, write_lines(tmp_path / "a.jsonl", rows[:-1]))
    # Popular without its second answer: one true positive.
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
def test_what_would_be_counted_wrongly_is_refused(tmp_path, split, field, value, message):
    """Labels in capitals were all a yes; the official files of the splits number from 1 each."""
    answers = write_lines(tmp_path / "a.jsonl", layout(tmp_path))
    name = "llava_pope_test.jsonl" if split is None else f"coco/coco_pope_{split}.json"
    file = tmp_path / "pope" / name
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[4 if split is None else 1][field] = value
    write_lines(file, rows)
    with pytest.raises(ValueError, match=re.escape(message)):
        score(tmp_path, answers)
