"""Converts an answer file to the format of a benchmark's official program or server.

python -m stepprune_jax.benchmarks.convert mme --answers A.jsonl --out FOLDER
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.score import DATA
from stepprune_jax.command_line import Parser, exit_with


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    names = [name for name, benchmark in BENCHMARKS.items() if benchmark.convert is not None]
    parser = Parser(prog="stepprune_jax.benchmarks.convert", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("benchmark", choices=names, help="benchmark; others are scored directly")
    add("--data", default=DATA, help=f"root of LLaVA's layout (default: {DATA})")
    add("--answers", required=True, help="answer file, JSON lines")
    add("--out", required=True, help="file or folder to write")
    arguments = parser.parse_args(argv)
    convert = BENCHMARKS[arguments.benchmark].convert
    warnings = convert(Path(arguments.data), Path(arguments.answers), Path(arguments.out))
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    exit_with("stepprune_jax.benchmarks.convert", main)
