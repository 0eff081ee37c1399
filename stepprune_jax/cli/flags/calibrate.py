"""Flags of `stepprune-calibrate`."""

import argparse
from collections.abc import Sequence

from stepprune_jax.cli import model_flags
from stepprune_jax.cli.choices import DTYPES
from stepprune_jax.cli.command_line import Parser, integer_from

NAME = "stepprune-calibrate"
_DESCRIPTION = (
    "Measures how many tokens a policy keeps on average at each stop bias, for `--mean_budget`."
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the flags.

    Args:
        arguments: command-line arguments; None reads the arguments of the process.
    """
    parser = Parser(prog=NAME, description=_DESCRIPTION, compiles=True)
    add = parser.add_argument
    add("--policy", required=True, help="policy file, shipped name, or hub:owner/name")
    model_flags.add_model_flags(add)
    add("--data", required=True, help="folder with SPLIT.jsonl and images/")
    add("--split", default="validation", help="split to read")
    help_text = "number of questions, evenly spaced in the split; 0 reads all questions"
    add("--questions", type=integer_from(0), default=256, help=help_text)
    add("--batch_size", type=integer_from(1), default=16, help="questions per batch")
    add("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the model")
    add("--out", required=True, help="policy file to write")
    return parser.parse_args(arguments)
