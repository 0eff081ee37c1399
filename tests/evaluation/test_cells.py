"""Names from outside come out as text in every format of a report."""

import csv
import io
import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepprune_jax.data.llava import Question
from stepprune_jax.evaluation.accuracy import accuracy_by_family, markdown_table, write_accuracy
from stepprune_jax.evaluation.cells import csv_table, markdown_cell
from stepprune_jax.evaluation.names import ALL
from stepprune_jax.evaluation.records import Records

HOSTILE = (
    "a|b",
    "two\nlines",
    "<script>alert(1)</script>",
    "[x](http://y)",
    "`c` *d* _e_",
    "method",
)


def shown(cell):
    """What a Markdown cell shows."""
    return unescape(re.sub(r"\\([^a-zA-Z0-9\s])", r"\1", cell))


@settings(max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20))
def test_any_text_is_one_cell_that_shows_it(text):
    cell = markdown_cell(text)
    assert not re.search(r"(?<!\\)(?:\\\\)*[|`*\[\]]", cell) and not set("<>\n\r") & set(cell)
    assert shown(cell) == " ".join(text.split())
    (row,) = csv.DictReader(io.StringIO(csv_table([{"x": text, "y": 1}])))
    assert row["x"] in (text, f"'{text}")
    assert not row["x"].lstrip().startswith(("=", "+", "-", "@"))


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t=", " ="])
def test_texts_are_no_formulas_and_numbers_stay_numbers(start):
    lines = csv_table([{"method": f"{start}cmd()", "change": -1.5}]).splitlines()
    assert lines == ["method,change", f"'{start}cmd(),-1.5"]


def test_the_header_of_families_is_escaped(tmp_path):
    ask = [Question(str(i), Path("a.png"), "?", name) for i, name in enumerate(HOSTILE)]
    count = len(ask)
    kept, right = np.ones(count, np.int32), np.ones(count, bool)
    all_tokens = Records(ALL, "exact", 1, 1, kept, kept[:, None], ["a"] * count, right)
    families = accuracy_by_family([all_tokens], ask)
    write_accuracy(tmp_path, [{"method": "=all|<b>", "k": 1}], families)
    header, line, row = (tmp_path / "table_by_family.md").read_text().splitlines()
    cells = re.split(r" (?<!\\)\| ", header.strip("| "))
    assert [shown(cell) for cell in cells[3:]] == sorted(" ".join(x.split()) for x in HOSTILE)
    assert "<script>" not in header and line.count("|") == row.count("|") == 3 + count + 1
    assert (tmp_path / "table.md").read_text() == markdown_table([{"method": "=all|<b>", "k": 1}])
    assert r"| =all\|&lt;b&gt; | 1 |" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "table.csv").read_text() == "method,k\n'=all|<b>,1\n"
