from functools import partial

import pytest
from benchmark_files import answer, write_lines

from stepprune_jax.benchmarks.mme import (
    COGNITION,
    PERCEPTION,
    RELEASE,
    convert,
    parse_yes_no,
    score,
)

TASKS = (*PERCEPTION, *COGNITION)
NESTED = ("artwork", "celebrity", "landmark", "posters", "scene")
SUFFIX = "\nAnswer the question using a single word or phrase."


def layout(root):
    """Writes a release with two images of two questions per task.

    Returns:
        Correct answers in the order of the questions.
    """
    answers = []
    for task in TASKS:
        is_nested = task in NESTED
        texts = root / "MME" / RELEASE / task / ("questions_answers_YN" if is_nested else "")
        texts.mkdir(parents=True)
        for stem in ("0001", "tt2"):
            # Some questions of the release have two blanks before the request.
            pairs = {f"Is this {task}?": "Yes", "Is this nöthing? ": "No"}
            lines = [f"{text} Please answer yes or no.\t{truth}" for text, truth in pairs.items()]
            (texts / f"{stem}.txt").write_text("\n".join(lines), encoding="utf-8")
            name = f"{task}/images/{stem}.png" if is_nested else f"{task}/{stem}.png"
            answers += [answer(name, truth, text.strip() + SUFFIX) for text, truth in pairs.items()]
    return answers


def scored(root, rows, **options):
    return score(root, write_lines(root / "a.jsonl", rows), **options)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Yes", "yes"),
        ("Ayes", "yes"),
        ("Know", "no"),
        ("  no", "no"),
        ("   no", "other"),
        ("A: no", "other"),
        ("The answer is yes", "other"),
        ("Yea", "other"),
    ],
)
def test_answers_are_parsed_by_their_first_four_characters(text, expected):
    assert parse_yes_no(text) == expected


def test_a_wrong_answer_reduces_both_accuracies(tmp_path):
    rows = layout(tmp_path)
    rows[0]["text"] = "No"
    rows[-1]["text"] = "I think so"
    result = scored(tmp_path, rows)
    # In both tasks 3 of 4 questions and 1 of 2 images are correct: 75 + 50.
    for task, num_other in (("existence", 0), ("code_reasoning", 1)):
        assert result.parts[task] == {
            "score": 125.0,
            "accuracy": 75.0,
            "accuracy_plus": 50.0,
            "neither_yes_nor_no": num_other,
        }
    assert (result.parts["perception"], result.parts["cognition"]) == (1925.0, 725.0)
    assert result.headline == 2650.0
    assert result.parts["questions"] == result.parts["answered"] == 56


def test_pairs_are_joined_by_image_or_by_position(tmp_path):
    rows = layout(tmp_path)
    rows[0]["text"] = "No"
    rows[1]["text"] = "Yes"
    # In existence, both answers to the first image are wrong and do not follow each other. One
    # image is correct, but none of the consecutive pairs.
    rows[1], rows[2] = rows[2], rows[1]
    result = scored(tmp_path, rows)
    assert result.parts["existence"]["score"] == 100.0 and result.headline == 2700.0
    assert result.parts["by_position"]["perception"] == 1850.0
    assert "2650.00" in result.warnings[-1]
    assert scored(tmp_path, rows, pairs="position").headline == 2650.0


def test_an_odd_number_of_answers_has_no_official_pairs(tmp_path):
    rows = layout(tmp_path)
    result = scored(tmp_path, [rows[0] | {"text": "No"}, *rows])
    assert result.headline == 2800.0 and result.parts["by_position"] is None
    with pytest.raises(ValueError, match="odd number of answers"):
        scored(tmp_path, [rows[0], *rows], pairs="position")


def test_an_image_must_have_two_answers_or_none(tmp_path):
    rows = layout(tmp_path)
    result = scored(tmp_path, rows[2:])  # without the first image
    assert result.headline == 2800.0
    assert "2 of 56 questions have no answer" in result.warnings[1]
    with pytest.raises(ValueError, match="no answer to a question of task existence"):
        scored(tmp_path, rows[4:])
    incomplete = write_lines(tmp_path / "a.jsonl", rows[1:])
    for stage in (score, partial(convert, out=tmp_path / "o")):
        with pytest.raises(ValueError, match=r"existence/0001.txt: one of the two .*nöthing"):
            stage(tmp_path, incomplete)
    assert not (tmp_path / "o").exists()


def test_text_files_have_the_format_of_the_official_program(tmp_path):
    rows = layout(tmp_path)
    rows[1]["text"] = "\t No\tway\n\ud800\n"
    out = tmp_path / "o" / "results"
    # Images are in the order of their first answers. The last of several answers counts.
    shuffled = [rows[3], rows[1] | {"text": "?"}, rows[2], rows[0], rows[1], *rows[4:]]
    assert convert(tmp_path, write_lines(tmp_path / "a.jsonl", shuffled), out) == []
    assert sorted(file.name for file in out.iterdir()) == sorted(f"{task}.txt" for task in TASKS)
    assert (out / "existence.txt").read_bytes().decode() == (
        "tt2.txt\tIs this nöthing?  Please answer yes or no.\tNo\tNo\n"
        "tt2.txt\tIs this existence? Please answer yes or no.\tYes\tYes\n"
        "0001.txt\tIs this nöthing?  Please answer yes or no.\tNo\t No way ?\n"
        "0001.txt\tIs this existence? Please answer yes or no.\tYes\tYes\n"
    )
