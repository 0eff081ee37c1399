"""Time of a whole `stepprune-generate`, with and without programs kept from an earlier call.

    python -m tools.bench.start --repeats 3

Calls alternate: one with an empty folder of programs, then one with what it left.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from stepprune_jax.command_line import Parser, exit_with, integer_from
from stepprune_jax.efficiency.timing import table

MODULE = "stepprune_jax.cli.generate"
ASKED = ("--model", "shapes", "--policy", "shapes", "--prompt", "How many shapes are there?")


def seconds(image: Path, cache: Path) -> float:
    """Measures a call whose programs are kept in a folder."""
    command = [sys.executable, "-m", MODULE, *ASKED, "--image", str(image)]
    began = time.perf_counter()
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - began


def main() -> None:
    """Prints medians and the median of the ratios of neighbouring calls."""
    parser = Parser(prog="tools.bench.start", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=integer_from(1), default=3)
    repeats = parser.parse_args().repeats
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "image.png"
        pixels = np.random.default_rng(0).integers(0, 255, (96, 96, 3), np.uint8)
        Image.fromarray(pixels).save(image)
        for number in range(repeats):
            cache = Path(folder) / str(number)
            pairs.append((seconds(image, cache), seconds(image, cache)))
    first, second = np.median(pairs, axis=0)
    ratio = np.median([one / two for one, two in pairs])
    print(table(["first call, s", "second, s", "ratio"], [[first, second, ratio]]))


if __name__ == "__main__":
    exit_with("tools.bench.start", main)
