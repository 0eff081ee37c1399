"""Formats tables in LaTeX."""

from collections.abc import Sequence

from stepprune_jax.evaluation.cells import Cell
from stepprune_jax.user_input import one_line

# Characters with a special meaning in LaTeX text, and their replacements.
_REPLACEMENTS = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "±": r"$\pm$",
        **{character: f"\\{character}" for character in "&%$#_{}"},
    }
)


def latex_cell(value: Cell) -> str:
    """Formats a value as a cell of a LaTeX table, escaping special characters; None is a dash."""
    return "--" if value is None else one_line(value).translate(_REPLACEMENTS)


def latex_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[Cell]], num_text_columns: int
) -> str:
    r"""Formats a table with the rules of the package booktabs, for the preamble's \usepackage.

    Args:
        title: title, a comment above the table; may be empty.
        header: names of the columns.
        rows: values of the cells.
        num_text_columns: number of left-aligned columns, which come first. All other columns are
            right-aligned.
    """
    alignments = "l" * num_text_columns + "r" * (len(header) - num_text_columns)
    lines = [f"% {one_line(title)}"] if title else []
    lines += [rf"\begin{{tabular}}{{{alignments}}}", r"\toprule", _latex_row(header), r"\midrule"]
    lines += [_latex_row(row) for row in rows]
    lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _latex_row(cells: Sequence[Cell]) -> str:
    r"""Joins cells by "&" and ends the row by "\\"."""
    return " & ".join(map(latex_cell, cells)) + r" \\"
