"""A row of an efficiency table, measured: from pixels to the first token, and on."""

import statistics
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from stepprune_jax import policy
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.efficiency.kernels import count_kernels
from stepprune_jax.evaluation.operations import first_token_flops
from stepprune_jax.inference import greedy, pipeline
from stepprune_jax.inference.base import Images, Prompts, RunOptions, read_images
from stepprune_jax.inference.dataset import rank_all
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.decoder import Cache
from stepprune_jax.parallel.placement import to_host
from stepprune_jax.parallel.programs import watch_programs
from stepprune_jax.policy.selection import BLOCK
from stepprune_jax.pruning import Budget, Pruner
from stepprune_jax.selectors import StepPrune


class BenchRow(NamedTuple):
    """A row of the table: its name, such as "stepprune@64", its pruner, and what it is to keep."""

    name: str
    pruner: Pruner
    budget: Budget


class BenchInputs(NamedTuple):
    """Inputs of all rows: prompts with one image each, and the images."""

    prompts: Prompts
    images: Images


class Bench(NamedTuple):
    """The model, how it is run (with one token more than are decoded), and turns of every row."""

    model: VLM
    options: RunOptions
    rounds: int


def draw_batch(backbone: Backbone, size: int, text: int) -> BenchInputs:
    """Draws images and prompts."""
    config, random = backbone.config, np.random.default_rng(0)
    pixels = backbone.with_square_grids(
        jax.tree.map(
            lambda leaf: random.integers(0, 256, leaf.shape).astype(leaf.dtype),
            backbone.largest_pixel_shapes(size),
        )
    )
    most = min(config.text.vocab_size - 1, config.image_token_id)
    words = random.integers(3, most, (size, text), np.int32)
    ids = np.insert(words, text // 2, IMAGE_TOKEN, axis=1)
    number = np.arange(size, dtype=np.int32)
    full = np.full(size, text, np.int32)
    prompts = Prompts(ids, full + 1, words, full, number[:, None], number)
    parts = [jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], pixels) for row in range(size)]
    return BenchInputs(prompts, read_images(backbone, parts))


def with_stop_bias(bench: Bench, row: BenchRow, batch: BenchInputs) -> BenchRow:
    """Calibrates the stop of a row with a mean budget on the images of the batch."""
    pruner, model = row.pruner, bench.model
    if row.budget.kind != "mean":
        return row
    vision = to_host(pipeline.encode(model, batch.images, pruner.taps(model.config)))
    size, n = len(batch.prompts.length), vision.features.shape[1]
    ranking, _ = rank_all(
        model, pruner, batch.prompts, vision, steps=pruner.longest(n), batch_size=size
    )
    margin = jnp.asarray(ranking.margin)
    bias = policy.calibrate_stop_bias(
        margin,
        row.budget.value,
        min_tokens=pruner.min_tokens,
        max_bias=jnp.max(jnp.abs(margin), where=jnp.isfinite(margin), initial=0) + 1,
    )
    return row._replace(pruner=pruner.replace(stop_bias=bias))


def measure(
    bench: Bench, base: BenchRow | None, row: BenchRow, batch: BenchInputs
) -> dict[str, Any]:
    """Measures a row, which takes turns with the baseline if there is one."""
    is_base, row = row is base, with_stop_bias(bench, row, batch)
    first, own, beside = _answer(bench, row, batch), [], []
    for _ in range(bench.rounds):
        own.append(_answer(bench, row, batch))
        if base is not None:
            beside.append(own[-1] if is_base else _answer(bench, base, batch))
    cost = _cost_of_programs(bench, row, batch)
    again = statistics.median(turn.whole + turn.decode for turn in own)
    kept, steps = first.kept, bench.options.max_tokens - 1
    return {
        "row": row.name,
        "kept": [float(kept.mean()), int(kept.min()), int(kept.max())],
        "ms": {
            "tower": _spread(1e3 * turn.tower for turn in own),
            "selector": _spread(1e3 * turn.selector for turn in own),
            "rest": _spread(1e3 * (turn.whole - turn.tower - turn.selector) for turn in own),
            "whole": _spread(1e3 * turn.whole for turn in own),
            "decode": _spread(1e3 * turn.decode / steps for turn in own),
            **({"whole_baseline": _spread(1e3 * turn.whole for turn in beside)} if beside else {}),
        },
        "tflops": count_tflops(bench.model.backbone, row, batch, kept.mean()),
        "cache_bytes": first.cache // len(kept),
        **cost,
        "first_s": first.whole,
        "compile_s": max(0.0, first.whole + first.decode - again),
        "speed_up": beside and _spread(a.whole / b.whole for a, b in zip(beside, own, strict=True)),
    }


class _Turn(NamedTuple):
    """Seconds of parts of an answer, and its results.

    Attributes:
        tower: the tower alone, from images on the host.
        selector: choosing tokens alone, from the tower's results.
        whole: from images on the host to the first token.
        decode: from there to the last token.
        kept: [b] visual tokens after the last cut.
        cache: bytes of keys and values.
    """

    tower: float
    selector: float
    whole: float
    decode: float
    kept: Int[np.ndarray, "b"]
    cache: int


def _answer(bench: Bench, row: BenchRow, batch: BenchInputs) -> _Turn:
    """Answers a batch like a user's program, timing the first token, and its parts alone."""
    model, options, sampling = bench.model, bench.options, greedy(())
    taps, begin = row.pruner.taps(model.config), time.perf_counter()
    vision = jax.block_until_ready(pipeline.encode(model, batch.images, taps, options.execution))
    tower, begin = time.perf_counter() - begin, time.perf_counter()
    jax.block_until_ready(pipeline.choose(model, row.pruner, batch.prompts, vision)[0])
    selector = time.perf_counter() - begin
    begin = time.perf_counter()
    ready = pipeline.prepare(model, row.pruner, batch.prompts, batch.images, options)
    begun = pipeline.begin(model, ready, sampling)
    jax.block_until_ready(begun.state.token)
    middle = time.perf_counter()
    caches = jax.tree.leaves(begun.state.cache, is_leaf=lambda node: isinstance(node, Cache))
    nbytes = sum(cache.key.nbytes + cache.value.nbytes for cache in caches)
    state = pipeline.finish(model, begun.state, sampling, options)
    jax.block_until_ready(state.token)
    decode = time.perf_counter() - middle
    return _Turn(tower, selector, middle - begin, decode, begun.kept, nbytes)


def _cost_of_programs(bench: Bench, row: BenchRow, batch: BenchInputs) -> dict[str, int | None]:
    """Returns kernels to the first token and bytes besides the weights, from compiled programs.

    The bytes are those of the largest program: inputs, results and temporaries. Kernels are counted
    on GPUs alone.
    """
    model, options, sampling = bench.model, bench.options, greedy(())
    with watch_programs() as to_first:
        ready = pipeline.prepare(model, row.pruner, batch.prompts, batch.images, options)
        begun = pipeline.begin(model, ready, sampling)
    with watch_programs() as further:
        jax.block_until_ready(pipeline.finish(model, begun.state, sampling, options).token)
    compiled = [(ran, ran.traced.lower().compile()) for ran in (*to_first, *further)]
    most = 0
    for ran, program in compiled:
        sizes = program.memory_analysis()
        made = sizes.output_size_in_bytes - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes
        most = max(most, ran.input_bytes + made)
    kernels = None
    if jax.default_backend() == "gpu":
        # StepPrune's loop ends with the row that keeps most.
        trips = -(-int(begun.kept.max()) // BLOCK) if isinstance(row.pruner, StepPrune) else 1
        before = (program for _, program in compiled[: len(to_first)])
        kernels = sum(count_kernels(program.as_text(), trips) for program in before)
    return {"kernels": kernels, "working_bytes": most}


def _spread(values: Iterable[float]) -> list[float]:
    """Returns median, minimum and maximum."""
    values = sorted(values)
    return [statistics.median(values), values[0], values[-1]]


def count_tflops(
    backbone: Backbone, row: BenchRow, batch: BenchInputs, kept: float | None = None
) -> dict[str, float]:
    """Returns each stage's operations, by formula, for the tokens that are present.

    Args:
        backbone: the model.
        row: the row.
        batch: prompts with one image each.
        kept: mean count of a learned stop; None for that of the budget, or the most without one.
    """
    if kept is None:
        schedule = row.pruner.schedule(backbone.config, backbone.config.max_image_tokens)
        kept = schedule.enter or row.budget.value or schedule.most
    text, grid = int(batch.prompts.length[0]) - 1, tuple(map(int, batch.images.grid[0]))
    flops = first_token_flops(
        backbone, row.pruner.without_weights, grid, text, text, round(float(kept))
    )
    return {part: len(batch.prompts.length) * count / 1e12 for part, count in flops.items()}
