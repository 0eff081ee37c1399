"""Whole sets of prompts, batch by batch: ranked once for all budgets, and answered."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.inference import pipeline
from stepprune_jax.inference.base import Images, Prompts, RunOptions
from stepprune_jax.inference.decoding import check_finite
from stepprune_jax.inference.sampling import greedy
from stepprune_jax.inference.text import answer_text
from stepprune_jax.inference.timing import timed
from stepprune_jax.parallel.placement import fetch
from stepprune_jax.pruning import Method, Ranking


class Batching(NamedTuple):
    """How a set of prompts is divided into batches.

    Attributes:
        batch_size: prompts per batch.
        sizes: static sizes that kept tokens are padded to; None for a ladder.
        widths: sizes that the prompts of a batch are padded to; if empty, that of all prompts.
    """

    batch_size: int
    sizes: tuple[int, ...] | None = None
    widths: tuple[int, ...] = ()


class Answers(NamedTuple):
    """Answers to a set of prompts.

    Attributes:
        texts: one answer per prompt.
        kept: [q] number of visual tokens kept.
        order: for each prompt the indices of its kept tokens: in order of choice for a ranker, in
            raster order for other methods, without merged or added tokens.
        seconds: [q] seconds per prompt: the time of its batch, from features to the last token,
            divided by the batch size, padding included.
    """

    texts: list[str]
    kept: Int[np.ndarray, "q"]
    order: list[np.ndarray]
    seconds: Float[np.ndarray, "q"]


def batches(total: int, size: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the row numbers of each batch, the last one padded, and how many are real."""
    for first in range(0, total, size):
        rows = np.arange(first, first + size)
        yield np.minimum(rows, total - 1), min(size, total - first)


def rank_all(
    model: VLM,
    method: Method,
    prompts: Prompts,
    images: Images,
    *,
    steps: int,
    batch_size: int,
) -> tuple[Ranking, float]:
    """Ranks the tokens of each prompt's image, for all budgets of a `Ranker` at once.

    Args:
        model: the model.
        method: the ranker, from `place_method`.
        prompts: prompts with one image each.
        images: all images after the tower, on the host.
        steps: length of the order; at most the number of tokens of the largest image.
        batch_size: prompts per batch.

    Returns:
        The ranking, on the host, and the mean seconds per row, padding included.
    """
    parts, seconds = [], 0.0
    steps = min(steps, images.features.shape[1])
    for rows, count in batches(len(prompts.length), batch_size):

        def run(rows=rows):
            return fetch(pipeline.rank(model, method, prompts.take(rows), images, steps))

        ranking, taken = timed(run)
        seconds += taken
        parts.append(jax.tree.map(lambda part, count=count: part[:count], ranking))
    ranking = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
    return ranking, seconds / (len(parts) * batch_size)


def answer_all(
    model: VLM,
    method: Method,
    prompts: Prompts,
    images: Images,
    options: RunOptions,
    batching: Batching,
    *,
    ranking: Ranking | None = None,
) -> Answers:
    """Answers every prompt greedily, without a repetition penalty.

    Prompts are sorted by their widths, if there are several, and by their counts, if a ranking
    gives them, so that a batch is padded to the smallest sizes that hold it; those without an image
    come last. The answer to a prompt does not depend on the others.

    Args:
        model: the model.
        method: how to prune, from `place_method`.
        prompts: prompts with one image each, or none.
        images: all images, on the host: before the tower if no two prompts share one, otherwise
            after it.
        options: how the model is run, and the longest answer.
        batching: sizes.
        ranking: result of `rank_all` for these prompts, which all have an image.

    Returns:
        The answers, in the order of the prompts.

    Raises:
        ValueError: the model's logits are not finite; the message gives the prompt's number.
    """
    total, size = len(prompts.length), batching.batch_size
    widths = batching.widths or (prompts.ids.shape[1],)
    bucket = np.searchsorted(widths, prompts.length)
    count, order = prompts.has_image.astype(np.int32), [np.zeros(0, np.int32)] * total
    if ranking is not None:
        exact = pipeline.exact_counts(method.pruner, images.sizes[prompts.image_of[:, 0]])
        count = np.asarray(method.pruner.counts(method.params, ranking, exact), np.int32)
        order = [picks[:kept] for picks, kept in zip(ranking.order, count, strict=True)]
    ranked = np.lexsort((-count, -bucket))
    sampling = greedy(model.config.eos_token_ids)
    known: dict[tuple[int, ...], str] = {}
    texts, seconds, kept = [""] * total, np.zeros(total), np.zeros(total, np.int32)
    for places, real in batches(total, size):
        rows = ranked[places]

        def run(rows=rows):
            batch = pipeline.prepare(
                model,
                method,
                prompts.take(rows),
                images,
                options,
                sizes=batching.sizes,
                width=int(widths[bucket[rows[0]]]),
                ranking=None if ranking is None else jax.tree.map(lambda x: x[rows], ranking),
            )
            begun = pipeline.begin(model, batch, sampling)
            limit, execution = options.max_tokens, options.execution
            state = pipeline.finish(model, begun.state, sampling, limit, execution)
            tokens, counts, finite = fetch((state.tokens, state.count, state.finite))
            check_finite(finite, prompts.number[rows])
            ids = [tuple(row[:n].tolist()) for row, n in zip(tokens, counts, strict=True)]
            return ids, begun.kept, begun.trace.stages[-1].index

        (ids, left, index), taken = timed(run)
        if ranking is None:
            index = fetch(index)
        for at, row in enumerate(rows[:real].tolist()):
            if ids[at] not in known:
                known[ids[at]] = answer_text(model.tokenizer, ids[at])
            texts[row], seconds[row], kept[row] = known[ids[at]], taken / size, left[at]
            if ranking is None:
                order[row] = index[at][index[at] >= 0]
    return Answers(texts, kept, order, seconds)
