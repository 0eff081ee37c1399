"""Formats tables as Markdown and CSV, and escapes untrusted text in their cells."""

import csv
import io
import re
from collections.abc import Sequence
from html import escape

from stepprune_jax.user_input import one_line

# Special characters of Markdown. An underscore inside a word has no special meaning.
_MARKUP = re.compile(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)")
# Start of a text that a spreadsheet would run as a formula.
_FORMULA = re.compile(r"[\s\0]*[=+\-@]")
Cell = str | float | int | None


def markdown_cell(value: Cell) -> str:
    """Formats a value as a cell of a Markdown table, escaping markup; None is a dash."""
    text = "-" if value is None else one_line(value)
    return _MARKUP.sub(r"\\\g<0>", escape(text, quote=False))


def markdown_rows(header: Sequence[str], rows: Sequence[Sequence[Cell]], texts: int = 0) -> str:
    """Formats a Markdown table with left-aligned text columns and right-aligned other columns.

    Args:
        header: names of the columns.
        rows: values of the cells, at least one row.
        texts: number of text columns, which come first. 0 selects the columns with a text in the
            first row.
    """
    is_text = [
        column < texts if texts else isinstance(value, str) for column, value in enumerate(rows[0])
    ]
    lines = [[markdown_cell(name) for name in header], ["---" if x else "---:" for x in is_text]]
    lines += [[markdown_cell(value) for value in row] for row in rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def csv_table(table: Sequence[dict[str, Cell]]) -> str:
    """Formats objects with equal fields as CSV, and escapes texts that look like formulas."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in (list(table[0]), *(row.values() for row in table)):
        writer.writerow([_no_formula(value) for value in row])
    return out.getvalue()


def _no_formula(value: Cell) -> Cell:
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value
