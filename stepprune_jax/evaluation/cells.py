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


def markdown_rows(
    header: Sequence[str], rows: Sequence[Sequence[Cell]], num_text_columns: int = 0
) -> str:
    """Formats a Markdown table. Text columns are left-aligned, other columns are right-aligned.

    Args:
        header: names of the columns.
        rows: values of the cells, at least one row.
        num_text_columns: number of text columns, which come first. 0 treats the columns with a text
            in the first row as text columns.
    """
    if num_text_columns:
        is_text = [column < num_text_columns for column in range(len(rows[0]))]
    else:
        is_text = [isinstance(cell, str) for cell in rows[0]]
    alignments = ["---" if is_left_aligned else "---:" for is_left_aligned in is_text]
    lines = [[markdown_cell(name) for name in header], alignments]
    lines += [[markdown_cell(cell) for cell in row] for row in rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def csv_table(row_objects: Sequence[dict[str, Cell]]) -> str:
    """Formats objects with equal fields as CSV, with a header of the field names.

    Texts that a spreadsheet would run as a formula are escaped.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    header = list(row_objects[0])
    for row in (header, *(row_object.values() for row_object in row_objects)):
        writer.writerow([_escape_formula(cell) for cell in row])
    return buffer.getvalue()


def _escape_formula(cell: Cell) -> Cell:
    """Puts an apostrophe before a text that a spreadsheet would run as a formula."""
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell
