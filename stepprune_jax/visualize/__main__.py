"""Draws a saved report again: `python -m stepprune_jax.visualize --report runs/shapes/report`."""

import sys
from collections.abc import Sequence

from stepprune_jax.command_line import Parser, exit_with
from stepprune_jax.user_input import one_line
from stepprune_jax.visualize.figures import redraw


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: command-line arguments; by default those of the process.

    Returns:
        The exit status: 0, or 2 for a mistake in the input, reported in one line on stderr.
    """
    parser = Parser(prog="stepprune_jax.visualize", description=__doc__.split(":")[0])
    parser.add_argument("--report", required=True, help="report folder of eval.py")
    folder = parser.parse_args(arguments).report
    try:
        print(redraw(folder, command=f"python -m stepprune_jax.visualize --report {folder}"))
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {one_line(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    exit_with("stepprune_jax.visualize", main)
