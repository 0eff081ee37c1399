import pytest
from benchmark_files import answer, write_json, write_lines

from stepprune_jax.benchmarks.textvqa import parse_question, score

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


def write(root, samples):
    rows = [answer(image, text, prompt + SUFFIX) for image, prompt, text in samples]
    return write_lines(root / "a.jsonl", rows)


@pytest.mark.parametrize(
    "prompt, question",
    [
        ("What is IT?" + SUFFIX, "what is it?"),
        ("What is it?" + OCR + SUFFIX, "what is it?"),
        ("Reference OCR token: a, b\nWhat is it?" + SUFFIX, "what is it?"),
        ("OCR tokens: a\nb\nQuestion: What\nis it? Short answer:", "what\nis it?"),
    ],
)
def test_the_question_is_parsed_from_each_form_of_prompt(prompt, question):
    assert parse_question(prompt) == question


@pytest.mark.parametrize("prompt", ["What is it?", "a\nb\nc", "OCR tokens: a b"])
def test_other_prompts_have_no_question(prompt):
    assert parse_question(prompt) is None


def test_figures_equal_those_computed_by_hand(root):
    samples = [
        ("i1", "What brand is it?" + OCR, "Acme, Inc."),  # three people: 0.9
        ("i1", "what NUMBER?" + OCR, "24."),  # ten: 1
        ("i2", "What brand is it?" + OCR, "0"),  # "none" is written as 0: 1
        ("i1", "What brand is it?" + OCR, "the 24?"),  # two, one of them with an article: 0.6
    ]
    result = score(root, write(root, samples))
    assert result.headline == pytest.approx(100 * (0.9 + 1 + 1 + 0.6) / 4)
    assert result.parts == {"samples": 4, "with_ocr": 4}
    assert len(result.warnings) == 2  # another size, and a repeated answer


def test_unanswered_questions_and_prompts_without_ocr_tokens_cause_warnings(root):
    result = score(root, write(root, [("i1", "What number?", "24")]))
    assert result.headline == 100 and result.parts == {"samples": 1, "with_ocr": 0}
    assert "1 answers to 1 of 3 questions" in result.warnings[1]
    assert result.warnings[2].startswith("1 of 1 prompts carry no OCR")


def test_the_error_names_the_line_of_an_answer_to_an_unknown_question(root):
    answers = write(root, [("i1", "What number?", "24"), ("i2", "What number?", "24")])
    with pytest.raises(ValueError, match=r"a.jsonl: line 2: "):
        score(root, answers)
