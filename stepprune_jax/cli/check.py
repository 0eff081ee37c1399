"""Checks a data folder before training: `stepprune-check DIR`.

Prints a count for each file and the first faults; the exit status is 1 if there are any.
"""

from collections.abc import Sequence
from typing import NoReturn

from stepprune_jax.cli.command_line import Parser, exit_with, integer_from
from stepprune_jax.data.check import check_folder
from stepprune_jax.user_input import one_line

_NAME = "stepprune-check"


def main(argv: Sequence[str] | None = None) -> int:
    """Checks a folder and prints the results."""
    parser = Parser(prog=_NAME, description=__doc__.partition(":")[0])
    parser.add_argument("folder", help="folder with train.json or SPLIT.jsonl, and images/")
    parser.add_argument("--faults", type=integer_from(0), default=10, help="faults shown per file")
    arguments = parser.parse_args(argv)
    checked = check_folder(arguments.folder)
    for name, count, kind, faults, notes in checked:
        numbers = ((faults, "faults"), (notes, "not for all runs"))
        rest = "".join(f", {len(lines):,} {what}" for lines, what in numbers if lines)
        print(f"{name}: {count:,} {kind}{rest}")
        lines = [*faults[: arguments.faults], *notes[: arguments.faults]]
        print("".join(f"  {one_line(line)}\n" for line in lines), end="")
    return int(any(part.faults for part in checked))


def command() -> NoReturn:
    """Runs the command and exits."""
    exit_with(_NAME, main)


if __name__ == "__main__":
    command()
