"""Checks a data folder before training: `stepprune-check DIR`.

Prints the counts of each file and its first faults. The exit status is 1 if there is a fault.
"""

from collections.abc import Sequence

from stepprune_jax.cli.command_line import exit_with
from stepprune_jax.cli.flags.check import NAME, parse
from stepprune_jax.data.check import check_folder
from stepprune_jax.user_input import one_line


def main(argv: Sequence[str] | None = None) -> int:
    """Checks a data folder, and prints the counts and the first faults of each file.

    Args:
        argv: command-line arguments; None reads the arguments of the process.

    Returns:
        The exit status: 1 if there is a fault, otherwise 0.
    """
    flags = parse(argv)
    results = check_folder(flags.folder)
    for name, num_valid, unit, faults, notes in results:
        counts = ((faults, "fault" if len(faults) == 1 else "faults"), (notes, "not for all runs"))
        summary = "".join(f", {len(lines):,} {label}" for lines, label in counts if lines)
        print(f"{name}: {num_valid:,} {unit}{summary}")
        lines = [*faults[: flags.faults], *notes[: flags.faults]]
        print("".join(f"  {one_line(line)}\n" for line in lines), end="")
    return int(any(result.faults for result in results))


def command() -> None:
    """Runs the command and exits with its status."""
    exit_with(NAME, main)


if __name__ == "__main__":
    command()
