"""Writes the world: `python -m experiments.shapes --out DIR --train 3000 --test 520`."""

from collections.abc import Sequence

from experiments.shapes.world import write_world
from stepprune_jax.cli.command_line import Parser, exit_with


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = Parser(prog="experiments.shapes", description=__doc__.partition(":")[0])
    parser.add_argument("--out", required=True, help="folder to write")
    text = "seed of the training and validation scenes"
    parser.add_argument("--seed", type=int, default=0, help=text)
    parser.add_argument("--test_seed", type=int, help="seed of the test scenes; default: --seed")
    for split, count in (("train", 3000), ("validation", 150), ("test", 520)):
        parser.add_argument(f"--{split}", type=int, default=count, help=f"number of {split} scenes")
    parser.add_argument("--side", type=int, default=96, help="side of the images in pixels")
    parser.add_argument("--grid", type=int, default=12, help="patches along an edge")
    text = "sides of the images in pixels, used in turn, instead of --side"
    parser.add_argument("--sizes", type=int, nargs="+", help=text)
    text = "factor on the frequency of slowly learned families in training"
    parser.add_argument("--emphasis", type=float, default=1.0, help=text)
    text = "also write labels of every training patch"
    parser.add_argument("--patches", action="store_true", help=text)
    options = vars(parser.parse_args(argv))
    print(f"wrote {write_world(options.pop('out'), **options)}")


if __name__ == "__main__":
    exit_with("experiments.shapes", main)
