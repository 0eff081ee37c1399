"""Scores an answer file, without a model, an accelerator or jax.

stepprune-score pope --data playground/data/eval --answers A.jsonl
"""

from collections.abc import Sequence
from pathlib import Path

from stepprune_jax.benchmarks import BENCHMARKS, Benchmark, Score
from stepprune_jax.cli.command_line import exit_with, file_to_write
from stepprune_jax.cli.flags.score import NAME, parse
from stepprune_jax.data.json_files import JsonObject, write_json
from stepprune_jax.user_input import one_line


def _format_numbers(numbers: JsonObject, prefix: str = "") -> list[str]:
    """Formats nested numbers, such as the accuracy of each category, with one line per number.

    Args:
        numbers: numbers and nested objects by name.
        prefix: names of the enclosing objects, joined and ended by slashes.

    Returns:
        Lines such as "  color/accuracy  61.50".
    """
    lines = []
    for name, value in numbers.items():
        if isinstance(value, dict):
            lines += _format_numbers(value, f"{prefix}{name}/")
        else:
            number = f"{value:.2f}" if isinstance(value, float) else value
            lines.append(f"  {one_line(prefix + name)}  {number}")
    return lines


def summary(benchmark: Benchmark, score: Score) -> str:
    """Formats a score as text: the headline number, its parts, and warnings.

    Args:
        benchmark: the benchmark.
        score: result of `benchmark.score`.
    """
    headline = f"{benchmark.title}  {score.headline:.2f}  ({benchmark.headline})"
    warnings = [f"warning: {one_line(warning)}" for warning in score.warnings]
    return "\n".join([headline, *_format_numbers(score.parts), *warnings])


def main(argv: Sequence[str] | None = None) -> None:
    """Scores an answer file, and prints the score.

    Args:
        argv: command-line arguments; None reads the arguments of the process.
    """
    flags = parse(argv)
    benchmark = BENCHMARKS[flags.benchmark]
    options = {name: getattr(flags, name) for name in benchmark.options}
    json_file = file_to_write("--json", flags.json) if flags.json else None
    score = benchmark.score(Path(flags.data), Path(flags.answers), **options)
    if json_file is not None:
        write_json(json_file, score._asdict())
    print(summary(benchmark, score))


def command() -> None:
    """Runs the command and exits with its status."""
    exit_with(NAME, main)


if __name__ == "__main__":
    command()
