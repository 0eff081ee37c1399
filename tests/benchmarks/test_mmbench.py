import io
import re
import zipfile
from functools import partial
from xml.etree import ElementTree

import pytest
from benchmark_files import answer, write_lines
from hypothesis import given
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

COLUMNS = (
    *("index", "question", "hint", "A", "B", "C", "D", "answer", "category", "image"),
    *("source", "l2-category", "comment", "split"),
)
DEV = "mmbench_dev_20230712.tsv"
TEST = "mmbench_test_20230712.tsv"


def row(index, options, right, category="north", coarse="fine", question="Which way?"):
    texts = [*options, "", "", ""][:4]
    return (index, question, "", *texts, right, category, "/9j/", "made", coarse, "", "dev")


def write_rows(path, rows, columns=COLUMNS):
    def quoted(text):
        return '"' + text.replace('"', '""') + '"' if re.search(r'["\n\t]', text) else text

    kept = [COLUMNS.index(column) for column in columns]
    lines = [columns, *([str(cells[k]) for k in kept] for cells in rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join("\t".join(map(quoted, cells)) + "\n" for cells in lines)
    path.write_text(content, encoding="utf-8")
    return path


# Two rotations of a question with two options; three of one with four, whose last option stays.
ROWS = [
    row(7, ["up", "down"], "A"),
    row(8, ["cat", "dog", "cow", "none of them"], "C", "animal", "coarse"),
    row(1_000_007, ["down", "up"], "B"),
    row(1_000_008, ["dog", "cow", "cat", "none of them"], "B", "animal", "coarse"),
    row(2_000_008, ["cow", "cat", "dog", "none of them"], "A", "animal", "coarse"),
]
RIGHT = [(7, "A"), (8, "C"), (1_000_007, "B"), (1_000_008, "B"), (2_000_008, "A")]


@pytest.fixture
def root(tmp_path):
    write_rows(tmp_path / "mmbench" / DEV, ROWS)
    return tmp_path


def write(root, said, **fields):
    rows = [{**answer(index, text), "round_id": 0, **fields} for index, text in said]
    return write_lines(root / "a.jsonl", rows)


def sheet_of(content):
    """The cells of a workbook by place, each with its type, read as any XML."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in archive.namelist():
            ElementTree.fromstring(archive.read(name))
        tree = ElementTree.fromstring(archive.read("xl/worksheets/sheet1.xml"))
    cells = [cell for cell in tree.iter() if cell.tag.endswith("}c")]
    return {c.get("r"): (c.get("t", "n"), "".join(c.itertext())) for c in cells}


@pytest.mark.parametrize(
    "text, letter",
    [
        ("B", "B"),
        ("B.", "B"),
        ("(B)", "B"),
        ("B) dog", "B"),
        ("B。", None),  # the full-width stop is no mark
        ("b", None),
        ("", None),
        ("The answer: B", "B"),
        ("B is what I think here", None),  # not among the last four words
        ("I think B is right here", "B"),
        ("B I see it in the B", None),  # its first place counts
        ("A or B", None),
        ("A dog", "A"),  # a lone letter goes before the text
        ("Z", "Z"),
        ("Z or B", "B"),
        ("Not any: Z", "Z"),
        ("B or C? The correct answer is **C**", "C"),
        ("the ANSWER is c, A or B", "C"),
        ("B or C. answer is E", None),
        ("a dog", "B"),
        ("DOG!", "B"),
        ("dog and cat", None),
        ("a dog " * 10, None),  # longer than twice all options
    ],
)
def test_letters_by_hand(text, letter):
    assert option_letter(text, {"A": "cat", "B": "Dog", "C": "a cow", "D": "bird"}) == letter


def test_only_letters_that_are_options_count():
    assert option_letter("C", {"A": "cat", "B": "dog"}) is None
    assert option_letter("the answer is C", {"A": "cat", "B": "dog"}) is None
    # Not C, hence exactly one letter is named.
    assert option_letter("A, not C", {"A": "cat", "B": "dog"}) == "A"


def test_empty_cells_are_those_of_pandas(tmp_path):
    texts = ["None", "NA", "none", "n/a"]
    path = write_rows(tmp_path / "t.tsv", [row(1, texts, "C")])
    (found,) = read_rows(path)
    assert options_of(found) == {"C": "none"}
    assert found["hint"] is None and found["answer"] == "C"


def test_fields_may_hold_newlines_quotes_and_long_pictures(tmp_path):
    cells = list(row(1, ['say "a"', "b\tc"], "A", question="one\ntwo"))
    cells[COLUMNS.index("image")] = "x" * 300_000
    path = write_rows(tmp_path / "t.tsv", [cells])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"dev\n", b"dev\r\n"))
    (found,) = read_rows(path)
    assert found["question"] == "one\ntwo" and found["split"] == "dev"
    assert options_of(found) == {"A": 'say "a"', "B": "b\tc"}
    assert len(found["image"]) == 300_000


def test_a_question_counts_if_all_its_rotations_are_right(root):
    found = score(root, write(root, RIGHT))
    assert (found.headline, found.parts["letter_only"]) == (100, 100)
    # One wrong rotation of the second question; the first is right, but not by its bare letters.
    said = [*RIGHT[:4], (2_000_008, "B"), (7, "(A)")]
    found = score(root, write(root, said))
    assert found.headline == 50
    assert found.parts == {
        "category": {"animal": 0, "north": 100},
        "l2-category": {"coarse": 0, "fine": 100},
        "letter_only": 0,
        "one_round": 100,
        "one_round_letter_only": 50,
        "questions": 2,
        "rows": 5,
    }
    assert len(found.warnings) == 3  # two other sizes, two answers to one row
    assert score(root, write(root, RIGHT[:4])).headline == 50  # an unanswered row is wrong


def test_rotations_made_by_the_program_are_refused(root):
    answers = write(root, RIGHT, round_id=1)
    for stage in (score, partial(convert, out=root / "s.xlsx")):
        with pytest.raises(ValueError, match="--all-rounds"):
            stage(root, answers)


@pytest.mark.parametrize("name", ["mmbench", "mmbench_cn"])
def test_the_test_split_is_refused_with_the_way_to_the_server(tmp_path, name):
    benchmark = BENCHMARKS[name]
    dev = tmp_path / benchmark.question_files[0]
    dev.parent.mkdir()
    server = rf"convert {name}` and upload it at https://mmbench"
    with pytest.raises(FileNotFoundError, match=server):
        benchmark.score(tmp_path, write(tmp_path, RIGHT))
    write_rows(dev, ROWS)
    with pytest.raises(ValueError, match=server):
        benchmark.score(tmp_path, write(tmp_path, [(3, "A")]))
    write_rows(dev, [*ROWS, row(9, ["up", "down"], "")])
    with pytest.raises(ValueError, match=f"index 9: .*{server}"):
        benchmark.score(tmp_path, write(tmp_path, RIGHT))


@pytest.mark.parametrize("folder", ["mmbench", "mmbench_cn"])
def test_the_chinese_file_is_found_in_either_folder(tmp_path, folder):
    rows = [row(7, ["上", "下"], "A", question="哪个方向?"), row(1_000_007, ["下", "上"], "B")]
    write_rows(tmp_path / folder / "mmbench_dev_cn_20231003.tsv", rows)
    found = BENCHMARKS["mmbench_cn"].score(tmp_path, write(tmp_path, [(7, "上"), (1_000_007, "B")]))
    assert (found.headline, found.parts["letter_only"]) == (100, 0)


def test_submission_by_hand(root):
    said = [(7, "A"), (8, "<C> & more"), (7, "B"), (1_000_007, ""), (99, "D")]
    out = root / "new" / "s.xlsx"
    warnings = convert(root, write(root, said), out)
    cells = sheet_of(out.read_bytes())
    names = ["index", "question", "A", "B", "C", "D", "prediction", "answer", "split"]
    assert [cells[f"{column}1"] for column in "ABCDEFGHI"] == [("inlineStr", n) for n in names]
    assert cells["A2"] == ("n", "7") and cells["A6"] == ("n", "2000008")
    assert cells["C2"] == ("inlineStr", "up") and "E2" not in cells and "F2" not in cells
    assert [cells.get(f"G{n}") for n in range(2, 7)] == [
        ("inlineStr", "B"),  # the later answer
        ("inlineStr", "<C> & more"),
        ("inlineStr", ""),
        None,  # not answered
        None,
    ]
    assert cells["H3"] == ("inlineStr", "C") and cells["I6"] == ("inlineStr", "dev")
    assert len(warnings) == 3  # repeated, unknown and missing answers


def test_the_file_of_the_answered_questions_is_submitted(root):
    columns = [column for column in COLUMNS if column != "answer"]
    write_rows(root / "mmbench" / TEST, [row(3, ["up", "down"], "")], columns)
    out = root / "s.xlsx"
    convert(root, write(root, [(3, "A")]), out)
    cells = sheet_of(out.read_bytes())
    names = ["index", "question", "A", "B", "C", "D", "prediction", "split"]
    assert [text for place, (_, text) in cells.items() if re.fullmatch("[A-Z]1", place)] == names
    assert cells["G2"] == ("inlineStr", "A")
    with pytest.raises(ValueError, match="no answer is to a question"):
        convert(root, write(root, [(4, "A")]), root / "s.xlsx")


def test_cells_keep_what_xml_can_hold():
    texts = [
        "=1+1",
        "#N/A",
        " two  blanks ",
        "a\nb\r\nc\td",
        "\x00\x0b\ufffe\ud800é\U0001f600",
        "x" * 40_000,
    ]
    cells = sheet_of(xlsx([[*texts, None, 7]]))
    assert [cells.get(f"{column}1") for column in "ABCDEFGH"] == [
        ("inlineStr", "=1+1"),
        ("inlineStr", "#N/A"),
        ("inlineStr", " two  blanks "),
        ("inlineStr", "a\nb\nc\td"),
        ("inlineStr", "é\U0001f600"),
        ("inlineStr", "x" * 32_767),
        None,
        ("n", "7"),
    ]


@given(st.text(), st.lists(st.text(min_size=1), min_size=2, max_size=4))
def test_any_text_is_an_answer(text, texts):
    options = dict(zip("ABCD", texts, strict=False))
    assert option_letter(text, options) in {None, "Z", *options}
    assert list(sheet_of(xlsx([[text]]))) == ["A1"]
