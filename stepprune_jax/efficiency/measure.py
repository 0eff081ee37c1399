"""Measures one row of the efficiency table, from pixels to the last token."""

import math
import statistics
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.efficiency.kernels import count_kernels
from stepprune_jax.evaluation.calibrate import stop_bias_for
from stepprune_jax.evaluation.operations import first_token_flops
from stepprune_jax.inference import greedy, pipeline
from stepprune_jax.inference.base import (
    Images,
    Prompts,
    RunOptions,
    read_images,
    read_media,
)
from stepprune_jax.inference.dataset import rank_all
from stepprune_jax.inference.plan import plan_batch
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.decoder import Cache
from stepprune_jax.models.images import Clip
from stepprune_jax.parallel.placement import to_host
from stepprune_jax.parallel.programs import watch_programs
from stepprune_jax.policy.selection import BLOCK
from stepprune_jax.pruning import Budget, Pruner
from stepprune_jax.selectors import Policy, StepPrune

# Ids of "<12.5 seconds>" and of the two marks around a temporal patch, with Qwen's tokenizer.
_TIME_TOKENS = 9


class BenchRow(NamedTuple):
    """A row of the table: a pruning method with a budget. Made by `rows.read_rows`.

    Attributes:
        name: name of the row, such as "stepprune@64".
        pruner: the pruner that selects the tokens.
        budget: the requested number of tokens. For a mean budget, `measure` calibrates the stop
            bias of the pruner.
    """

    name: str
    pruner: Pruner
    budget: Budget


class BenchInputs(NamedTuple):
    """Inputs of all rows: prompts with one image or video each. Made by `random_batch`."""

    prompts: Prompts
    images: Images


class Bench(NamedTuple):
    """The conditions of all measurements.

    Attributes:
        model: the model with its weights on the device.
        options: how the model is run. `options.max_tokens` includes the first token.
        rounds: number of measurements of each row.
    """

    model: VLM
    options: RunOptions
    rounds: int


def random_batch(
    backbone: Backbone, batch_size: int, num_text_tokens: int, num_patches: int = 0
) -> BenchInputs:
    """Returns random images of the largest size or random videos, and random prompts.

    Args:
        backbone: the model.
        batch_size: number of prompts, each with one image or video.
        num_text_tokens: number of text tokens of each prompt, without the times of a video. The
            image is in their middle.
        num_patches: number of temporal patches of each video, two seconds apart. Each has the size
            of the largest image. 0 for images.
    """
    config, rng = backbone.config, np.random.default_rng(0)
    num_rows = batch_size * max(1, num_patches)
    shapes = backbone.largest_pixel_shapes(num_rows)
    if num_patches:
        num_padded = backbone.num_padded_tokens(shapes)
        shapes = backbone.patch_shapes(num_rows, num_padded)
    pixels = backbone.with_square_grids(
        jax.tree.map(lambda leaf: rng.integers(0, 256, leaf.shape).astype(leaf.dtype), shapes)
    )
    # Excludes special ids, which are below 3 or from the image token on.
    end_id = config.text.vocab_size - 1
    if config.image_token_id is not None:
        end_id = min(end_id, config.image_token_id)
    text_ids = rng.integers(3, end_id, (batch_size, num_text_tokens), np.int32)
    num_marks = max(1, num_patches) if backbone.MARKS_PATCHES else 1
    # A prompt of Qwen3-VL has the time of each temporal patch before its mark.
    marks = np.full((batch_size, num_marks), IMAGE_TOKEN, np.int32)
    if num_patches and backbone.MARKS_PATCHES:
        time_ids = rng.integers(3, end_id, (batch_size, num_marks, _TIME_TOKENS), np.int32)
        marks = np.concatenate([time_ids, marks[..., None]], axis=2).reshape(batch_size, -1)
    middle = num_text_tokens // 2
    prompt_ids = np.concatenate([text_ids[:, :middle], marks, text_ids[:, middle:]], axis=1)
    indices = np.arange(batch_size, dtype=np.int32)  # Prompt i has image i and the number i.
    text_lengths = np.full(batch_size, num_text_tokens, np.int32)
    prompt_lengths = np.full(batch_size, prompt_ids.shape[1], np.int32)
    prompts = Prompts(prompt_ids, prompt_lengths, text_ids, text_lengths, indices[:, None], indices)
    rows_per_image = max(1, num_patches)
    images = [
        jax.tree.map(lambda leaf, i=i: leaf[i : i + rows_per_image], pixels)
        for i in range(0, num_rows, rows_per_image)
    ]
    if not num_patches:
        return BenchInputs(prompts, read_images(backbone, images))
    times = tuple(2.0 * patch for patch in range(num_patches))
    clips = [Clip(image, times, interval=4.0) for image in images]
    return BenchInputs(prompts, read_media(backbone, images, clips))


def with_stop_bias(bench: Bench, row: BenchRow, batch: BenchInputs) -> BenchRow:
    """Calibrates the stop bias of a row so that it keeps its mean budget on the batch's images.

    A policy stops when its stop logit plus the stop bias exceeds the logits of all tokens. The
    margin of a step is the stop logit minus the largest token logit.

    Args:
        bench: the model and how it is run.
        row: the row.
        batch: inputs of all rows.

    Returns:
        The row with the calibrated stop bias. A row without a mean budget is returned unchanged.
    """
    pruner, model = row.pruner, bench.model
    if row.budget.kind != "mean" or not isinstance(pruner, Policy):
        return row
    vision = to_host(pipeline.encode(model, batch.images, pruner.taps(model.config)))
    batch_size, num_visual_tokens = len(batch.prompts.length), vision.features.shape[1]
    max_steps = pruner.longest(num_visual_tokens)
    # Ranks the tokens without a stop, and records the margin of every step.
    ranking, _ = rank_all(
        model, pruner, batch.prompts, vision, steps=max_steps, batch_size=batch_size
    )
    stop_bias = stop_bias_for(pruner, np.asarray(ranking.margin), float(row.budget.number))
    return row._replace(pruner=pruner.replace(stop_bias=jnp.float32(stop_bias)))


def measure(
    bench: Bench, baseline: BenchRow | None, row: BenchRow, batch: BenchInputs
) -> dict[str, Any]:
    """Measures a row. In each round, answers once with the row and once with the baseline.

    Args:
        bench: the model, how it is run, and the number of rounds.
        baseline: the row for ratios, which may be `row` itself; None measures without ratios.
        row: the row to measure.
        batch: inputs of all rows.

    Returns:
        The result as JSON. Times and ratios are lists: the median, the minimum and the maximum over
        the rounds.
    """
    is_baseline, row = row is baseline, with_stop_bias(bench, row, batch)
    compiling_turn = _time_answer(bench, row, batch)  # Compiles the programs.
    turns, baseline_turns = [], []
    for _ in range(bench.rounds):
        turns.append(_time_answer(bench, row, batch))
        if baseline is not None:
            turn = turns[-1] if is_baseline else _time_answer(bench, baseline, batch)
            baseline_turns.append(turn)
    costs = _program_costs(bench, row, batch)
    answer_seconds = statistics.median(turn.first_token + turn.decode for turn in turns)
    compiling_seconds = compiling_turn.first_token + compiling_turn.decode - answer_seconds
    num_kept, num_decode_steps = compiling_turn.num_kept, bench.options.max_tokens - 1
    milliseconds = {
        "tower": _spread(1e3 * turn.tower for turn in turns),
        "selector": _spread(1e3 * turn.selector for turn in turns),
        "rest": _spread(1e3 * (turn.first_token - turn.tower - turn.selector) for turn in turns),
        "whole": _spread(1e3 * turn.first_token for turn in turns),
        "decode": _spread(1e3 * turn.decode / num_decode_steps for turn in turns),
    }
    speed_up = []
    if baseline_turns:
        milliseconds["whole_baseline"] = _spread(1e3 * turn.first_token for turn in baseline_turns)
        speed_up = _spread(
            baseline_turn.first_token / turn.first_token
            for baseline_turn, turn in zip(baseline_turns, turns, strict=True)
        )
    return {
        "row": row.name,
        "kept": [float(num_kept.mean()), int(num_kept.min()), int(num_kept.max())],
        "ms": milliseconds,
        "tflops": count_tflops(bench.model.backbone, row, batch, num_kept.mean()),
        "cache_bytes": compiling_turn.cache_bytes // len(num_kept),
        **costs,
        "first_s": compiling_turn.first_token,
        "compile_s": max(0.0, compiling_seconds),
        "speed_up": speed_up,
    }


class _Turn(NamedTuple):
    """One timed answer to all prompts of a batch. Times are seconds.

    Attributes:
        tower: time of the vision tower by itself, from images on the host.
        selector: time of the selection by itself, from the tower's results.
        first_token: time from images on the host to the first token.
        decode: time from the first token to the last token.
        num_kept: [b] visual tokens of each prompt that the last layer of the language model gets.
        cache_bytes: bytes of the KV cache.
    """

    tower: float
    selector: float
    first_token: float
    decode: float
    num_kept: Int[np.ndarray, "b"]
    cache_bytes: int


def _time_answer(bench: Bench, row: BenchRow, batch: BenchInputs) -> _Turn:
    """Times tower and selection by themselves, and then a complete answer as a user gets it.

    Args:
        bench: the model and how it is run.
        row: the row, with a calibrated stop bias.
        batch: inputs of all rows.
    """
    model, options = bench.model, bench.options
    sampling = greedy(())  # No token ends an answer, so all answers have the same length.
    taps, start_time = row.pruner.taps(model.config), time.perf_counter()
    vision = jax.block_until_ready(pipeline.encode(model, batch.images, taps, options.execution))
    tower_seconds, start_time = time.perf_counter() - start_time, time.perf_counter()
    planned_batch = plan_batch(model, row.pruner, batch.prompts, vision, options)
    jax.block_until_ready(pipeline.select(model, planned_batch))
    selector_seconds = time.perf_counter() - start_time
    start_time = time.perf_counter()
    inputs = model, row.pruner, batch.prompts, batch.images, options, sampling
    prefill = pipeline.first_tokens(*inputs)
    jax.block_until_ready(prefill.state.token)
    first_token_time = time.perf_counter()
    caches = jax.tree.leaves(prefill.state.cache, is_leaf=lambda node: isinstance(node, Cache))
    cache_bytes = sum(cache.key.nbytes + cache.value.nbytes for cache in caches)
    state = pipeline.finish(model, prefill.state, sampling, options)
    jax.block_until_ready(state.token)
    return _Turn(
        tower=tower_seconds,
        selector=selector_seconds,
        first_token=first_token_time - start_time,
        decode=time.perf_counter() - first_token_time,
        num_kept=prefill.kept,
        cache_bytes=cache_bytes,
    )


def _program_costs(bench: Bench, row: BenchRow, batch: BenchInputs) -> dict[str, int | None]:
    """Reads costs from the compiled programs of an answer.

    Args:
        bench: the model and how it is run.
        row: the row, with a calibrated stop bias.
        batch: inputs of all rows.

    Returns:
        "kernels": kernels up to the first token; None unless the device is a GPU. "working_bytes":
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
        # The only loop of unknown length is StepPrune's selection, with BLOCK tokens per iteration.
        # The loop runs until the prompt with the most kept tokens has stopped.
        num_iterations = 1
        if isinstance(row.pruner, StepPrune):
            num_iterations = math.ceil(int(prefill.kept.max()) / BLOCK)
        hlo_texts = (program.as_text() for program in programs[: len(first_token_programs)])
        kernels = sum(count_kernels(text, num_iterations) for text in hlo_texts)
    return {"kernels": kernels, "working_bytes": working_bytes}


def _spread(values: Iterable[float]) -> list[float]:
    """Returns the median, the minimum and the maximum of the values."""
    values = sorted(values)
    return [statistics.median(values), values[0], values[-1]]


def count_tflops(
    backbone: Backbone, row: BenchRow, batch: BenchInputs, kept: float | None = None
) -> dict[str, float]:
    """Counts the operations of each stage up to the first token by formula, without padding.

    Args:
        backbone: the model.
        row: the row.
        batch: prompts with one image or video each; all prompts have the same length.
        kept: mean number of kept tokens of a learned stop. None selects the number of the budget,
            or the largest possible number for a stop without a budget.

    Returns:
        The operations of all prompts in units of 1e12, by the name of the stage.
    """
    if kept is None:
        schedule = row.pruner.schedule(backbone.config, int(batch.images.sizes[0]))
        kept = float(schedule.enter or row.budget.value or schedule.most)
    clips = batch.images.clips
    num_patches = 1 if clips is None else int(np.asarray(clips.frames)[0])
    num_rows, num_columns = map(int, batch.images.grid[0])
    flops = first_token_flops(
        backbone,
        row.pruner.without_weights,
        (num_rows // num_patches, num_columns),
        num_text_tokens=int(batch.prompts.num_text[0]),
        num_words=int(batch.prompts.num_words[0]),
        num_kept=round(float(kept)),
        num_patches=num_patches,
    )
    batch_size = len(batch.prompts.length)
    return {stage: batch_size * count / 1e12 for stage, count in flops.items()}
