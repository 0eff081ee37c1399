"""Memory and compiled programs of a long-running process that answers varied requests.

    python -m tools.bench.soak --generations 3000

Each generation has another batch size, number and sizes of images, lengths of prompts, pruner and
budget. Both figures must level off: shapes are padded to buckets, and no state of earlier requests
is kept.
"""

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from PIL import Image

from stepprune_jax.checkpoints.load import load_vlm
from stepprune_jax.checkpoints.policy import load_policy
from stepprune_jax.cli.command_line import Parser, exit_with, integer_from
from stepprune_jax.inference import RunOptions, generate
from stepprune_jax.inference.programs import num_compiled
from stepprune_jax.pruning import Pruner
from stepprune_jax.registry import build_pruner
from stepprune_jax.selectors import Policy
from tools.bench.timing import machine

# Most prompts of a batch, images of a prompt, words of a prompt, and pixels of an image's side.
MOST_PROMPTS, MOST_IMAGES, MOST_WORDS, MOST_PIXELS = 2, 1, 40, 1000
LONGEST_ANSWER = 8
LOOKS = 10  # measurements after the first
# What keeps tokens, and whether it is given a budget.
PRUNERS = (("all", False), ("cls", True), ("stepprune", True), ("stepprune", False))


# Maps are mapped regions of memory, of which Linux allows a process 65,530 by default; a program on
# a CPU takes some for each of its kernels.
HEADER = "| generations | programs | resident MiB | maps | s |"


def requests(
    words: Sequence[str], policy: Policy, most: int
) -> Iterator[tuple[list[str], list[list[Image.Image]], Pruner]]:
    """Yields random prompts, their images, and a pruner, endlessly."""
    random = np.random.default_rng(0)
    while True:
        name, given = PRUNERS[random.integers(len(PRUNERS))]
        budget = int(random.integers(1, most + 1)) if given else None
        trained = policy if name == "stepprune" else None
        pruner = build_pruner(name, budget, policy=trained)
        prompts, images = [], []
        for _ in range(random.integers(1, MOST_PROMPTS + 1)):
            count = int(MOST_WORDS ** random.random())
            prompts.append(" ".join(random.choice(words, count)))
            images.append([_image(random) for _ in range(random.integers(MOST_IMAGES + 1))])
        yield prompts, images, pruner


def _image(random: np.random.Generator) -> Image.Image:
    """Draws noise of any size, constant over blocks of pixels."""
    size = (MOST_PIXELS ** random.random(2)).astype(int)
    small = random.integers(0, 256, (*np.maximum(size // 16, 1), 3), np.uint8)
    return Image.fromarray(small).resize(tuple(map(int, size[::-1])), Image.Resampling.NEAREST)


def _look(generations: int, begin: float) -> str:
    """Returns a line on the process's current resources; `begin` is its start on the clock."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = Path("/proc/self/maps").read_bytes().count(b"\n")
    megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    seconds = time.perf_counter() - begin
    cells = f"{generations:,} | {num_compiled()} | {megabytes:,.0f} | {maps:,} | {seconds:.0f}"
    return f"| {cells} |"


def soak(generations: int) -> Iterator[str]:
    """Answers random requests with the shipped model in this process; yields lines of a table."""
    model = load_vlm("shapes", dtype=jnp.float32, progress=False)
    policy = load_policy("shapes")
    words = sorted(word for word in model.tokenizer.get_vocab() if word.isalpha())
    most = policy.config.steps(model.config.max_image_tokens)
    begin = time.perf_counter()
    yield _look(0, begin)
    asked = itertools.islice(requests(words, policy, most), generations)
    options = RunOptions(LONGEST_ANSWER)
    for number, (prompts, images, method) in enumerate(asked, start=1):
        generate(model, prompts, images, method, options=options)
        if number * LOOKS // generations > (number - 1) * LOOKS // generations:
            yield _look(number, begin)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line for each measurement."""
    parser = Parser(prog="tools.bench.soak", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--generations", type=integer_from(1), default=3000, help="number of generations"
    )
    arguments = parser.parse_args(argv)
    print(f"{machine()}\n", flush=True)
    print(f"{HEADER}\n{'| ---: ' * 5}|", flush=True)
    for line in soak(arguments.generations):
        print(line, flush=True)


if __name__ == "__main__":
    exit_with("tools.bench.soak", main)
