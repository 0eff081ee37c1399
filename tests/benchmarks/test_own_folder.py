import json

import pytest
from benchmark_files import answer, write_lines

from stepprune_jax.benchmarks import folder as module


@pytest.fixture
def folder(tmp_path):
    """Returns a data folder with four questions of two categories."""
    questions = [{"question_id": n, "image": "a.png", "text": "?"} for n in range(4)]
    for question, kind in zip(questions, ("count", "colour", "colour"), strict=False):
        question["category"] = kind
    write_lines(tmp_path / "test.jsonl", questions)
    truths = ["2", "red", "Straße", "no"]
    pairs = [{"question_id": n, "answer": truth} for n, truth in enumerate(truths)]
    write_lines(tmp_path / "test_answers.jsonl", pairs[::-1])
    return tmp_path


def write(folder, *pairs):
    return write_lines(folder / "answers.jsonl", [answer(name, text) for name, text in pairs])


def test_case_and_surrounding_space_are_ignored(folder):
    file = write(folder, (3, "yes"), (0, " 2\n"), (1, "RED"), (2, "strasse"))
    score = module.score(folder, file)
    assert score.headline == 75 and score.warnings == []
    assert score.parts == {
        "category": {"colour": 100.0, "count": 100.0, "default": 0.0},
        "questions": 4,
        "answered": 4,
    }
    assert module.BENCHMARK.judge(folder, file) == [0, 1, 1, 1]


def test_missing_answers_are_wrong_and_the_last_of_several_counts(folder):
    file = write(folder, (1, "red"), (1, "blue"), (0, "2"), (9, "red"))
    score = module.score(folder, file)
    assert score.headline == 25 and score.parts["answered"] == 2
    assert [warning.partition(":")[0] for warning in score.warnings] == [
        "1 questions answered repeatedly",
        "1 answers to unknown questions ignored, such as '9'",
        "2 of 4 questions have no answer, such as '2'",
    ]
    assert module.BENCHMARK.judge(folder, file) == [1, 0, 1, None]


def test_the_error_names_a_question_without_a_correct_answer(folder):
    write_lines(folder / "test.jsonl", [{"question_id": "x", "image": "a.png", "text": "?"}])
    with pytest.raises(ValueError, match=r"test.jsonl: line 1: no answer to question 'x'"):
        module.score(folder, write(folder, (0, "2")))


def test_only_the_questions_of_the_question_file_are_scored(folder):
    """Users often shorten the question file for a first try, but not the file of its answers."""
    questions = folder / "test.jsonl"
    questions.write_text("".join(questions.read_text().splitlines(keepends=True)[:2]))
    score = module.score(folder, write(folder, (0, "2"), (1, "blue")))
    assert score.headline == 50 and score.parts["questions"] == 2
    assert score.parts["category"] == {"count": 100, "colour": 0}
    assert score.warnings == ["2 answers of test_answers.jsonl are to no question of test.jsonl"]


@pytest.mark.parametrize("name", ["test.jsonl", "test_answers.jsonl"])
def test_a_repeated_id_is_refused(folder, name):
    line = {"question_id": 2, "image": "a.png", "text": "?", "answer": "blue"}
    with (folder / name).open("a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=f"{name}: line 5: .*'2' was already given at .*line"):
        module.score(folder, write(folder, (2, "blue")))
