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
    outstanding,
    read_files,
)
from stepprune_jax.benchmarks.questions import BenchmarkQuestion

# The third has the id of the first, as TextVQA's may; the last is the second once more.
ASKED = [
    BenchmarkQuestion("a", "Is it?", "Is it?", None),
    BenchmarkQuestion(7, "Which?\nSay.", "Which?", None, {"round_id": 0, "options": ["x"]}),
    BenchmarkQuestion("a", "Was it?", "Was it?", None),
    BenchmarkQuestion("b", "\ud800", "\ud800", None),
    BenchmarkQuestion(7, "Which?\nSay.", "Which?", None, {"round_id": 0, "options": ["x"]}),
]
MADE = Provenance(
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
    found = AnswerFile.of(tmp_path, MADE)
    claim(found)
    return found


def lines(file, *numbers):
    return [answer_object(file, n, ASKED[n], AnswerLine(f"said {n}", n, 1.5)) for n in numbers]


def said(file):
    return [json.loads(line)["text"] for line in file.path.read_text().splitlines()]


def test_lines_have_the_fields_of_llava_in_its_order(file):
    value = answer_object(file, 1, ASKED[1], AnswerLine("A", 2, 0.12345, {"order": [5, 3]}))
    assert json.dumps(value) == (
        '{"question_id": 7, "round_id": 0, "prompt": "Which?", "text": "A", "options": ["x"], '
        '"answer_id": "stepprune-adaptive-66.7-1", "model_id": "tiny", "metadata": {}, '
        '"kept": 2, "ms": 0.123, "order": [5, 3]}'
    )


def test_names_of_files_keep_pluses_and_letters_of_any_script():
    assert MADE._replace(method="PruMerge+").slug == "prumerge-plus-adaptive-66.7"
    assert MADE._replace(method="Été_方法").slug == "été-方法-adaptive-66.7"
    assert MADE._replace(method="*", budget=None).slug == "row"


def test_each_time_that_a_question_is_asked_has_one_answer(file):
    append(file.path, lines(file, 2, 1))
    assert outstanding(file, ASKED) == [0, 3, 4]
    append(file.path, lines(file, 0, 3, 1, 0))  # one is listed twice, and one answered too often
    assert outstanding(file, ASKED) == []
    assert said(file) == ["said 0", "said 1", "said 2", "said 3", "said 1"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.permutations(range(5)), st.integers(0, 5), st.integers(0, 400), st.integers(0, 2))
def test_any_interruption_of_any_process_is_gone_on_with(file, order, share, cut, part):
    for path in file.parts():
        path.unlink()
    append(file.part(0), lines(file, *order[:share]))
    append(file.part(2), lines(file, *order[share:]))
    stopped = file.part(part)
    if stopped.is_file():
        stopped.write_bytes(stopped.read_bytes()[:cut])
    missing = outstanding(file, ASKED)
    assert file.parts() in ([file.path], [])
    append(file.part(1), lines(file, *missing))
    assert outstanding(file, ASKED) == []
    found = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert [(v["question_id"], v["prompt"]) for v in found] == [
        (q.question_id, q.prompt) for q in ASKED
    ]


def test_a_last_line_without_an_end_is_asked_again(file):
    append(file.path, lines(file, 0))
    whole = file.path.read_bytes()
    append(file.path, lines(file, 1))
    file.path.write_bytes(file.path.read_bytes()[:-1])
    assert outstanding(file, ASKED) == [1, 2, 3, 4]
    assert file.path.read_bytes() == whole


def test_broken_lines_and_answers_to_other_questions_are_refused(file):
    append(file.path, lines(file, 0))
    with pytest.raises(ValueError, match=r"66.7.jsonl: question 'a'"):
        outstanding(file, ASKED[1:])
    with file.path.open("a") as out:
        out.write('{"question_id": 7}\n')
    with pytest.raises(ValueError, match=r"66.7.jsonl: line 2"):
        outstanding(file, ASKED)


def test_other_settings_do_not_add_to_a_file(file):
    append(file.path, lines(file, 0))
    claim(file)
    other = MADE._replace(stop_bias=0.5, made={"policy": "q", "positions": "original"})
    with pytest.raises(ValueError, match=r"policy: 'p' -> 'q'; stop_bias: 0.25 -> 0.5"):
        claim(AnswerFile.of(file.path.parents[1], other))
    file.provenance_path.unlink()
    with pytest.raises(ValueError, match=r"stepprune-adaptive-66.7.json is missing"):
        claim(file)


def test_provenance_is_read_again(file, tmp_path):
    append(file.path, lines(file, 0, 1))
    empty = AnswerFile.of(tmp_path, MADE._replace(method="grid"))
    claim(empty)
    assert read_files(tmp_path / "pope") == [file] and said(file) == ["said 0", "said 1"]
    poem = tmp_path / "pope" / "poem.json"
    for text in ('{"line": 1}', json.dumps(MADE._asdict() | {"num_tokens": 0})):
        poem.write_text(text)
        with pytest.raises(ValueError, match=r"poem.json is not the provenance"):
            read_files(tmp_path / "pope")
