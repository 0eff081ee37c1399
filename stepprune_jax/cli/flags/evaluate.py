"""Flags of `stepprune-eval` and `eval.py`."""

import argparse
from collections.abc import Sequence

from stepprune_jax.cli.choices import STAGES
from stepprune_jax.cli.command_line import Parser, add_config, program, split_config_changes

NAME = "eval.py"
_DESCRIPTION = """Evaluates policies: `stepprune-eval --config shapes --workdir runs/shapes`.

An evaluation has three stages, and `--stages` selects some of them. The stage generate answers the
questions of each benchmark. After an interruption, it continues with the unanswered questions. The
stage convert writes the answers in the formats of official programs and servers. The stage score
compares the answers with the annotations and writes the report. The benchmark `folder` is the test
split of `config.data.folder`, and `--config.eval.benchmarks=pope,mme` selects public benchmarks.
Flags can set any field of the configuration.
"""


def build_parser() -> Parser:
    """Builds the parser of the command line."""
    parser = Parser(prog=program(NAME), description=_DESCRIPTION, compiles=True)
    add_config(parser)
    help_text = "policy to use instead of the run's: a file, a shipped name, or hub:owner/name"
    parser.add_argument("--policy", help=help_text)
    stages = ",".join(STAGES)
    parser.add_argument("--stages", default=stages, help=f"comma-separated list of {stages}")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the flags, without the changes of the configuration's fields.

    Args:
        arguments: command-line arguments; None reads the arguments of the process.
    """
    flags, _ = split_config_changes(build_parser(), arguments)
    return flags
