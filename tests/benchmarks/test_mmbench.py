import csv
import io
import zipfile
from functools import partial
from xml.etree import ElementTree

import pytest
from benchmark_files import answer, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.mmbench import (
    convert,
    option_letter,
    options_of,
    read_rows,
    score,
    xlsx,
)

DEV = "mmbench_dev_20230712.tsv"
TEST = "mmbench_test_20230712.tsv"


def row(index, options, letter, category="north", coarse="fine", **fields):
    """Returns a row of the question file by column."""
    texts = dict.fromkeys("ABCD", "") | dict(zip("ABCD", options, strict=False))
    first_columns = {"index": index, "question": "Which way?", "hint": ""}
    last_columns = {"answer": letter, "category": category, "image": "/9j/", "source": "made"}
    last_columns |= {"l2-category": coarse, "comment": "", "split": "dev"}
    return first_columns | texts | last_columns | fields


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]), dialect="excel-tab", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


# Two rotations of a question with two options, and three rotations of a question with four options,
# whose last option is not rotated.
ROWS = [
    row(7, ["up", "down"], "A"),
    row(8, ["cat", "dog", "cow", "none of them"], "C", "animal", "coarse"),
    row(1_000_007, ["down", "up"], "B"),
    row(1_000_008, ["dog", "cow", "cat", "none of them"], "B", "animal", "coarse"),
    row(2_000_008, ["cow", "cat", "dog", "none of them"], "A", "animal", "coarse"),
]
CORRECT = [(7, "A"), (8, "C"), (1_000_007, "B"), (1_000_008, "B"), (2_000_008, "A")]


@pytest.fixture
def root(tmp_path):
    write_rows(tmp_path / "mmbench" / DEV, ROWS)
    return tmp_path


def write(root, pairs, **fields):
    rows = [{**answer(index, text), "round_id": 0, **fields} for index, text in pairs]
    return write_lines(root / "a.jsonl", rows)


def sheet_of(content):
    """Returns type and text of each cell of a workbook by name, such as "A1"."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in archive.namelist():
            ElementTree.fromstring(archive.read(name))
        tree = ElementTree.fromstring(archive.read("xl/worksheets/sheet1.xml"))
    cells = [cell for cell in tree.iter() if cell.tag.endswith("}c")]
    return {c.get("r"): (c.get("t", "n"), "".join(c.itertext())) for c in cells}


@pytest.mark.parametrize(
    "text, letter",
    [
        ("(B)", "B"),
        ("B。", None),  # the full-width full stop is not removed
        ("b", None),
        ("B is what I think here", None),  # not among the last four words
        ("I think B is right here", "B"),
        ("B I see it in the B", None),  # the first occurrence counts
        ("A or B", None),
        ("A dog", "A"),  # a single letter takes precedence over the text of an option
        ("Z or B", "B"),
        ("Not any: Z", "Z"),
        ("B or C? The correct answer is **C**", "C"),
        ("the ANSWER is c, A or B", "C"),
        ("B or C. answer is E", None),
        ("a dog", "B"),
        ("dog and cat", None),
        ("a dog " * 10, None),  # longer than twice all options
    ],
)
def test_option_letters_equal_those_chosen_by_hand(text, letter):
    assert option_letter(text, {"A": "cat", "B": "Dog", "C": "a cow", "D": "bird"}) == letter


def test_only_letters_that_are_options_count():
    assert option_letter("the answer is C", {"A": "cat", "B": "dog"}) is None
    # C is not an option, so exactly one option letter occurs.
    assert option_letter("A, not C", {"A": "cat", "B": "dog"}) == "A"


def test_cells_are_read_as_by_pandas(tmp_path):
    options = ['say "a"', "b\tc", "n/a", "none"]
    cells = row(1, options, "A", question="one\ntwo", image="x" * 300_000)
    path = write_rows(tmp_path / "t.tsv", [cells])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"dev\n", b"dev\r\n"))
    ((_, cells),) = read_rows(path)
    assert cells["question"] == "one\ntwo" and cells["split"] == "dev" and cells["hint"] is None
    assert options_of(cells) == {"A": 'say "a"', "B": "b\tc", "D": "none"}
    assert len(cells["image"]) == 300_000


def test_the_image_column_may_contain_the_index_of_another_row(tmp_path):
    rows = [row(8, "xy", "A", image=1234), row(1234, "xy", "A"), row(9, "xy", "A", image="1234")]
    questions = BENCHMARKS["mmbench"].read_questions
    write_rows(tmp_path / "mmbench" / DEV, rows)
    assert [question.image for question in questions(tmp_path)] == [b"\xff\xd8\xff"] * 3
    for index in (5, 8):  # a missing row, and a row whose image column is also an index
        write_rows(tmp_path / "mmbench" / DEV, [*rows, row(7, "xy", "A", image=index)])
        with pytest.raises(ValueError, match=rf"{DEV}: index 7: .* or the index of a row with one"):
            questions(tmp_path)


def test_a_question_is_correct_if_all_its_rotations_are_correct(root):
    result = score(root, write(root, CORRECT))
    assert (result.headline, result.parts["letter_only"]) == (100, 100)
    # The second question has a wrong rotation. The first is correct, but one of its answers is not
    # exactly the letter.
    pairs = [*CORRECT[:4], (2_000_008, "B"), (7, "(A)")]
    result = score(root, write(root, pairs))
    assert result.headline == 50
    assert result.parts == {
        "category": {"animal": 0, "north": 100},
        "l2-category": {"coarse": 0, "fine": 100},
        "letter_only": 0,
        "one_round": 100,
        "one_round_letter_only": 50,
        "questions": 2,
        "rows": 5,
    }
    assert len(result.warnings) == 3  # two other sizes, and a repeated answer
    assert score(root, write(root, CORRECT[:4])).headline == 50  # an unanswered row is wrong


def test_answers_to_rotations_of_llavas_program_are_refused(root):
    answers = write(root, CORRECT, round_id=1)
    for stage in (score, partial(convert, out=root / "s.xlsx")):
        with pytest.raises(ValueError, match="--all-rounds"):
            stage(root, answers)


def test_answers_to_the_test_split_are_refused_with_the_address_of_the_server(root):
    server = r"convert mmbench` and upload it at https://mmbench"
    with pytest.raises(ValueError, match=server):
        score(root, write(root, [(3, "A")]))
    write_rows(root / "mmbench" / DEV, [*ROWS, row(9, ["up", "down"], "")])
    with pytest.raises(ValueError, match=f"index 9: .*{server}"):
        score(root, write(root, CORRECT))


def test_the_chinese_file_may_be_in_the_folder_of_llavas_documentation(tmp_path):
    rows = [row(7, ["上", "下"], "A"), row(1_000_007, ["下", "上"], "B")]
    write_rows(tmp_path / "mmbench" / "mmbench_dev_cn_20231003.tsv", rows)
    result = BENCHMARKS["mmbench_cn"].score(
        tmp_path, write(tmp_path, [(7, "上"), (1_000_007, "B")])
    )
    assert (result.headline, result.parts["letter_only"]) == (100, 0)


def test_a_submission_equals_the_one_written_by_hand(root):
    pairs = [(7, "A"), (8, "<C> & more"), (7, "B"), (1_000_007, ""), (99, "D")]
    out = root / "new" / "s.xlsx"
    warnings = convert(root, write(root, pairs), out)
    cells = sheet_of(out.read_bytes())
    names = ["index", "question", "A", "B", "C", "D", "prediction", "answer", "split"]
    assert [cells[f"{column}1"] for column in "ABCDEFGHI"] == [("inlineStr", n) for n in names]
    assert cells["A2"] == ("n", "7") and cells["A6"] == ("n", "2000008")
    assert cells["C2"] == ("inlineStr", "up") and "E2" not in cells and "F2" not in cells
    assert [cells.get(f"G{n}") for n in range(2, 7)] == [
        ("inlineStr", "B"),  # the last answer
        ("inlineStr", "<C> & more"),
        ("inlineStr", ""),
        None,  # not answered
        None,
    ]
    assert cells["H3"] == ("inlineStr", "C") and cells["I6"] == ("inlineStr", "dev")
    assert len(warnings) == 3  # repeated, unknown and missing answers


def test_a_submission_has_the_rows_of_the_answered_file(root):
    test_row = row(3, ["up", "down"], "")
    del test_row["answer"]
    write_rows(root / "mmbench" / TEST, [test_row])
    convert(root, write(root, [(3, "A")]), root / "s.xlsx")
    cells = sheet_of((root / "s.xlsx").read_bytes())
    assert cells["G1"] == ("inlineStr", "prediction") and cells["G2"] == ("inlineStr", "A")
    assert cells["H1"] == ("inlineStr", "split") and "A3" not in cells


def test_cells_contain_text_without_characters_that_xml_lacks():
    pairs = {
        "=1+1": "=1+1",
        "#N/A": "#N/A",
        " two  blanks ": " two  blanks ",
        "a\nb\r\nc\td": "a\nb\nc\td",
        "\x00\x0b\ufffe\ud800é\U0001f600": "é\U0001f600",
        "x" * 40_000: "x" * 32_767,
    }
    cells = sheet_of(xlsx([[*pairs, None, 7]]))
    assert [cells[f"{column}1"] for column in "ABCDEF"] == [
        ("inlineStr", text) for text in pairs.values()
    ]
    assert "G1" not in cells and cells["H1"] == ("n", "7")


@settings(max_examples=25)
@given(st.text(), st.lists(st.text(min_size=1), min_size=2, max_size=4))
def test_any_text_can_be_scored_and_written(text, texts):
    options = dict(zip("ABCD", texts, strict=False))
    assert option_letter(text, options) in {None, "Z", *options}
    assert list(sheet_of(xlsx([[text]]))) == ["A1"]
