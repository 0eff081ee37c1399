import pytest
from benchmark_files import answer, write_json, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from stepprune_jax.benchmarks.textvqa import question_of, score

SUFFIX = "\nAnswer the question using a single word or phrase."
OCR = "\nReference OCR token: ACME, 24"


def record(image, question, people):
    return {"image_id": image, "question": question, "question_id": 7, "answers": people}


PEOPLE = [
    record("i1", "What brand is it?", ["ACME"] * 4 + ["Acme Inc."] * 3 + ["24", "the 24", "x"]),
    record("i1", "What number?", ["24"] * 10),
    record("i2", "What brand is it?", ["none"] * 10),
]


@pytest.fixture
def root(tmp_path):
    write_json(tmp_path / "textvqa" / "TextVQA_0.5.1_val.json", {"data": PEOPLE})
    return tmp_path


def write(root, said):
    rows = [answer(image, text, prompt + SUFFIX) for image, prompt, text in said]
    return write_lines(root / "a.jsonl", rows)


@pytest.mark.parametrize(
    "prompt, question",
    [
        ("What is IT?" + SUFFIX, "what is it?"),
        ("What is it?" + OCR + SUFFIX, "what is it?"),
        ("What is it?\nReference OCR token: " + SUFFIX, "what is it?"),
        ("Reference OCR token: a, b\nWhat is it?" + SUFFIX, "what is it?"),
        ("OCR tokens: a b. Question: What is it? Short answer:", "what is it?"),
        ("OCR tokens: a\nb\nQuestion: What\nis it? Short answer:", "what\nis it?"),
    ],
)
def test_the_question_is_found_in_each_form_of_prompt(prompt, question):
    assert question_of(prompt) == question


@pytest.mark.parametrize(
    "prompt", ["What is it?", "a\nb\nc", "a\nReference OCR token: b\nc\nd", "OCR tokens: a b"]
)
def test_another_form_of_prompt_is_refused(prompt):
    with pytest.raises(ValueError, match="expected a prompt of two lines"):
        question_of(prompt)


def test_figures_by_hand(root):
    said = [
        ("i1", "What brand is it?" + OCR, "Acme, Inc."),  # three people: 0.9
        ("i1", "what NUMBER?" + OCR, "24."),  # ten: 1
        ("i2", "What brand is it?" + OCR, "0"),  # "none" is written as 0: 1
        ("i1", "What brand is it?" + OCR, "the 24?"),  # two, one of them with an article: 0.6
    ]
    found = score(root, write(root, said))
    assert found.headline == pytest.approx(100 * (0.9 + 1 + 1 + 0.6) / 4)
    assert found.parts == {"samples": 4, "with_ocr": 4}
    assert any("4 answers to 3 of 3 questions" in warning for warning in found.warnings)
    assert any("3 here, 5,000" in warning for warning in found.warnings)


def test_unanswered_questions_leave_the_denominator_with_a_warning(root):
    found = score(root, write(root, [("i1", "What number?" + OCR, "24")]))
    assert found.headline == 100
    assert any("1 answers to 1 of 3 questions" in warning for warning in found.warnings)


def test_prompts_without_ocr_tokens_are_told(root):
    said = [
        ("i1", "What brand is it?", "ACME"),
        ("i1", "What number?" + OCR, "24"),
        ("i2", "What brand is it?" + OCR, "none"),
    ]
    found = score(root, write(root, said))
    assert found.parts == {"samples": 3, "with_ocr": 2}
    assert any(w.startswith("1 of 3 prompts carry no OCR") for w in found.warnings)
    assert not any("answers to" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    "image, prompt, message",
    [
        ("i2", "What number?" + OCR, "has no question 'what number?' on image 'i2'"),
        ("i1", "What number?" + OCR + OCR, "expected a prompt of two lines"),
        ("i1", "", "has no question"),
    ],
)
def test_an_answer_to_no_question_is_refused_by_line(root, image, prompt, message):
    answers = write(root, [("i1", "What number?" + OCR, "24"), (image, prompt, "24")])
    with pytest.raises(ValueError) as refused:
        score(root, answers)
    assert str(refused.value).startswith(f"{answers}: line 2: ") and message in str(refused.value)


@pytest.mark.parametrize(
    "content, message",
    [
        ({"data": []}, 'expected a list of questions under "data"'),
        ({"questions": PEOPLE}, 'expected a list of questions under "data"'),
        ({"data": [PEOPLE[0], {"question": "x"}]}, "question 2: expected image_id"),
        ({"data": [record("i1", "x", ["a"] * 9)]}, "question 1: expected 10 answers"),
        ({"data": [record("i1", "x", [1] * 10)]}, "question 1: expected 10 answers"),
    ],
)
def test_other_annotations_are_refused_by_name(root, content, message):
    path = write_json(root / "textvqa" / "TextVQA_0.5.1_val.json", content)
    with pytest.raises(ValueError) as refused:
        score(root, write(root, [("i1", "What number?" + OCR, "24")]))
    assert str(refused.value).startswith(str(path)) and message in str(refused.value)


def test_missing_annotations_say_where_to_get_them(tmp_path):
    (tmp_path / "textvqa").mkdir()
    with pytest.raises(FileNotFoundError, match=r"TextVQA_0\.5\.1_val\.json: get it from https"):
        score(tmp_path, tmp_path / "a.jsonl")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("textvqa")
    write_json(root / "textvqa" / "TextVQA_0.5.1_val.json", {"data": PEOPLE})
    return root


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=8))
def test_any_text_is_an_answer(written, texts):
    said = [("i1", "What number?" + OCR, text) for text in texts]
    assert 0 <= score(written, write(written, said)).headline <= 100
