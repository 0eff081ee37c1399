import pytest
from benchmark_files import answer, write_lines

from stepprune_jax.benchmarks.answers import latest, read_answers


def test_order_text_and_ids_are_kept(tmp_path):
    rows = [answer(7, "Yes"), answer("b", ""), answer("a", "dö \u2028 \ud800")]
    read = read_answers(write_lines(tmp_path / "a.jsonl", rows))
    assert [(a.id, a.text) for a in read] == [("7", "Yes"), ("b", ""), ("a", "dö \u2028 \ud800")]
    assert read[0].prompt == "Is it there?" and read[2].fields["answer_id"] == "aa"


def test_windows_files_and_blank_lines_read_the_same(tmp_path):
    rows = [answer(1, "Yes"), answer(2, "Nö")]
    plain = write_lines(tmp_path / "a.jsonl", rows)
    windows = tmp_path / "b.jsonl"
    text = plain.read_text().replace("\n", "\r\n").replace("\\u00f6", "ö")
    windows.write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n\n")
    assert [a[1:] for a in read_answers(windows)] == [a[1:] for a in read_answers(plain)]


@pytest.mark.parametrize(
    "text",
    ["", '{"question_id": 1, "te', '{"text": "Yes"}', '{"question_id": 1, "text": null}', "[1]"],
)
def test_bad_files_are_refused_by_name(tmp_path, text):
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"a\.jsonl"):
        read_answers(file)


def test_broken_lines_can_be_skipped_and_are_told(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"question_id": 1, "te\n{"question_id": 2, "text": "No"}\n{"question_id"')
    broken = []
    (kept,) = read_answers(file, broken)
    assert kept.id == "2"
    assert ["line 1" in broken[0], "truncated" in broken[1], len(broken)] == [True, True, 2]


def test_the_last_answer_to_a_known_question_counts(tmp_path):
    rows = [answer(2, "old"), answer(9, "?"), answer(1, "one"), answer(2, "new")]
    warnings = []
    kept = latest(read_answers(write_lines(tmp_path / "a", rows)), ["1", "2", "3"], warnings)
    assert [(name, a.text) for name, a in kept.items()] == [("1", "one"), ("2", "new")]
    assert len(warnings) == 3
    with pytest.raises(ValueError, match="no answer is to a question"):
        latest([answer for answer in kept.values()], ["9"], [])
