"""Merges the tables of runs on the same questions: `stepprune-table RUN...`."""

from collections.abc import Sequence
from pathlib import Path

from stepprune_jax.cli.command_line import Parser, exit_with
from stepprune_jax.evaluation.scores import read_scores
from stepprune_jax.evaluation.table import NAME, as_markdown, merge_scores, write_table

_NAME = "stepprune-table"


def main(argv: Sequence[str] | None = None) -> None:
    """Merges the scores of several runs into one table, and prints the table.

    Args:
        argv: command-line arguments; None reads the arguments of the process.
    """
    parser = Parser(prog=_NAME, module_docstring=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run of eval.py")
    parser.add_argument("--out", help=f"folder for {NAME}.md, .csv and .json; it must exist")
    flags = parser.parse_args(argv)
    names = [str(Path(run)) for run in flags.runs]
    table = merge_scores({name: read_scores(name) for name in names})
    if flags.out is not None:
        write_table(Path(flags.out), table)
    print(as_markdown(table), end="")


def command() -> None:
    """Runs the command and exits with its status."""
    exit_with(_NAME, main)


if __name__ == "__main__":
    command()
