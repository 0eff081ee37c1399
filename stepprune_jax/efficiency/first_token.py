"""Rows of an efficiency table, measured in turns: pixels to the first token, and its stages."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from stepprune_jax import policy
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.efficiency.peaks import Peak
from stepprune_jax.evaluation.operations import first_token_flops
from stepprune_jax.flops import traced_flops
from stepprune_jax.inference import decoding, greedy, pipeline, programs
from stepprune_jax.inference.base import Images, Pairs, Prompts, RunOptions, read_images
from stepprune_jax.inference.sets import rank_all
from stepprune_jax.models import decoder
from stepprune_jax.models.decoder import Cache
from stepprune_jax.models.family import ModelConfig
from stepprune_jax.models.qwen2_5_vl.config import QwenConfig
from stepprune_jax.parallel.compiling import usage
from stepprune_jax.parallel.placement import fetch, jit_for_weights
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.policy.encoder import memory
from stepprune_jax.pruning import Method, Trained

_place = jit_for_weights(programs.place, ("config", "plan"))
_start = jit_for_weights(decoding.start, ("config", "plan"))


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        name: name of the row, such as "stepprune@64".
        method: pruning method, from `pipeline.place_method`.
    """

    name: str
    method: Method


class Batch(NamedTuple):
    """Inputs of all rows.

    Attributes:
        prompts: prompts with one image each.
        images: images of the prompts.
    """

    prompts: Prompts
    images: Images


class Bench(NamedTuple):
    """Model and settings of the measurements.

    Attributes:
        model: the model, with random weights.
        options: how it is run, with one token more than are decoded.
        peak: peak of the device.
        rounds: turns of every row.
    """

    model: VLM
    options: RunOptions
    peak: Peak
    rounds: int


def draw_batch(config: ModelConfig, size: int, text: int, seed: int = 0) -> Batch:
    """Draws images and prompts."""
    random = np.random.default_rng(seed)
    pixels = jax.tree.map(
        lambda leaf: random.standard_normal(leaf.shape, np.float32).astype(leaf.dtype),
        config.family.max_pixels(config, size),
    )
    if isinstance(config, QwenConfig):
        side = math.isqrt(config.max_image_tokens)
        pixels = pixels._replace(grid=np.full((size, 2), side, np.int32))
    most = min(config.text.vocab_size - 1, config.image_token_id)
    words = random.integers(3, most, (size, text), np.int32)
    ids = np.insert(words, text // 2, IMAGE_TOKEN, axis=1)
    number = np.arange(size, dtype=np.int32)
    full = np.full(size, text, np.int32)
    prompts = Prompts(ids, full + 1, words, full, number[:, None], number)
    return Batch(prompts, read_images(config, pixels))


def with_stop_bias(bench: Bench, row: Row, batch: Batch) -> Row:
    """Calibrates the stop of a row with a mean budget on the images of the batch."""
    pruner, model = row.method.pruner, bench.model
    if pruner.budget.kind != "mean":
        return row
    vision = fetch(pipeline.encode(model, batch.images, pruner.taps(model.config)))
    size, n = len(batch.prompts.length), vision.features.shape[1]
    ranking, _ = rank_all(
        model, row.method, batch.prompts, vision, steps=pruner.most(n), batch_size=size
    )
    margin = jnp.asarray(ranking.margin)
    bias = policy.calibrate_stop_bias(
        margin,
        pruner.budget.value,
        min_tokens=pruner.config.min_tokens,
        max_bias=jnp.max(jnp.abs(margin)) + 1,
    )
    learned = row.method.params._replace(stop_bias=bias)
    return row._replace(method=row.method._replace(params=learned))


def measure(
    bench: Bench,
    rows: Sequence[Row],
    batch: Batch,
    references: Mapping[str, Callable[[], Any]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Measures rows, which take turns."""
    rows = [with_stop_bias(bench, row, batch) for row in rows]
    first = {row.name: _answer(bench, row, batch) for row in rows}
    theirs = {name: np.asarray(call()) for name, call in references.items()}
    parts = _time_stages({row.name: _stages(bench, row, batch) for row in rows}, bench.rounds)
    turns = []
    for _ in range(bench.rounds):
        turn = {row.name: _answer(bench, row, batch) for row in rows}
        turns.append(turn | {name: _Turn(_seconds(call)) for name, call in references.items()})
    results = []
    for row in rows:
        own = [first[row.name], *(turn[row.name] for turn in turns)]
        results.append(_result(bench, row, batch, own, parts[row.name]))
    for name, logits in theirs.items():
        apart = np.abs(first[rows[0].name].logits - logits).max() / np.abs(logits).max()
        whole = _spread(1e3 * turn[name].whole for turn in turns)
        results.append({"row": name, "ms": {"whole": whole}, "difference": float(apart)})
    for result in results:
        result["speed_up"] = {
            other: _spread(turn[other].whole / turn[result["row"]].whole for turn in turns)
            for other in (rows[0].name, *references)
            if other != result["row"]
        }
    return results


def _result(
    bench: Bench,
    row: Row,
    batch: Batch,
    turns: Sequence["_Turn"],
    stages: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Builds a row's JSON object from its turns, the first of which compiled, and its stages."""
    compiling, *turns = turns
    steps, kept = bench.options.max_tokens - 1, compiling.kept
    again = statistics.median(turn.whole + turn.decode for turn in turns)
    milliseconds = {part: _spread(1e3 * s for s in taken) for part, taken in stages.items()}
    milliseconds["whole"] = _spread(1e3 * turn.whole for turn in turns)
    milliseconds["decode"] = _spread(1e3 * turn.decode / steps for turn in turns)
    work = _work(bench.model, row.method, batch, round(float(kept.mean())))
    least = {part: 1e3 * bench.peak.seconds(*amounts) for part, amounts in work.items()}
    return {
        "row": row.name,
        "kept": [float(kept.mean()), int(kept.min()), int(kept.max())],
        "ms": milliseconds,
        "tflops": {part: flops / 1e12 for part, (flops, _) in work.items()},
        **_programs(bench, row, batch),
        "cache_bytes": compiling.cache // len(kept),
        "compile_s": max(0.0, compiling.whole + compiling.decode - again),
        "roofline_ms": least,
        "share": sum(least.values()) / milliseconds["whole"][0],
    }


class _Turn(NamedTuple):
    """An answered batch: seconds to the first token and from there to the last, and results."""

    whole: float
    decode: float = 0.0
    kept: Any = None
    cache: int = 0
    logits: Any = None


def _answer(bench: Bench, row: Row, batch: Batch) -> _Turn:
    """Answers a batch like a user's program, timing the first token."""
    model, options = bench.model, bench.options
    sampling = greedy(())
    begin = time.perf_counter()
    ready = pipeline.prepare(model, row.method, batch.prompts, batch.images, options)
    begun = pipeline.begin(model, ready, sampling)
    jax.block_until_ready(begun.state.token)
    middle = time.perf_counter()
    caches = jax.tree.leaves(begun.state.cache, is_leaf=lambda node: isinstance(node, Cache))
    nbytes = sum(cache.key.nbytes + cache.value.nbytes for cache in caches)
    state = pipeline.finish(model, begun.state, sampling, options.max_tokens, options.execution)
    jax.block_until_ready(state.token)
    end = time.perf_counter()
    return _Turn(middle - begin, end - middle, begun.kept, nbytes, fetch(begun.trace.logits))


def _seconds(call: Callable[[], Any]) -> float:
    """Returns the time of a call until its result is ready."""
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin


def _spread(values: Iterable[float]) -> list[float]:
    """Returns median, minimum and maximum."""
    values = sorted(values)
    return [statistics.median(values), values[0], values[-1]]


class _Stage(NamedTuple):
    """A stage before the first token; those with the same key are the same program."""

    key: Any
    run: Callable[[], Any]


def _stages(bench: Bench, row: Row, batch: Batch) -> dict[str, _Stage]:
    """Returns the stages of a row, each as a separate program."""
    (model, options, *_), method = bench, row.method
    taps = method.pruner.taps(model.config)
    vision = pipeline.encode(model, batch.images, taps, options.execution)
    asked = (model, method, batch.prompts, vision)
    ready, params, config = pipeline.prepare(*asked, options), model.params, model.config
    plan, kept, texts = ready.plan, ready.tokens, ready.texts
    place = functools.partial(_place, params, config, kept, texts, plan=plan)
    start = functools.partial(
        _start, params, config, ready.learned, place(), texts, greedy(()), plan=plan
    )
    shapes = (kept.index.shape, plan.slots[0], plan.projected)
    parts = {
        "tower": _Stage(
            taps, lambda: pipeline.encode(model, batch.images, taps, options.execution)
        ),
        "selector": _Stage(row.name, lambda: pipeline.choose(*asked)[0]),
        "projector": _Stage(shapes, place),
        "prefill": _Stage(plan, start),
    }
    if method.pruner.has_stop:
        shape = method.pruner.config
        words = jnp.asarray(batch.prompts.words)
        arguments = (params, config, method.params, vision.features, words)
        parts["encoder"] = _Stage(shape, functools.partial(_encode, *arguments, shape=shape))
    return parts


def _encode_for_policy(
    params: Any,
    config: ModelConfig,
    learned: Trained,
    features: Array,
    words: Array,
    *,
    shape: PolicyConfig,
) -> Array:
    """Computes the slots that a policy points at: its work before the loop."""
    text = decoder.embed(params["language"], words) if shape.text_width else None
    encoded = policy.encode(
        learned.weights, shape, policy.Inputs(features, text, stats=learned.stats)
    )
    return memory(learned.weights, encoded)


_encode = jit_for_weights(_encode_for_policy, ("config", "shape"))


def _time_stages(
    rows: Mapping[str, Mapping[str, _Stage]], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Times the stages of each row, turn by turn; shared stages are run once."""
    calls = {(part, s.key): s.run for stages in rows.values() for part, s in stages.items()}
    for call in calls.values():
        jax.block_until_ready(call())
    turns = [{key: _seconds(call) for key, call in calls.items()} for _ in range(rounds)]
    taken = {
        name: {part: [turn[part, s.key] for turn in turns] for part, s in stages.items()}
        for name, stages in rows.items()
    }
    for parts in taken.values():
        if "encoder" in parts:
            pairs = zip(parts["selector"], parts["encoder"], strict=True)
            parts["loop"] = [whole - encoder for whole, encoder in pairs]
    return taken


def _programs(bench: Bench, row: Row, batch: Batch) -> dict[str, Any]:
    """Returns the planned memory of a row's programs, and their operations."""
    model, method = bench.model, row.method
    ready = pipeline.prepare(model, method, batch.prompts, batch.images, bench.options)
    weights = (model.params, model.config)
    last = (ready.learned, ready.tokens, ready.texts, greedy(()))
    traced = [programs.run_begin.trace(*weights, *last, plan=ready.plan)]
    if not isinstance(ready.tokens, Pairs):
        pairs, plan = pipeline.plan_choice(
            *(model, method.pruner, batch.prompts, batch.images),
            execution=bench.options.execution,
        )
        traced.append(programs.run_choose.trace(*weights, method.params, pairs, plan=plan))
    return {
        "programs": len(traced),
        "memory_bytes": max(usage(t.lower().compile()).total for t in traced),
        "traced_tflops": sum(traced_flops(t.jaxpr) for t in traced) / 1e12,
    }


def _work(
    model: VLM, method: Method, batch: Batch, kept: int
) -> dict[str, tuple[float | int, int]]:
    """Returns each stage's operations, by formula, and bytes of weights and caches it moves."""
    config, pruner, size = model.config, method.pruner, len(batch.prompts.length)
    text, grid = int(batch.prompts.length[0]) - 1, tuple(map(int, batch.images.grid[0]))
    flops = first_token_flops(config, pruner, grid, text, text, kept)
    weights, language = model.params, model.params["language"]
    learned = method.params.weights if method.params else {}
    used = {name: part for name, part in learned.items() if name != "denoiser"}
    return {
        "tower": (size * flops["tower"], _nbytes(weights["vision"])),
        "selector": (size * flops["choice"], _nbytes(used)),
        "projector": (
            size * flops["projector"],
            _nbytes([weights[name] for name in ("projector", "merger") if name in weights]),
        ),
        "prefill": (
            size * flops["prefill"],
            _nbytes({name: part for name, part in language.items() if name != "embed"}),
        ),
    }


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
