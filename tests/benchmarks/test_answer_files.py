import pytest
from benchmark_files import answer, write_lines

from stepprune_jax.benchmarks.answers import read_answers


def test_order_text_and_ids_are_kept(tmp_path):
    rows = [answer(7, "Yes"), answer("b", ""), answer("a", "dö \u2028 \ud800")]
    read = read_answers(write_lines(tmp_path / "a.jsonl", rows))
    assert [(a.id, a.text) for a in read] == [("7", "Yes"), ("b", ""), ("a", "dö \u2028 \ud800")]
    assert read[0].prompt == "Is it there?" and read[2].fields["answer_id"] == "aa"


@pytest.mark.parametrize("text", ["", '{"question_id": 1, "te', '{"question_id": 1, "text": null}'])
def test_bad_files_are_refused_by_name(tmp_path, text):
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"a\.jsonl"):
        read_answers(file)
