"""Counts the programs of a stream of images of all sizes, and the cost of padding.

    python -m tools.bench.buckets

Sides of images are independent and uniform between two bounds, and texts have a uniform number of
tokens. The table has a row for each ladder of padded sizes: the number of programs up to the first
token, how many of the first 20 images compile a program, and the additional operations up to the
first token. The last column includes decoded tokens. It estimates how much longer an answer takes
on an H100. A program takes the time of its operations at 400 TFLOP/s, or the time to read the
weights in bfloat16 once, whichever is longer.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from stepprune_jax.cli.command_line import Parser, exit_with, integer_from
from stepprune_jax.efficiency.model_shapes import find_backbone
from stepprune_jax.efficiency.rows import read_rows
from stepprune_jax.efficiency.timing import table
from stepprune_jax.flops import llm_flops, policy_flops, vision_flops
from stepprune_jax.models.qwen2_5_vl.backbone import QwenBackbone
from stepprune_jax.models.qwen2_5_vl.images import BLOCK_TOKENS, IMAGE_SIZES, target_size
from stepprune_jax.policy.buckets import (
    bucket_ladder,
    choose_bucket,
    kept_bucket,
    length_bucket,
    text_bucket,
    words_bucket,
)
from stepprune_jax.pruning import Pruner
from stepprune_jax.selectors import StepPrune

FIRST = 20
FLOPS_PER_SECOND, BYTES_PER_SECOND = 400e12, 3.35e12


def per_doubling(*parts: float) -> tuple[int, ...]:
    """Returns the multiples of `BLOCK_TOKENS` among `parts` times each power of two up to 2^16."""
    exact = (part * 2**power for power in range(17) for part in parts)
    return tuple(sorted({int(size) for size in exact if size % BLOCK_TOKENS == 0}))


LADDERS = {
    "four per doubling": per_doubling(4, 5, 6, 7),
    "three per doubling": per_doubling(4, 5, 6.5),
    "two per doubling": per_doubling(5, 7),
    "one per doubling": per_doubling(5),
    "the library's": IMAGE_SIZES,
}


class Query(NamedTuple):
    """A request: number of visual tokens of its image, and number of text tokens."""

    tokens: int
    text: int


class Padded(NamedTuple):
    """Padded numbers of visual tokens, text tokens and slots of the row, and program keys."""

    tokens: int
    text: int
    slots: int
    programs: tuple[Hashable, ...]


class Cost(NamedTuple):
    """Results of a ladder.

    Attributes:
        programs: number of programs of each stream.
        compiling: number of the first images that compile a program, of each stream.
        work: additional operations up to the first token, as a fraction.
        time: additional time of an answer, as a fraction.
    """

    programs: list[int]
    compiling: list[int]
    work: float
    time: float


def random_stream(
    backbone: QwenBackbone, seed: int, count: int, sides: Sequence[int], texts: Sequence[int]
) -> list[Query]:
    """Returns random requests.

    Args:
        backbone: the model.
        seed: seed of the stream.
        count: number of requests.
        sides: smallest and largest side of an image, in pixels.
        texts: smallest and largest number of text tokens.
    """
    rng, area = np.random.default_rng(seed), backbone.config.vision.factor**2
    requests = []
    for _ in range(count):
        height, width = rng.integers(sides[0], sides[1] + 1, 2).tolist()
        resized = target_size(backbone.config, height, width)
        requests.append(
            Query(resized[0] * resized[1] // area, int(rng.integers(texts[0], texts[1] + 1)))
        )
    return requests


def kept_tokens(backbone: QwenBackbone, pruner: Pruner, tokens: int) -> int:
    """Returns how many tokens of an image are kept; a learned stop keeps 1/16."""
    count = pruner.schedule(backbone.config, tokens).enter
    return max(1, tokens // 16) if count is None else count


def pad_jointly(
    backbone: QwenBackbone, pruner: Pruner, sizes: Sequence[int], query: Query
) -> Padded:
    """Pads a request to the joint bucket of its image and its text."""
    tokens, text = next(size for size in sizes if size >= query.tokens), text_bucket(query.text)
    exact = pruner.budget.is_exact
    kept = kept_tokens(backbone, pruner, tokens if exact else query.tokens)
    if exact:
        slots = text + (tokens if kept == tokens else kept_bucket(kept))
        return Padded(tokens, text, slots, ((tokens, slots),))
    # A learned stop has one program for selection and one for the language model.
    slots = length_bucket(kept + query.text, backbone.CONTEXT_LIMIT)
    return Padded(tokens, text, slots, ((tokens, text), (slots,)))


def pad_separately(
    backbone: QwenBackbone, pruner: Pruner, sizes: Sequence[int], query: Query
) -> Padded:
    """Pads image, row, kept tokens and question of a request to separate ladders."""
    tokens = next(size for size in sizes if size >= query.tokens)
    kept = kept_tokens(backbone, pruner, query.tokens)
    slots = length_bucket(kept + query.text, backbone.CONTEXT_LIMIT)
    max_kept = pruner.schedule(backbone.config, tokens).most
    image = tokens, tokens == query.tokens, words_bucket(query.text) * pruner.reads_text
    if not pruner.budget.is_exact:
        return Padded(tokens, query.text, slots, (image, (max_kept, slots)))
    capacity = tokens if kept == query.tokens else choose_bucket(kept, bucket_ladder(max_kept))
    return Padded(tokens, query.text, slots, ((*image, capacity, slots),))


def count_flops(
    backbone: QwenBackbone, pruner: Pruner, tokens: int, text: int, slots: int, kept: int
) -> float:
    """Counts the operations up to the first token of a row of `slots`."""
    total = vision_flops(backbone, [(1, tokens)])["total"]
    total += llm_flops(backbone.config.text, slots).flops
    if isinstance(pruner, StepPrune):
        exact = pruner.budget.is_exact
        total += policy_flops(pruner.config, tokens, text, kept, exact=exact)["total"]
    return total


def measure(
    backbone: QwenBackbone,
    pruner: Pruner,
    pad: Callable[[Query], Padded],
    streams: Sequence[Sequence[Query]],
    decoded: int,
) -> Cost:
    """Measures a ladder over streams of requests.

    Args:
        backbone: the model.
        pruner: the pruner.
        pad: returns the padded shapes of a request.
        streams: the streams.
        decoded: number of decoded tokens of each answer.
    """
    count = functools.cache(functools.partial(count_flops, backbone, pruner))
    read = 2 * llm_flops(backbone.config.text, 1, 0).layer_macs / BYTES_PER_SECOND
    programs, compiling, work, time = [], [], np.zeros(2), np.zeros(2)
    for stream in streams:
        reached, compiled = set(), 0
        for number, query in enumerate(stream):
            padded = pad(query)
            compiled += number < FIRST and not reached.issuperset(padded.programs)
            reached.update(padded.programs)
            kept = kept_tokens(backbone, pruner, query.tokens)
            pair = (
                count(query.tokens, query.text, kept + query.text, kept),
                count(padded.tokens, padded.text, padded.slots, kept),
            )
            work += pair
            time += [max(flops / FLOPS_PER_SECOND, read) + decoded * read for flops in pair]
        programs.append(len(reached))
        compiling.append(compiled)
    return Cost(programs, compiling, work[1] / work[0] - 1, time[1] / time[0] - 1)


def main(arguments: list[str] | None = None):
    """Runs the command: prints a table for each model and budget."""
    parser = Parser(prog="tools.bench.buckets", description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["qwen3-vl-8b", "qwen2.5-vl-7b"])
    parser.add_argument("--rows", nargs="+", default=["all", "stepprune@2/9", "stepprune@adaptive"])
    parser.add_argument("--sides", type=integer_from(1), nargs=2, default=[200, 2000])
    parser.add_argument("--text", type=integer_from(1), nargs=2, default=[30, 30])
    parser.add_argument("--images", type=integer_from(FIRST), default=400)
    parser.add_argument("--seeds", type=integer_from(1), default=30)
    parser.add_argument("--new_tokens", type=integer_from(1), default=32)
    flags = parser.parse_args(arguments)
    for name in flags.models:
        backbone = find_backbone(name)
        if not isinstance(backbone, QwenBackbone):
            parser.error(f"--models: {name} has images of few sizes, expected a Qwen")
        streams = [
            random_stream(backbone, seed, flags.images, flags.sides, flags.text)
            for seed in range(flags.seeds)
        ]
        for row in read_rows(flags.rows, backbone.config, 1, "float32"):
            separate = functools.partial(
                pad_separately, backbone, row.pruner, LADDERS["four per doubling"]
            )
            ladders = {"image and row apart": separate}
            for ladder, sizes in LADDERS.items():
                ladders[ladder] = functools.partial(pad_jointly, backbone, row.pruner, sizes)
            cells = []
            for ladder, pad in ladders.items():
                cost = measure(backbone, row.pruner, pad, streams, flags.new_tokens)
                spread = f"{min(cost.programs)} to {max(cost.programs)}"
                compiling = f"{np.mean(cost.compiling):.1f} ({max(cost.compiling)})"
                cells.append([ladder, spread, compiling, f"{cost.work:.0%}", f"{cost.time:.1%}"])
            header = [
                f"{name}, {row.name}",
                f"programs of {flags.images} images",
                f"of the first {FIRST} compile (most)",
                "more operations to the first token",
                f"more time, {flags.new_tokens} tokens",
            ]
            print(table(header, cells), "\n", flush=True)


if __name__ == "__main__":
    exit_with("tools.bench.buckets", main)
