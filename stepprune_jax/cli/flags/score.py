"""Flags of `stepprune-score`."""

import argparse
from collections.abc import Sequence

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.layout import DATA
from stepprune_jax.cli.command_line import Parser

NAME = "stepprune-score"
_DESCRIPTION = "Scores an answer file, without a model, an accelerator or jax."


def _build_parser() -> argparse.ArgumentParser:
    """Builds a parser with one sub-command per benchmark."""
    parser = Parser(prog=NAME, description=_DESCRIPTION)
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, benchmark in BENCHMARKS.items():
        add = commands.add_parser(name, help=benchmark.headline).add_argument
        add("--data", default=DATA, help="root of LLaVA's layout")
        add("--answers", required=True, help="answer file, JSON lines")
        add("--json", help="file for headline, parts and warnings")
        for option, values in benchmark.options.items():
            add(
                f"--{option}", choices=values, default=values[0], help=f"one of {', '.join(values)}"
            )
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the flags.

    Args:
        arguments: command-line arguments; None reads the arguments of the process.
    """
    return _build_parser().parse_args(arguments)
