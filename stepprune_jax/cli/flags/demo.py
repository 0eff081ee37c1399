"""Flags of `stepprune-demo`."""

import argparse
from collections.abc import Sequence

from stepprune_jax.cli import model_flags
from stepprune_jax.cli.choices import DTYPES
from stepprune_jax.cli.command_line import Parser

NAME = "stepprune-demo"
_DESCRIPTION = (
    "Serves a browser page that compares answers from all visual tokens and from kept tokens."
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the flags.

    Args:
        arguments: command-line arguments; None reads the arguments of the process.
    """
    parser = Parser(prog=NAME, description=_DESCRIPTION, compiles=True)
    add = parser.add_argument
    model_flags.add_model_flags(add, model="shapes")
    help_text = "policy file, shipped name, or hub:owner/name; may be repeated"
    add("--policy", action="append", default=[], help=help_text)
    help_text = "FILE.py:CLASS, a pruner to offer beside the built-in ones; may be repeated"
    add("--pruner", action="append", default=[], help=help_text)
    help_text = "default: float32 for a small model of the shapes world, otherwise bfloat16"
    add("--dtype", choices=DTYPES, help=help_text)
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=7860, help="port to listen on")
    return parser.parse_args(arguments)
