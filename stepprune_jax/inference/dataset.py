"""Whole sets of questions, batch by batch: ranked once for all budgets, and answered."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.inference import pipeline
from stepprune_jax.inference.base import Images, Prompts, RunOptions
from stepprune_jax.inference.decoding import NotFiniteError
from stepprune_jax.inference.encode import EncodedQuestions
from stepprune_jax.inference.plan import exact_counts
from stepprune_jax.inference.programs import num_compiled
from stepprune_jax.inference.sampling import greedy
from stepprune_jax.inference.text import answer_text
from stepprune_jax.parallel.placement import to_host
from stepprune_jax.pruning import Pruner, Ranker, Ranking

# A pruner, and the rows of a set that it is to answer; None for all.
Variant = tuple[Pruner, Int[np.ndarray, "_"] | None]


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
        seconds: [q] seconds per prompt, from its image and ids to its last token, in full batches;
            NaN where a program was compiled on the way.
        finite: [q] False = the model's logits were not finite, and the text is empty.
    """

    texts: list[str]
    kept: Int[np.ndarray, "q"]
    order: list[np.ndarray]
    seconds: Float[np.ndarray, "q"]
    finite: Bool[np.ndarray, "q"]


def answer_set(
    model: VLM,
    variants: Sequence[Variant],
    asked: EncodedQuestions,
    options: RunOptions,
    batching: Batching,
    *,
    partial: bool = False,
) -> Iterator[Answers]:
    """Answers questions greedily by the variants of a pruner; see `Generator.answer_set`.

    There is no repetition penalty. The answer to a question does not depend on the others. A
    `Ranker` puts tokens in order once for all variants, if the tower has run and every question has
    an image.

    Raises:
        NotFiniteError: the model's logits are not finite for some questions, unless answers may be
            `partial`.
    """
    placed = [pipeline.place_pruner(model, pruner) for pruner, _ in variants]
    ranking, ranked, n = None, 0.0, model.config.max_image_tokens
    ranks = isinstance(placed[0], Ranker) and asked.images.features is not None
    if ranks and len(asked.prompts.length) and asked.all_shown:
        steps = max(pruner.schedule(model.config, n).bound for pruner in placed)
        ranking, ranked = rank_all(
            model,
            placed[0],
            asked.prompts,
            asked.images,
            steps=steps,
            batch_size=batching.batch_size,
        )
    for pruner, (_, rows) in zip(placed, variants, strict=True):
        mine = asked if rows is None else asked.take(rows)
        order = ranking
        if ranking is not None and rows is not None:
            order = jax.tree.map(lambda part, rows=rows: part[rows], ranking)
        answers = _answer_all(model, pruner, mine, options, batching, order)
        if not (partial or answers.finite.all()):
            raise NotFiniteError(mine.prompts.number[~answers.finite].tolist(), answers)
        yield answers._replace(seconds=answers.seconds + asked.seconds + ranked)


def milliseconds(seconds: float) -> float | None:
    """Returns a time of `Answers` in milliseconds; None for NaN, which JSON does not have."""
    return None if np.isnan(seconds) else round(1000 * float(seconds), 3)


def batches(total: int, size: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the row numbers of each batch, the last one padded, and how many are real."""
    for first in range(0, total, size):
        rows = np.arange(first, first + size)
        yield np.minimum(rows, total - 1), min(size, total - first)


def rank_all(
    model: VLM,
    pruner: Ranker,
    prompts: Prompts,
    images: Images,
    *,
    steps: int,
    batch_size: int,
) -> tuple[Ranking, float]:
    """Ranks the tokens of each prompt's image, for all budgets of a `Ranker` at once.

    Args:
        model: the model.
        pruner: the ranker, from `place_pruner`.
        prompts: prompts with one image each.
        images: all images after the tower, on the host.
        steps: length of the order; at most the number of tokens of the largest image.
        batch_size: prompts per batch.

    Returns:
        The ranking, on the host, and the mean seconds per row of a full batch without compilation,
        NaN if there is none.
    """
    parts, seconds = [], []
    steps = min(steps, images.features.shape[1])
    for rows, count in batches(len(prompts.length), batch_size):
        begin, before = time.perf_counter(), num_compiled()
        ranking = to_host(pipeline.rank(model, pruner, prompts.take(rows), images, steps))
        if num_compiled() == before:
            seconds.append(time.perf_counter() - begin)
        parts.append(jax.tree.map(lambda part, count=count: part[:count], ranking))
    ranking = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
    return ranking, float(np.mean(seconds)) / batch_size if seconds else np.nan


def _answer_all(
    model: VLM,
    pruner: Pruner,
    asked: EncodedQuestions,
    options: RunOptions,
    batching: Batching,
    ranking: Ranking | None,
) -> Answers:
    """Answers every question by one pruner.

    Prompts are sorted by their widths, if there are several, and by their counts, if a ranking
    gives them, so that a batch is padded to the smallest sizes that hold it; those without an image
    come last.
    """
    prompts, images = asked.prompts, asked.images
    total, size = len(prompts.length), batching.batch_size
    widths = batching.widths or (prompts.ids.shape[1],)
    bucket = np.searchsorted(widths, prompts.length)
    count, order = prompts.has_image.astype(np.int32), [np.zeros(0, np.int32)] * total
    if ranking is not None:
        sizes = images.sizes[prompts.image_of[:, 0]]
        exact = exact_counts(model.config, pruner, sizes)
        count = np.asarray(pruner.counts(ranking, exact), np.int32)
        order = [picks[:kept] for picks, kept in zip(ranking.order, count, strict=True)]
    ranked = np.lexsort((-count, -bucket))
    sampling = greedy(model.config.eos_token_ids)
    known: dict[tuple[int, ...], str] = {}
    texts, seconds, kept = [""] * total, np.zeros(total), np.zeros(total, np.int32)
    is_finite = np.ones(total, bool)
    for places, real in batches(total, size):
        rows = ranked[places]
        begin, before = time.perf_counter(), num_compiled()
        batch = pipeline.prepare(
            model,
            pruner,
            prompts.take(rows),
            images,
            options,
            sizes=batching.sizes,
            width=int(widths[bucket[rows[0]]]),
            ranking=None if ranking is None else jax.tree.map(lambda x, r=rows: x[r], ranking),
        )
        begun = pipeline.begin(model, batch, sampling)
        state = pipeline.finish(model, begun.state, sampling, options)
        tokens, counts, finite = to_host((state.tokens, state.count, state.finite))
        taken = time.perf_counter() - begin if num_compiled() == before else np.nan
        index = to_host(begun.trace.stages[-1].index) if ranking is None else None
        for at, row in enumerate(rows[:real].tolist()):
            is_finite[row] = finite[at]
            ids = tuple(tokens[at, : counts[at]].tolist()) if finite[at] else ()
            if ids not in known:
                known[ids] = answer_text(model.tokenizer, ids)
            texts[row], seconds[row], kept[row] = known[ids], taken / size, begun.kept[at]
            if index is not None:
                order[row] = index[at][index[at] >= 0]
    return Answers(texts, kept, order, seconds, is_finite)
