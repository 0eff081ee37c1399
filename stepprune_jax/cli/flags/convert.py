"""Flags of `stepprune-convert`."""

import argparse
from collections.abc import Sequence

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.layout import DATA
from stepprune_jax.cli.command_line import Parser

NAME = "stepprune-convert"
_DESCRIPTION = "Converts an answer file to the format of a benchmark's official program or server."


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the flags.

    Args:
        arguments: command-line arguments; None reads the arguments of the process.
    """
    names = [name for name, benchmark in BENCHMARKS.items() if benchmark.convert is not None]
    parser = Parser(prog=NAME, description=_DESCRIPTION)
    add = parser.add_argument
    add(
        "benchmark",
        choices=names,
        help="benchmarks without a format here are scored directly",
    )
    add("--data", default=DATA, help="root of LLaVA's layout")
    add("--answers", required=True, help="answer file, JSON lines")
    add("--out", required=True, help="file or folder to write")
    return parser.parse_args(arguments)
