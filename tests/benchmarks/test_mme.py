import pytest
from benchmark_files import answer, write_lines
from PIL import Image

from stepprune_jax.benchmarks.mme import (
    COGNITION,
    PERCEPTION,
    convert,
    on_one_line,
    reading,
    score,
)

TASKS = (*PERCEPTION, *COGNITION)
NESTED = ("artwork", "celebrity", "landmark", "posters", "scene")
SUFFIX = "\nAnswer the question using a single word or phrase."
STEMS = ("0001", "tt2")


def layout(root):
    """A release of two images a task with their four questions; all answers right, in order."""
    answers = []
    for task in TASKS:
        place = root / "MME" / "MME_Benchmark_release_version" / task
        texts = place / "questions_answers_YN" if task in NESTED else place
        images = place / "images" if task in NESTED else place
        texts.mkdir(parents=True)
        images.mkdir(exist_ok=True)
        for stem in STEMS:
            Image.new("RGB", (2, 2)).save(images / f"{stem}.png")
            asked = [f"Is this {task}?", "Is this nöthing?"]
            # Two blanks before the request, and no line end, as some files of the release.
            lines = [f"{asked[0]} Please answer yes or no.\tYes"]
            lines += [f"{asked[1]}  Please answer yes or no.\tNo"]
            (texts / f"{stem}.txt").write_text("\n".join(lines), encoding="utf-8")
            folder = f"{task}/images" if task in NESTED else task
            for question, truth in zip(asked, ("Yes", "No"), strict=True):
                answers.append(answer(f"{folder}/{stem}.png", truth, question + SUFFIX))
    return answers


def scored(root, rows, **options):
    return score(root, write_lines(root / "a.jsonl", rows), **options)


@pytest.mark.parametrize(
    "text, read",
    [
        ("Yes", "yes"),
        ("no", "no"),
        ("Not sure", "no"),
        ("Know", "no"),
        ("Nope", "no"),
        ("Noon", "no"),
        ("The answer is yes", "other"),
        ("A: no", "other"),
        ("Y", "other"),
        ("Yea", "other"),
        ("", "other"),
        ("Ayes", "yes"),
        ("eyes", "yes"),
        ("(yes)", "yes"),
        ("  no", "no"),
        ("   no", "other"),
    ],
)
def test_answers_are_read_by_their_first_four_characters(text, read):
    assert reading(text) == read


def test_tabs_and_line_ends_are_taken_out():
    assert on_one_line("\tNo\n") == "No"
    assert on_one_line("Yes\tit\r\nis") == "Yes it  is"
    assert on_one_line("   no") == "   no"


def test_a_wrong_answer_costs_its_question_and_its_image(tmp_path):
    rows = layout(tmp_path)
    rows[0]["text"] = "No"
    rows[-1]["text"] = "I think so"
    result = scored(tmp_path, rows)
    # In both tasks 3 of 4 questions and 1 of 2 images are right: 75 + 50.
    for task, other in (("existence", 0), ("code_reasoning", 1)):
        assert result.parts[task] == {
            "score": 125.0,
            "accuracy": 75.0,
            "accuracy_plus": 50.0,
            "neither_yes_nor_no": other,
        }
    assert (result.parts["perception"], result.parts["cognition"]) == (1925.0, 725.0)
    assert result.headline == 2650.0
    assert result.parts["questions"] == result.parts["answered"] == 56


def test_pairs_are_found_by_image_unless_asked(tmp_path):
    rows = layout(tmp_path)
    rows[0]["text"] = "No"
    rows[1]["text"] = "Yes"
    # existence: the first image all wrong, its questions apart: none of the consecutive pairs
    # is right, but one image is.
    rows[1], rows[2] = rows[2], rows[1]
    result = scored(tmp_path, rows)
    assert result.parts["existence"]["score"] == 100.0 and result.headline == 2700.0
    assert result.parts["by_position"]["perception"] == 1850.0
    assert "2650.00" in result.warnings[-1]
    assert scored(tmp_path, rows, pairs="position").headline == 2650.0


def test_an_answer_too_many_leaves_no_official_pairs(tmp_path):
    rows = layout(tmp_path)
    result = scored(tmp_path, [rows[0] | {"text": "No"}, *rows])
    assert result.headline == 2800.0 and result.parts["by_position"] is None
    with pytest.raises(ValueError, match="odd number of answers"):
        scored(tmp_path, [rows[0], *rows], pairs="position")


def test_missing_answers(tmp_path):
    rows = layout(tmp_path)
    result = scored(tmp_path, rows[2:])  # a whole image: the rest is scored
    assert result.headline == 2800.0
    assert "2 of 56 questions have no answer" in result.warnings[1]
    with pytest.raises(ValueError, match=r"existence/0001.txt: one of the two .* 'Is this nöth"):
        scored(tmp_path, rows[1:])
    with pytest.raises(ValueError, match="no answer to a question of task existence"):
        scored(tmp_path, rows[4:])
    rows[5]["prompt"] = "Is this news?"
    with pytest.raises(ValueError, match=r"count/0001.txt: one of the two"):
        scored(tmp_path, rows)


def test_text_files_are_those_of_the_official_program(tmp_path):
    rows = layout(tmp_path)
    rows[1]["text"] = "No\tway\n\ud800"
    out = tmp_path / "o" / "mine"
    assert convert(tmp_path, write_lines(tmp_path / "a.jsonl", rows), out) == []
    assert sorted(file.name for file in out.iterdir()) == sorted(f"{task}.txt" for task in TASKS)
    assert (out / "existence.txt").read_bytes().decode() == (
        "0001.txt\tIs this existence? Please answer yes or no.\tYes\tYes\n"
        "0001.txt\tIs this nöthing?  Please answer yes or no.\tNo\tNo way ?\n"
        "tt2.txt\tIs this existence? Please answer yes or no.\tYes\tYes\n"
        "tt2.txt\tIs this nöthing?  Please answer yes or no.\tNo\tNo\n"
    )


def test_converted_pairs_stand_together_in_the_order_of_the_answers(tmp_path):
    rows = layout(tmp_path)
    mixed = [rows[3], rows[1] | {"text": "?"}, rows[2], rows[0], rows[1], *rows[4:]]
    out = tmp_path / "o"
    convert(tmp_path, write_lines(tmp_path / "a.jsonl", mixed), out)
    lines = (out / "existence.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split("\t")[0] for line in lines] == ["tt2.txt"] * 2 + ["0001.txt"] * 2
    assert [line.split("\t")[3] for line in lines] == ["No", "Yes", "No", "Yes"]


def test_nothing_is_written_where_an_answer_is_missing(tmp_path):
    answers = write_lines(tmp_path / "a.jsonl", layout(tmp_path)[1:])
    with pytest.raises(ValueError, match="one of the two"):
        convert(tmp_path, answers, tmp_path / "o")
    assert not (tmp_path / "o").exists()
