"""Flags of `stepprune-export`."""

import argparse
from collections.abc import Sequence

from stepprune_jax.cli.command_line import Parser

NAME = "stepprune-export"
_DESCRIPTION = (
    "Exports the policy of a run as one file with a model card, without the frozen model."
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the flags.

    Args:
        arguments: command-line arguments; None reads the arguments of the process.
    """
    parser = Parser(prog=NAME, description=_DESCRIPTION)
    parser.add_argument("workdir", help="folder of a run of train.py")
    parser.add_argument("--out", required=True, help="folder to write to")
    help_text = "default stop bias of the exported policy; a higher bias keeps fewer tokens"
    parser.add_argument("--stop_bias", type=float, default=0.0, help=help_text)
    help_text = "upload both files to the Hugging Face hub"
    parser.add_argument("--push", metavar="OWNER/NAME", help=help_text)
    help_text = "with --push: create a private repository"
    parser.add_argument("--private", action="store_true", help=help_text)
    return parser.parse_args(arguments)
