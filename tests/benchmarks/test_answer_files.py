import pytest
from benchmark_files import answer, write_lines

from stepprune_jax.benchmarks.answers import read_answers


def test_answers_are_read_in_order_with_unchanged_texts(tmp_path):
    rows = [answer(7, "Yes"), answer("b", ""), answer("a", "dö \u2028 \ud800")]
    answers = read_answers(write_lines(tmp_path / "a.jsonl", rows))
    expected = [("7", "Yes"), ("b", ""), ("a", "dö \u2028 \ud800")]
    assert [(answer.id, answer.text) for answer in answers] == expected
    assert answers[0].prompt == "Is it there?" and answers[2].fields["answer_id"] == "aa"


@pytest.mark.parametrize("text", ["", '{"question_id": 1, "te', '{"question_id": 1, "text": null}'])
def test_the_error_names_a_bad_file(tmp_path, text):
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"a\.jsonl"):
        read_answers(file)
