import pytest
from benchmark_files import answer, write_json, write_lines

from stepprune_jax.benchmarks.scienceqa import parse_letter, score

# Problems of the test split: number of choices, index of the correct choice, image.
PROBLEMS = {
    "1": (2, 0, None),
    "2": (3, 2, "image.png"),
    "5": (4, 1, "image.png"),
    "11": (5, 4, "image.png"),
}


def layout(root):
    """Writes the problems and one of the training split, and returns correct answers."""
    problems = {
        name: {"choices": ["a choice"] * num_choices, "answer": correct, "image": image}
        for name, (num_choices, correct, image) in PROBLEMS.items()
    }
    problems["3"] = problems["1"]
    write_json(root / "scienceqa" / "problems.json", problems)
    write_json(root / "scienceqa" / "pid_splits.json", {"train": ["3"], "test": list(PROBLEMS)})
    question = "Which one?\nA. one\nB. two"
    return [
        answer(name, "ABCDE"[correct], f"<image>\n{question}" if image else question)
        for name, (_, correct, image) in PROBLEMS.items()
    ]


def scored(root, rows):
    return score(root, write_lines(root / "a.jsonl", rows))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("E", "E"),
        ("B. north", "B"),
        ("So, the rest. The answer is C, of course", "C"),
        ("The answer is Z!", "Z"),
        ("B.", None),
        ("b", None),
        ("F", None),
        ("F. north", None),
        ("B) text", None),
        ("The answer is B", None),
        ("The answer is B\n", None),  # a newline does not count as the following character
        ("The answer is A. The answer is B.", None),
        ("", None),
        ("AB", None),
    ],
)
def test_letters_are_parsed_as_by_the_official_program(text, expected):
    assert parse_letter(text) == expected


def test_accuracies_equal_those_computed_by_hand(tmp_path):
    rows = layout(tmp_path)
    rows[1]["text"] = "C. three"
    rows[2]["text"] = "A"
    rows[3]["text"] = "e"
    result = scored(tmp_path, rows)
    assert result.headline == pytest.approx(100 / 3)
    assert result.parts == {
        "accuracy_all": 50.0,
        "accuracy_problems_with_image": pytest.approx(100 / 3),
        "questions": 4,
        "answered": 4,
        "answered_with_image": 3,
        "problems_with_image": 3,
        "without_letter": 1,
    }
    assert len(result.warnings) == 2  # other sizes


def test_an_unanswered_question_is_wrong_except_in_the_headline(tmp_path):
    rows = layout(tmp_path)[:3]
    rows[0]["text"] = "B"
    result = scored(tmp_path, rows)
    assert result.headline == 100.0
    assert result.parts["accuracy_all"] == 50.0
    assert result.parts["accuracy_problems_with_image"] == pytest.approx(200 / 3)


def test_the_prompt_decides_whether_a_question_has_an_image(tmp_path):
    rows = layout(tmp_path)
    rows[1]["prompt"] = "Which one?"
    rows[2]["text"] = "A"
    result = scored(tmp_path, rows)
    assert result.headline == 50.0 and result.parts["answered_with_image"] == 2
    assert result.warnings[-1].startswith("1 answers have <image> in the prompt but no image")
    for row in rows:
        row["prompt"] = "Which one?"
    with pytest.raises(ValueError, match="no prompt holds <image>"):
        scored(tmp_path, rows)
