"""Flags of `stepprune-check`."""

import argparse
from collections.abc import Sequence

from stepprune_jax.cli.command_line import Parser, integer_from

NAME = "stepprune-check"
_DESCRIPTION = "Checks a data folder before training: `stepprune-check DIR`."


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the flags.

    Args:
        arguments: command-line arguments; None reads the arguments of the process.
    """
    parser = Parser(prog=NAME, description=_DESCRIPTION)
    parser.add_argument("folder", help="folder with train.json or SPLIT.jsonl, and images/")
    parser.add_argument("--faults", type=integer_from(0), default=10, help="faults shown per file")
    return parser.parse_args(arguments)
