import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepprune_jax.benchmarks.answer_files import (
    AnswerFile,
    AnswerLine,
    Provenance,
    answer_object,
    append,
    claim,
    find_unanswered,
    read_files,
)
from stepprune_jax.benchmarks.questions import BenchmarkQuestion

# The third question has the id of the first, as in TextVQA. The last question repeats the second.
QUESTIONS = [
    BenchmarkQuestion("a", "Is it?", "Is it?", None),
    BenchmarkQuestion(7, "Which?\nSay.", "Which?", None, {"round_id": 0, "options": ["x"]}),
    BenchmarkQuestion("a", "Was it?", "Was it?", None),
    BenchmarkQuestion("b", "\ud800", "\ud800", None),
    BenchmarkQuestion(7, "Which?\nSay.", "Which?", None, {"round_id": 0, "options": ["x"]}),
]
PROVENANCE = Provenance(
    benchmark="pope",
    questions="q",
    asked=5,
    method="StepPrune",
    mode="adaptive",
    budget=3,
    num_tokens=9,
    stop_bias=0.25,
    model="tiny",
    made={"policy": "p", "positions": "original"},
)


@pytest.fixture
def file(tmp_path):
    file = AnswerFile.of(tmp_path, PROVENANCE)
    claim(file)
    return file


def lines(file, *numbers):
    """Returns lines with the texts "answer N" for these numbers of questions."""
    return [
        answer_object(file, n, QUESTIONS[n], AnswerLine(f"answer {n}", n, 1.5)) for n in numbers
    ]


def texts(file):
    return [json.loads(line)["text"] for line in file.path.read_text().splitlines()]


def test_lines_have_the_fields_of_llava_in_its_order(file):
    value = answer_object(file, 1, QUESTIONS[1], AnswerLine("A", 2, 0.12345, {"order": [5, 3]}))
    assert json.dumps(value) == (
        '{"question_id": 7, "round_id": 0, "prompt": "Which?", "text": "A", "options": ["x"], '
        '"answer_id": "stepprune-adaptive-66.7-1", "model_id": "tiny", "metadata": {}, '
        '"kept": 2, "ms": 0.123, "order": [5, 3]}'
    )


def test_file_names_keep_plus_signs_and_letters_of_any_script():
    assert PROVENANCE._replace(method="PruMerge+").slug == "prumerge-plus-adaptive-66.7"
    assert PROVENANCE._replace(method="Été_方法").slug == "été-方法-adaptive-66.7"
    assert PROVENANCE._replace(method="*", budget=None).slug == "row"


def test_a_repeated_question_needs_one_answer_per_occurrence(file):
    append(file.path, lines(file, 2, 1))
    assert find_unanswered(file, QUESTIONS) == [0, 3, 4]
    append(file.path, lines(file, 0, 3, 1, 0))  # question 1 occurs twice; 0 has an extra answer
    assert find_unanswered(file, QUESTIONS) == []
    assert texts(file) == ["answer 0", "answer 1", "answer 2", "answer 3", "answer 1"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    order=st.permutations(range(5)),
    split=st.integers(0, 5),
    num_bytes=st.integers(0, 400),
    part=st.integers(0, 2),
)
def test_a_run_resumes_after_any_interruption_of_any_process(file, order, split, num_bytes, part):
    for path in file.parts():
        path.unlink()
    append(file.part(0), lines(file, *order[:split]))
    append(file.part(2), lines(file, *order[split:]))
    interrupted_file = file.part(part)
    if interrupted_file.is_file():
        interrupted_file.write_bytes(interrupted_file.read_bytes()[:num_bytes])
    missing = find_unanswered(file, QUESTIONS)
    assert file.parts() in ([file.path], [])
    append(file.part(1), lines(file, *missing))
    assert find_unanswered(file, QUESTIONS) == []
    rows = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert [(row["question_id"], row["prompt"]) for row in rows] == [
        (question.question_id, question.prompt) for question in QUESTIONS
    ]


def test_a_last_line_without_a_newline_is_removed(file):
    append(file.path, lines(file, 0))
    complete_lines = file.path.read_bytes()
    append(file.path, lines(file, 1))
    file.path.write_bytes(file.path.read_bytes()[:-1])
    assert find_unanswered(file, QUESTIONS) == [1, 2, 3, 4]
    assert file.path.read_bytes() == complete_lines


def test_broken_lines_and_answers_to_other_questions_are_refused(file):
    append(file.path, lines(file, 0))
    with pytest.raises(ValueError, match=r"66.7.jsonl: question 'a'"):
        find_unanswered(file, QUESTIONS[1:])
    with file.path.open("a") as out:
        out.write('{"question_id": 7}\n')
    with pytest.raises(ValueError, match=r"66.7.jsonl: line 2"):
        find_unanswered(file, QUESTIONS)


def test_a_run_with_other_settings_is_refused(file):
    append(file.path, lines(file, 0))
    claim(file)
    other_provenance = PROVENANCE._replace(
        stop_bias=0.5, made={"policy": "q", "positions": "original"}
    )
    with pytest.raises(ValueError, match=r"policy: 'p' -> 'q'; stop_bias: 0.25 -> 0.5"):
        claim(AnswerFile.of(file.path.parents[1], other_provenance))
    file.provenance_path.unlink()
    with pytest.raises(ValueError, match=r"stepprune-adaptive-66.7.json is missing"):
        claim(file)


def test_answer_files_are_listed_and_their_provenance_is_checked(file, tmp_path):
    append(file.path, lines(file, 0, 1))
    empty = AnswerFile.of(tmp_path, PROVENANCE._replace(method="grid"))
    claim(empty)
    assert read_files(tmp_path / "pope") == [file]
    assert texts(file) == ["answer 0", "answer 1"]
    poem = tmp_path / "pope" / "poem.json"
    for text in ('{"line": 1}', json.dumps(PROVENANCE._asdict() | {"num_tokens": 0})):
        poem.write_text(text)
        with pytest.raises(ValueError, match=r"poem.json is not the provenance"):
            read_files(tmp_path / "pope")
