"""Scores an answer file, without a model, an accelerator or jax.

stepprune-score pope --data playground/data/eval --answers A.jsonl
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from stepprune_jax.benchmarks import BENCHMARKS, Benchmark, Score
from stepprune_jax.benchmarks.layout import DATA
from stepprune_jax.cli.command_line import Parser, exit_with, file_to_write
from stepprune_jax.data.json_files import JsonObject, write_json
from stepprune_jax.user_input import one_line

_NAME = "stepprune-score"


def _parser() -> argparse.ArgumentParser:
    """Builds a parser with one sub-command per benchmark."""
    parser = Parser(prog=_NAME, description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, benchmark in BENCHMARKS.items():
        add = commands.add_parser(name, help=benchmark.headline).add_argument
        add("--data", default=DATA, help=f"root of LLaVA's layout (default: {DATA})")
        add("--answers", required=True, help="answer file, JSON lines")
        add("--json", help="file for headline, parts and warnings")
        for option, values in benchmark.options.items():
            add(f"--{option}", choices=values, default=values[0], help=f"default: {values[0]}")
    return parser


def _lines(parts: JsonObject, prefix: str = "") -> list[str]:
    """Formats one line per number. A slash joins the names of nested numbers."""
    lines = []
    for name, value in parts.items():
        if isinstance(value, dict):
            lines += _lines(value, f"{prefix}{name}/")
        else:
            text = f"{value:.2f}" if isinstance(value, float) else value
            lines.append(f"  {one_line(prefix + name)}  {text}")
    return lines


def summary(benchmark: Benchmark, score: Score) -> str:
    """Formats a score as text."""
    headline = f"{benchmark.title}  {score.headline:.2f}  ({benchmark.headline})"
    warnings = [f"warning: {one_line(warning)}" for warning in score.warnings]
    return "\n".join([headline, *_lines(score.parts), *warnings])


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    benchmark = BENCHMARKS[flags.benchmark]
    options = {name: getattr(flags, name) for name in benchmark.options}
    out = flags.json and file_to_write("--json", flags.json)
    score = benchmark.score(Path(flags.data), Path(flags.answers), **options)
    if out:
        write_json(out, score._asdict())
    print(summary(benchmark, score))


def command() -> NoReturn:
    """Runs the command and exits."""
    exit_with(_NAME, main)


if __name__ == "__main__":
    command()
