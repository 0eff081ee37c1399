"""Writes the world: `python -m experiments.moving_shapes --out DIR --train 3000 --test 520`."""

from collections.abc import Sequence

from experiments.moving_shapes.world import FORMATS, write_world
from stepprune_jax.cli.command_line import Parser, exit_with


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = Parser(prog="experiments.moving_shapes", description=__doc__.partition(":")[0])
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the clips")
    for split, count in (("train", 3000), ("validation", 100), ("test", 520)):
        parser.add_argument(f"--{split}", type=int, default=count, help=f"number of {split} clips")
    text = "format of the clips; png writes a folder for each clip"
    parser.add_argument("--format", choices=FORMATS, default="mp4", dest="file_format", help=text)
    options = vars(parser.parse_args(argv))
    print(f"wrote {write_world(options.pop('out'), **options)}")


if __name__ == "__main__":
    exit_with("experiments.moving_shapes", main)
