"""Measures memory and compiled programs of a long-running process that answers varied requests.

    python -m tools.bench.soak --generations 3000

Each generation has a different batch size, number and size of images, length of prompts, pruner
and budget. Memory and programs must level off, because shapes are padded to buckets and requests
leave no state.
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

# Limits: prompts of a batch, images of a prompt, words of a prompt, pixels of an image's side.
MAX_PROMPTS, MAX_IMAGES, MAX_WORDS, MAX_PIXELS = 2, 1, 40, 1000
MAX_NEW_TOKENS = 8
NUM_MEASUREMENTS = 10  # After the first measurement.
# Pruners, and whether they have a budget.
PRUNERS = (("all", False), ("cls", True), ("stepprune", True), ("stepprune", False))


# Maps are mapped regions of memory. Linux limits a process to 65,530 maps by default, and a program
# on a CPU needs some maps for each of its kernels.
HEADER = "| generations | programs | resident MiB | maps | s |"


def requests(
    words: Sequence[str], policy: Policy, max_budget: int
) -> Iterator[tuple[list[str], list[list[Image.Image]], Pruner]]:
    """Yields an endless stream of requests: prompts, images of each prompt, and a pruner."""
    rng = np.random.default_rng(0)
    while True:
        name, has_budget = PRUNERS[rng.integers(len(PRUNERS))]
        budget = int(rng.integers(1, max_budget + 1)) if has_budget else None
        trained = policy if name == "stepprune" else None
        pruner = build_pruner(name, budget, policy=trained)
        prompts, images = [], []
        for _ in range(rng.integers(1, MAX_PROMPTS + 1)):
            count = int(MAX_WORDS ** rng.random())
            prompts.append(" ".join(rng.choice(words, count)))
            images.append([_random_image(rng) for _ in range(rng.integers(MAX_IMAGES + 1))])
        yield prompts, images, pruner


def _random_image(rng: np.random.Generator) -> Image.Image:
    """Returns noise of a random size, constant over blocks of pixels."""
    size = (MAX_PIXELS ** rng.random(2)).astype(int)
    small = rng.integers(0, 256, (*np.maximum(size // 16, 1), 3), np.uint8)
    return Image.fromarray(small).resize(tuple(map(int, size[::-1])), Image.Resampling.NEAREST)


def _measure(generations: int, start_time: float) -> str:
    """Returns a row with the current resources of the process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = Path("/proc/self/maps").read_bytes().count(b"\n")
    megabytes = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    seconds = time.perf_counter() - start_time
    cells = f"{generations:,} | {num_compiled()} | {megabytes:,.0f} | {maps:,} | {seconds:.0f}"
    return f"| {cells} |"


def soak(generations: int) -> Iterator[str]:
    """Answers random requests with the shipped model, and yields the rows of the table."""
    model = load_vlm("shapes", dtype=jnp.float32, progress=False)
    policy = load_policy("shapes")
    words = sorted(word for word in model.tokenizer.get_vocab() if word.isalpha())
    max_budget = policy.config.steps(model.config.max_image_tokens)
    start_time = time.perf_counter()
    yield _measure(0, start_time)
    stream = itertools.islice(requests(words, policy, max_budget), generations)
    options = RunOptions(MAX_NEW_TOKENS)
    for number, (prompts, images, pruner) in enumerate(stream, start=1):
        generate(model, prompts, images, pruner, options=options)
        if (
            number * NUM_MEASUREMENTS // generations
            > (number - 1) * NUM_MEASUREMENTS // generations
        ):
            yield _measure(number, start_time)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command: prints a row for each measurement."""
    parser = Parser(prog="tools.bench.soak", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--generations", type=integer_from(1), default=3000, help="number of generations"
    )
    flags = parser.parse_args(argv)
    print(f"{machine()}\n", flush=True)
    print(f"{HEADER}\n{'| ---: ' * 5}|", flush=True)
    for line in soak(flags.generations):
        print(line, flush=True)


if __name__ == "__main__":
    exit_with("tools.bench.soak", main)
