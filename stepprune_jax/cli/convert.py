"""Converts an answer file to the format of a benchmark's official program or server.

stepprune-convert mme --answers A.jsonl --out FOLDER
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.layout import DATA
from stepprune_jax.cli.command_line import Parser, check_creatable, exit_with

_NAME = "stepprune-convert"


def main(argv: Sequence[str] | None = None) -> None:
    """Converts an answer file to a benchmark's submission format, and prints warnings.

    Args:
        argv: command-line arguments; None reads the arguments of the process.
    """
    converters = {
        name: benchmark.convert
        for name, benchmark in BENCHMARKS.items()
        if benchmark.convert is not None
    }
    parser = Parser(prog=_NAME, module_docstring=__doc__)
    add = parser.add_argument
    add(
        "benchmark",
        choices=[*converters],
        help="benchmarks without a format here are scored directly",
    )
    add("--data", default=DATA, help=f"root of LLaVA's layout (default: {DATA})")
    add("--answers", required=True, help="answer file, JSON lines")
    add("--out", required=True, help="file or folder to write")
    flags = parser.parse_args(argv)
    is_folder = not BENCHMARKS[flags.benchmark].submission_suffix
    check_creatable("--out", flags.out, is_folder=is_folder)
    convert = converters[flags.benchmark]
    for warning in convert(Path(flags.data), Path(flags.answers), Path(flags.out)):
        print(f"warning: {warning}", file=sys.stderr)
    print(f"wrote {flags.out}")


def command() -> None:
    """Runs the command and exits with its status."""
    exit_with(_NAME, main)


if __name__ == "__main__":
    command()
