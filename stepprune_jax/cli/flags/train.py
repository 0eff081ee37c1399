"""Flags of `stepprune-train` and `train.py`."""

import argparse
from collections.abc import Sequence

from stepprune_jax.cli.command_line import Parser, add_config, program, split_config_changes

NAME = "train.py"
_DESCRIPTION = """Trains a selector: `stepprune-train --config shapes --workdir runs/shapes`.

Any field of the configuration can be set by a flag, for example `--config.optimizer.lr=1e-3`. The
same command resumes an interrupted run. The exit status of an interrupted run is 130 after Ctrl-C
and 143 after SIGTERM. `--dry_run` reports what a run would cost. To use several processes, start
each with the same command (docs/devices.md).
"""


def build_parser() -> Parser:
    """Builds the parser of the command line."""
    parser = Parser(prog=program(NAME), description=_DESCRIPTION, compiles=True)
    add_config(parser)
    help_text = "check configuration and data, report memory, operations and hours, and exit"
    parser.add_argument("--dry_run", action="store_true", help=help_text)
    help_text = "with --dry_run: devices to plan for, present or not: h200:2, a6000:2, v5e:2x4"
    parser.add_argument("--target", help=help_text)
    parser.add_argument("--profile", metavar="FIRST:LAST", help="updates to profile, from 1")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the flags, without the changes of the configuration's fields.

    Args:
        arguments: command-line arguments; None reads the arguments of the process.
    """
    flags, _ = split_config_changes(build_parser(), arguments)
    return flags
