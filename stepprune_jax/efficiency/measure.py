"""Measures one row of the efficiency table, from pixels to the last token."""

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
from stepprune_jax.inference.plan import plan_batch
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.decoder import Cache
from stepprune_jax.parallel.placement import to_host
from stepprune_jax.parallel.programs import watch_programs
from stepprune_jax.policy.selection import BLOCK
from stepprune_jax.pruning import Budget, Pruner
from stepprune_jax.selectors import StepPrune


class BenchRow(NamedTuple):
    """A row of the table. Made by `rows.read_rows`.

    Attributes:
        name: name of the row, such as "stepprune@64".
        pruner: the pruner.
        budget: the requested number of tokens. `measure` calibrates the stop of a mean budget.
    """

    name: str
    pruner: Pruner
    budget: Budget


class BenchInputs(NamedTuple):
    """Inputs of all rows: prompts with one image each, and the images."""

    prompts: Prompts
    images: Images


class Bench(NamedTuple):
    """The conditions of all measurements.

    Attributes:
        model: the model.
        options: how the model is run. `options.max_tokens` includes the first token.
        rounds: number of measurements of each row.
    """

    model: VLM
    options: RunOptions
    rounds: int


def random_batch(backbone: Backbone, batch_size: int, text: int) -> BenchInputs:
    """Returns random images and prompts.

    Args:
        backbone: the model.
        batch_size: number of prompts, each with one image.
        text: number of text tokens of each prompt.
    """
    config, rng = backbone.config, np.random.default_rng(0)
    pixels = backbone.with_square_grids(
        jax.tree.map(
            lambda leaf: rng.integers(0, 256, leaf.shape).astype(leaf.dtype),
            backbone.largest_pixel_shapes(batch_size),
        )
    )
    # Excludes special ids, which are below 3 or from the image token on.
    end_id = min(config.text.vocab_size - 1, config.image_token_id)
    words = rng.integers(3, end_id, (batch_size, text), np.int32)
    ids = np.insert(words, text // 2, IMAGE_TOKEN, axis=1)
    rows = np.arange(batch_size, dtype=np.int32)
    length = np.full(batch_size, text, np.int32)
    prompts = Prompts(ids, length + 1, words, length, rows[:, None], rows)
    images = [jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], pixels) for row in rows]
    return BenchInputs(prompts, read_images(backbone, images))


def with_stop_bias(bench: Bench, row: BenchRow, batch: BenchInputs) -> BenchRow:
    """Returns the row with the stop bias that keeps its mean budget on the images of the batch.

    A row with another kind of budget is returned unchanged.
    """
    pruner, model = row.pruner, bench.model
    if row.budget.kind != "mean":
        return row
    vision = to_host(pipeline.encode(model, batch.images, pruner.taps(model.config)))
    batch_size, n = len(batch.prompts.length), vision.features.shape[1]
    ranking, _ = rank_all(
        model, pruner, batch.prompts, vision, steps=pruner.longest(n), batch_size=batch_size
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
    bench: Bench, baseline: BenchRow | None, row: BenchRow, batch: BenchInputs
) -> dict[str, Any]:
    """Measures a row in alternation with the baseline.

    Args:
        bench: the conditions.
        baseline: the row for ratios; `row` itself, or None for a measurement without ratios.
        row: the row.
        batch: inputs.

    Returns:
        The result of the row as JSON. Times have the median, the minimum and the maximum over the
        rounds.
    """
    is_baseline, row = row is baseline, with_stop_bias(bench, row, batch)
    first_turn, turns, baseline_turns = _time_answer(bench, row, batch), [], []
    for _ in range(bench.rounds):
        turns.append(_time_answer(bench, row, batch))
        if baseline is not None:
            turn = turns[-1] if is_baseline else _time_answer(bench, baseline, batch)
            baseline_turns.append(turn)
    cost = _program_costs(bench, row, batch)
    median_seconds = statistics.median(turn.first_token + turn.decode for turn in turns)
    kept, steps = first_turn.kept, bench.options.max_tokens - 1
    milliseconds = {
        "tower": _spread(1e3 * turn.tower for turn in turns),
        "selector": _spread(1e3 * turn.selector for turn in turns),
        "rest": _spread(1e3 * (turn.first_token - turn.tower - turn.selector) for turn in turns),
        "whole": _spread(1e3 * turn.first_token for turn in turns),
        "decode": _spread(1e3 * turn.decode / steps for turn in turns),
    }
    if baseline_turns:
        milliseconds["whole_baseline"] = _spread(1e3 * turn.first_token for turn in baseline_turns)
    return {
        "row": row.name,
        "kept": [float(kept.mean()), int(kept.min()), int(kept.max())],
        "ms": milliseconds,
        "tflops": count_tflops(bench.model.backbone, row, batch, kept.mean()),
        "cache_bytes": first_turn.cache_bytes // len(kept),
        **cost,
        "first_s": first_turn.first_token,
        "compile_s": max(0.0, first_turn.first_token + first_turn.decode - median_seconds),
        "speed_up": baseline_turns
        and _spread(
            base.first_token / turn.first_token
            for base, turn in zip(baseline_turns, turns, strict=True)
        ),
    }


class _Turn(NamedTuple):
    """One timed answer. Times are seconds.

    Attributes:
        tower: the tower by itself, from images on the host.
        selector: selection by itself, from the tower's results.
        first_token: from images on the host to the first token.
        decode: from the first token to the last token.
        kept: [b] visual tokens after the last cut.
        cache_bytes: bytes of the KV cache.
    """

    tower: float
    selector: float
    first_token: float
    decode: float
    kept: Int[np.ndarray, "b"]
    cache_bytes: int


def _time_answer(bench: Bench, row: BenchRow, batch: BenchInputs) -> _Turn:
    """Times tower and selection by themselves, and then a complete answer as a user gets it."""
    model, options, sampling = bench.model, bench.options, greedy(())
    taps, start_time = row.pruner.taps(model.config), time.perf_counter()
    vision = jax.block_until_ready(pipeline.encode(model, batch.images, taps, options.execution))
    tower, start_time = time.perf_counter() - start_time, time.perf_counter()
    planned = plan_batch(model, row.pruner, batch.prompts, vision, options)
    jax.block_until_ready(pipeline.select(model, planned).kept)
    selector = time.perf_counter() - start_time
    start_time = time.perf_counter()
    inputs = model, row.pruner, batch.prompts, batch.images, options, sampling
    prefill = pipeline.first_tokens(*inputs)
    jax.block_until_ready(prefill.state.token)
    first_token_time = time.perf_counter()
    caches = jax.tree.leaves(prefill.state.cache, is_leaf=lambda node: isinstance(node, Cache))
    cache_bytes = sum(cache.key.nbytes + cache.value.nbytes for cache in caches)
    state = pipeline.finish(model, prefill.state, sampling, options)
    jax.block_until_ready(state.token)
    decode = time.perf_counter() - first_token_time
    first_token = first_token_time - start_time
    return _Turn(tower, selector, first_token, decode, prefill.kept, cache_bytes)


def _program_costs(bench: Bench, row: BenchRow, batch: BenchInputs) -> dict[str, int | None]:
    """Returns costs that are read from compiled programs.

    Returns:
        "kernels": kernels up to the first token, or None if the device is no GPU. "working_bytes":
        memory of the largest program without the weights: inputs, results and temporaries.
    """
    model, options, sampling = bench.model, bench.options, greedy(())
    with watch_programs() as first_token_programs:
        inputs = model, row.pruner, batch.prompts, batch.images, options, sampling
        prefill = pipeline.first_tokens(*inputs)
    with watch_programs() as decode_programs:
        jax.block_until_ready(pipeline.finish(model, prefill.state, sampling, options).token)
    executions = [*first_token_programs, *decode_programs]
    programs = [execution.traced.lower().compile() for execution in executions]
    working_bytes = 0
    for execution, program in zip(executions, programs, strict=True):
        sizes = program.memory_analysis()
        new_outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        program_bytes = execution.input_bytes + new_outputs + sizes.temp_size_in_bytes
        working_bytes = max(working_bytes, program_bytes)
    kernels = None
    if jax.default_backend() == "gpu":
        # StepPrune's loop runs until the row with the most tokens has ended.
        trips = -(-int(prefill.kept.max()) // BLOCK) if isinstance(row.pruner, StepPrune) else 1
        texts = (program.as_text() for program in programs[: len(first_token_programs)])
        kernels = sum(count_kernels(text, trips) for text in texts)
    return {"kernels": kernels, "working_bytes": working_bytes}


def _spread(values: Iterable[float]) -> list[float]:
    """Returns the median, the minimum and the maximum."""
    values = sorted(values)
    return [statistics.median(values), values[0], values[-1]]


def count_tflops(
    backbone: Backbone, row: BenchRow, batch: BenchInputs, kept: float | None = None
) -> dict[str, float]:
    """Returns the operations of each stage by formula, in 1e12 operations. Padding is not counted.

    Args:
        backbone: the model.
        row: the row.
        batch: prompts with one image each.
        kept: mean number of kept tokens of a learned stop; None takes the budget's number, or the
            maximum of a stop without a budget.
    """
    if kept is None:
        schedule = row.pruner.schedule(backbone.config, backbone.config.max_image_tokens)
        kept = schedule.enter or row.budget.value or schedule.most
    text, grid = int(batch.prompts.length[0]) - 1, tuple(map(int, batch.images.grid[0]))
    flops = first_token_flops(
        backbone, row.pruner.without_weights, grid, text=text, words=text, kept=round(float(kept))
    )
    return {part: len(batch.prompts.length) * count / 1e12 for part, count in flops.items()}
