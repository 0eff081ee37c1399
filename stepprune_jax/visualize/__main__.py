"""Draws a saved report again: `python -m stepprune_jax.visualize --report runs/shapes/report`."""

from collections.abc import Sequence

from stepprune_jax.command_line import Parser, exit_with
from stepprune_jax.visualize.figures import redraw


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; reports user errors in one line and exits with status 2."""
    parser = Parser(prog="stepprune_jax.visualize", description=__doc__.split(":")[0])
    parser.add_argument("--report", required=True, help="report folder of eval.py")
    folder = parser.parse_args(arguments).report
    try:
        print(redraw(folder, command=f"python -m stepprune_jax.visualize --report {folder}"))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    exit_with("stepprune_jax.visualize", main)
