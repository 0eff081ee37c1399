"""Merges the tables of runs on the same questions: `stepprune-table RUN...`.

`--mean` averages runs with different seeds, `--against` compares all rows with one method, and
`--cite` prints the BibTeX entries of the methods.
"""

from collections.abc import Sequence
from pathlib import Path

from stepprune_jax.cli.command_line import exit_with
from stepprune_jax.cli.flags.table import NAME, parse
from stepprune_jax.data.json_files import write_json
from stepprune_jax.evaluation.against import NAME as AGAINST
from stepprune_jax.evaluation.against import compare_with_method
from stepprune_jax.evaluation.cells import markdown_rows
from stepprune_jax.evaluation.citations import PAPERS, cite
from stepprune_jax.evaluation.formats import as_markdown, write_table
from stepprune_jax.evaluation.scores import read_scores
from stepprune_jax.evaluation.seeds import average_seeds
from stepprune_jax.evaluation.table import merge_scores
from stepprune_jax.registry import PRUNERS
from stepprune_jax.user_input import expect


def main(argv: Sequence[str] | None = None) -> None:
    """Merges the scores of several runs into one table, and prints the table.

    Args:
        argv: command-line arguments; None reads the arguments of the process.
    """
    flags = parse(argv)
    names = [str(Path(run)) for run in flags.runs]
    if flags.cite and not names:
        labels = [method.label for method in PRUNERS.values() if method.name in PAPERS]
        print(cite(labels), end="")
        return
    expect("RUN", "missing", bool(names), "at least one folder of a run of eval.py")
    runs = {name: read_scores(name) for name in names}
    table = merge_scores(average_seeds(runs) if flags.mean else runs)
    comparisons = compare_with_method(table, flags.against) if flags.against else []
    if flags.out is not None:
        write_table(Path(flags.out), table)
        if comparisons:
            write_json(Path(flags.out) / f"{AGAINST}.json", comparisons)
    if flags.cite:
        print(cite([row.method for row in table.rows]), end="")
    else:
        print(as_markdown(table), end="")
        if comparisons:
            header = [name.replace("_", " ") for name in comparisons[0]]
            rows = [[*comparison.values()] for comparison in comparisons]
            print(f"\n## Compared with {flags.against} at the same budget\n")
            print(markdown_rows(header, rows), end="")


def command() -> None:
    """Runs the command and exits with its status."""
    exit_with(NAME, main)


if __name__ == "__main__":
    command()
