"""Checks a data folder before training: `stepprune-check DIR`.

Prints the counts of each file and its first faults. The exit status is 1 if there is a fault.
"""

from collections.abc import Sequence

from stepprune_jax.cli.command_line import Parser, exit_with, integer_from
from stepprune_jax.data.check import check_folder
from stepprune_jax.user_input import one_line

_NAME = "stepprune-check"


def main(argv: Sequence[str] | None = None) -> int:
    """Checks a data folder, and prints the counts and the first faults of each file.

    Args:
        argv: command-line arguments; None reads the arguments of the process.

    Returns:
        The exit status: 1 if there is a fault, otherwise 0.
    """
    parser = Parser(prog=_NAME, module_docstring=__doc__)
    parser.add_argument("folder", help="folder with train.json or SPLIT.jsonl, and images/")
    parser.add_argument("--faults", type=integer_from(0), default=10, help="faults shown per file")
    flags = parser.parse_args(argv)
    results = check_folder(flags.folder)
    for name, num_valid, unit, faults, notes in results:
        counts = ((faults, "faults"), (notes, "not for all runs"))
        summary = "".join(f", {len(lines):,} {label}" for lines, label in counts if lines)
        print(f"{name}: {num_valid:,} {unit}{summary}")
        lines = [*faults[: flags.faults], *notes[: flags.faults]]
        print("".join(f"  {one_line(line)}\n" for line in lines), end="")
    return int(any(result.faults for result in results))


def command() -> None:
    """Runs the command and exits with its status."""
    exit_with(_NAME, main)


if __name__ == "__main__":
    command()
