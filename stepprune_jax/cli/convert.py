"""Converts an answer file to the format of a benchmark's official program or server.

stepprune-convert mme --answers A.jsonl --out FOLDER
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.cli.command_line import check_creatable, exit_with
from stepprune_jax.cli.flags.convert import NAME, parse


def main(argv: Sequence[str] | None = None) -> None:
    """Converts an answer file to a benchmark's submission format, and prints warnings.

    Args:
        argv: command-line arguments; None reads the arguments of the process.
    """
    flags = parse(argv)
    is_folder = not BENCHMARKS[flags.benchmark].submission_suffix
    check_creatable("--out", flags.out, is_folder=is_folder)
    BENCHMARKS[flags.benchmark].check_packages()
    convert = BENCHMARKS[flags.benchmark].convert
    assert convert is not None  # The parser offers only benchmarks with a format.
    for warning in convert(Path(flags.data), Path(flags.answers), Path(flags.out)):
        print(f"warning: {warning}", file=sys.stderr)
    print(f"wrote {flags.out}")


def command() -> None:
    """Runs the command and exits with its status."""
    exit_with(NAME, main)


if __name__ == "__main__":
    command()
