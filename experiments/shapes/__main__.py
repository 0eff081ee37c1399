"""Writes the world: `python -m experiments.shapes --out DIR --train 3000 --test 520`."""

from collections.abc import Sequence

from experiments.shapes.world import preview, write_world
from stepprune_jax.cli.command_line import Parser, exit_with, integer_from


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the arguments and writes."""
    parser = Parser(prog="experiments.shapes", description=__doc__.partition(":")[0])
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of train, validation scenes")
    parser.add_argument("--test_seed", type=int, help="seed of test scenes; default: --seed")
    for split, scenes in (("train", 3000), ("validation", 150), ("test", 520)):
        parser.add_argument(f"--{split}", type=int, default=scenes, help=f"{split} scenes")
    parser.add_argument("--level", type=int, default=1, help="1, or 2 for crowds and chains")
    parser.add_argument("--side", type=int, help="side of the images in pixels")
    parser.add_argument("--grid", type=int, help="patches along an edge")
    parser.add_argument(
        "--sizes", type=int, nargs="+", help="sides of the images, used in turn, instead of one"
    )
    parser.add_argument("--emphasis", type=float, default=1.0, help="factor on slow families")
    parser.add_argument("--patches", action="store_true", help="also label every training patch")
    sheet = "scenes on a contact sheet"
    parser.add_argument("--preview", type=integer_from(0), default=0, help=sheet)
    options = vars(parser.parse_args(argv))
    out, count = options.pop("out"), options.pop("preview")
    folder = write_world(out, **options)
    print(f"wrote {folder}")
    if count:
        print(f"wrote {preview(folder, options['seed'], count, options['level'])}")


if __name__ == "__main__":
    exit_with("experiments.shapes", main)
