"""Flags of `stepprune-table`."""

import argparse
from collections.abc import Sequence

from stepprune_jax.cli.command_line import Parser

NAME = "stepprune-table"
_DESCRIPTION = "Merges the tables of runs on the same questions: `stepprune-table RUN...`."


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the flags.

    Args:
        arguments: command-line arguments; None reads the arguments of the process.
    """
    parser = Parser(prog=NAME, description=_DESCRIPTION)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folder of a run of eval.py")
    help_text = "folder for table.md, .tex, .csv and .json; created if it is absent"
    parser.add_argument("--out", help=help_text)
    help_text = "average the rows of runs that differ only in their seed: mean ± deviation (runs)"
    parser.add_argument("--mean", action="store_true", help=help_text)
    help_text = "also compare all rows with a method at the same budget, such as divprune"
    parser.add_argument("--against", metavar="METHOD", help=help_text)
    help_text = "print BibTeX entries of the runs' methods, without a RUN of all methods"
    parser.add_argument("--cite", action="store_true", help=help_text)
    return parser.parse_args(arguments)
