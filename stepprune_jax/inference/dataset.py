"""Answers to data sets of questions, batch by batch; tokens are ranked once for all budgets."""

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
from stepprune_jax.inference.programs import num_compiled
from stepprune_jax.inference.sampling import greedy
from stepprune_jax.inference.shapes import exact_counts
from stepprune_jax.inference.text import answer_text
from stepprune_jax.parallel.placement import to_host
from stepprune_jax.pruning import Pruner, Ranker, Ranking

# A pruner, and the rows of a data set that it answers; None selects all rows.
Variant = tuple[Pruner, Int[np.ndarray, "_"] | None]


class Batching(NamedTuple):
    """Division of a data set into batches.

    Attributes:
        batch_size: prompts per batch.
        sizes: padded numbers of kept tokens, ascending; None selects `bucket_ladder`.
        widths: padded lengths of the prompts of a batch, ascending; if empty, the width of all
            prompts.
    """

    batch_size: int
    sizes: tuple[int, ...] | None = None
    widths: tuple[int, ...] = ()


class Answers(NamedTuple):
    """Answers to the prompts of a data set.

    Attributes:
        texts: one answer per prompt.
        kept: [q] number of visual tokens kept.
        order: for each prompt the indices of its kept tokens: in the order of selection for a
            ranker, in raster order for other methods, without merged or added tokens.
        seconds: [q] seconds per prompt, from its image and ids to its last token, in full batches;
            NaN where the time includes a compilation.
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
    questions: EncodedQuestions,
    options: RunOptions,
    batching: Batching,
    *,
    partial: bool = False,
) -> Iterator[Answers]:
    """Answers questions greedily by the variants of a pruner; see `Generator.answer_set`.

    There is no repetition penalty. The answer to a question does not depend on other questions. A
    `Ranker` orders the tokens once for all variants, if the tower has run and every question has an
    image.

    Raises:
        NotFiniteError: the model's logits are not finite for some questions, unless answers may be
            `partial`.
    """
    pruners = [pipeline.place_pruner(model, pruner) for pruner, _ in variants]
    ranking, ranking_seconds, n = None, 0.0, model.config.max_image_tokens
    has_features = questions.images.features is not None and len(questions.prompts.length) > 0
    if isinstance(pruners[0], Ranker) and has_features and questions.all_have_images:
        ranking, ranking_seconds = rank_all(
            model,
            pruners[0],
            questions.prompts,
            questions.images,
            steps=max(pruner.schedule(model.config, n).bound for pruner in pruners),
            batch_size=batching.batch_size,
        )
    for pruner, (_, rows) in zip(pruners, variants, strict=True):
        selected, ranking_of_rows = questions, ranking
        if rows is not None:
            selected = questions.take(rows)
            ranking_of_rows = _take(ranking, rows)
        answers = _answer_all(model, pruner, selected, options, batching, ranking_of_rows)
        if not (partial or answers.finite.all()):
            raise NotFiniteError(selected.prompts.number[~answers.finite].tolist(), answers)
        yield answers._replace(seconds=answers.seconds + questions.seconds + ranking_seconds)


def _take(ranking: Ranking | None, rows: Int[np.ndarray, "r"]) -> Ranking | None:
    """Returns the rows of a ranking; None without a ranking."""
    return jax.tree.map(lambda part: part[rows], ranking)


def milliseconds(seconds: float) -> float | None:
    """Converts a time of `Answers` to milliseconds; NaN, which JSON does not have, to None."""
    return None if np.isnan(seconds) else round(1000 * float(seconds), 3)


def batches(total: int, size: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the rows of each batch, where the last is padded, and their number before padding."""
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
        The ranking, on the host, and the mean seconds per row over batches without compilation; NaN
        if every batch compiled a program.
    """
    parts, seconds = [], []
    steps = min(steps, images.features.shape[1])
    for rows, count in batches(len(prompts.length), batch_size):
        start, compiled_before = time.perf_counter(), num_compiled()
        ranking = to_host(pipeline.rank(model, pruner, prompts.take(rows), images, steps))
        if num_compiled() == compiled_before:
            seconds.append(time.perf_counter() - start)
        parts.append(jax.tree.map(lambda part, count=count: part[:count], ranking))
    ranking = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
    return ranking, float(np.mean(seconds)) / batch_size if seconds else np.nan


def _answer_all(
    model: VLM,
    pruner: Pruner,
    questions: EncodedQuestions,
    options: RunOptions,
    batching: Batching,
    ranking: Ranking | None,
) -> Answers:
    """Answers every question by one pruner.

    Prompts are sorted by their padded widths and by their counts, if a ranking gives counts, so
    that each batch is padded to the smallest sizes that hold it. Prompts without an image come
    last.
    """
    prompts, images = questions.prompts, questions.images
    total, size = len(prompts.length), batching.batch_size
    widths = batching.widths or (prompts.ids.shape[1],)
    width_index = np.searchsorted(widths, prompts.length)
    counts, order = prompts.has_image.astype(np.int32), [np.zeros(0, np.int32)] * total
    if ranking is not None:
        sizes = images.sizes[prompts.image_of[:, 0]]
        exact = exact_counts(model.config, pruner, sizes)
        counts = np.asarray(pruner.counts(ranking, exact), np.int32)
        order = [indices[:count] for indices, count in zip(ranking.order, counts, strict=True)]
    sorted_rows = np.lexsort((-counts, -width_index))
    sampling = greedy(model.config.eos_token_ids)
    texts, seconds, kept = [""] * total, np.zeros(total), np.zeros(total, np.int32)
    is_finite = np.ones(total, bool)
    for places, num_rows in batches(total, size):
        rows = sorted_rows[places]
        start, compiled_before = time.perf_counter(), num_compiled()
        result = pipeline.first_tokens(
            model,
            pruner,
            prompts.take(rows),
            images,
            options,
            sampling,
            sizes=batching.sizes,
            width=int(widths[width_index[rows[0]]]),
            ranking=_take(ranking, rows),
        )
        state = pipeline.finish(model, result.state, sampling, options)
        tokens, num_tokens, finite = to_host((state.tokens, state.count, state.finite))
        is_timed = num_compiled() == compiled_before
        row_seconds = (time.perf_counter() - start) / size if is_timed else np.nan
        index = to_host(result.trace.stages[-1].index) if ranking is None else None
        rows, batch_rows = rows[:num_rows], np.arange(num_rows)
        seconds[rows], kept[rows] = row_seconds, result.kept[batch_rows]
        is_finite[rows] = finite[batch_rows]
        for batch_row, row in enumerate(rows.tolist()):
            if finite[batch_row]:
                ids = tokens[batch_row, : num_tokens[batch_row]].tolist()
                texts[row] = answer_text(model.tokenizer, ids)
            if index is not None:
                order[row] = index[batch_row][index[batch_row] >= 0]
    return Answers(texts, kept, order, seconds, is_finite)
