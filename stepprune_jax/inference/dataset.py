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
from stepprune_jax.inference.plan import adapt_counts
from stepprune_jax.inference.programs import num_compiled
from stepprune_jax.inference.sampling import greedy
from stepprune_jax.inference.shapes import exact_counts
from stepprune_jax.inference.text import answer_text
from stepprune_jax.parallel.placement import to_host
from stepprune_jax.pruning import Pruner, Ranker, Ranking

# A pruner, and the rows of a data set that are answered with the pruner; None selects all rows.
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
        order: for each prompt, the indices of its kept tokens without merged or added tokens: in
            the order of selection for a ranker, in raster order for other methods.
        seconds: [q] mean seconds per prompt of a full batch, from image and ids to the last token;
            NaN for batches that compiled a program.
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
    """Answers questions greedily with each variant of a pruner; see `Generator.answer_set`.

    There is no repetition penalty. The answer to a question does not depend on other questions. A
    `Ranker` orders the tokens once for all variants, if the tower has run and every question has an
    image.

    Args:
        model: the model.
        variants: pruners of one method with different budgets, each with the rows of `questions`
            to answer.
        questions: the questions.
        options: how the model is run.
        batching: how the questions are divided into batches.
        partial: whether a question with logits that are not finite gets an empty answer instead of
            an error.

    Yields:
        The answers of each variant, in the order of its rows.

    Raises:
        NotFiniteError: the model's logits are not finite for some questions, and `partial` is
            False.
    """
    pruners = [pipeline.place_pruner(model, pruner) for pruner, _ in variants]
    ranking, ranking_seconds, n = None, 0.0, model.config.max_image_tokens
    has_features = questions.images.features is not None and len(questions.prompts.length) > 0
    max_steps = max(pruner.schedule(model.config, n).bound for pruner in pruners)
    has_videos = questions.images.clips is not None
    if (has_videos or pruners[0].keeps_images) and questions.images.features is not None:
        max_steps = questions.images.features.shape[1]
    if isinstance(pruners[0], Ranker) and has_features and questions.all_have_images:
        ranking, ranking_seconds = rank_all(
            model,
            pruners[0],
            questions.prompts,
            questions.images,
            steps=max_steps,
            batch_size=batching.batch_size,
        )
    for pruner, (_, rows) in zip(pruners, variants, strict=True):
        variant_questions, variant_ranking = questions, ranking
        if rows is not None:
            variant_questions = questions.take(rows)
            variant_ranking = _take(ranking, rows)
        answers = _answer_all(
            model, pruner, variant_questions, options, batching, ranking=variant_ranking
        )
        if not (partial or answers.finite.all()):
            numbers = variant_questions.prompts.number[~answers.finite].tolist()
            raise NotFiniteError(numbers, answers)
        yield answers._replace(seconds=answers.seconds + questions.seconds + ranking_seconds)


def _take(ranking: Ranking | None, rows: Int[np.ndarray, "r"]) -> Ranking | None:
    """Returns the rows of a ranking; None without a ranking."""
    return jax.tree.map(lambda array: array[rows], ranking)


def milliseconds(seconds: float) -> float | None:
    """Converts a time of `Answers` to milliseconds, and NaN to None, because JSON has no NaN."""
    return None if np.isnan(seconds) else round(1000 * float(seconds), 3)


def batches(total: int, size: int) -> Iterator[tuple[np.ndarray, int]]:
    """Divides `total` rows into batches of `size` rows.

    Yields:
        The row indices of a batch, where the last batch is padded with the last row; and the number
        of rows before the padding.
    """
    for first_row in range(0, total, size):
        rows = np.arange(first_row, first_row + size)
        yield np.minimum(rows, total - 1), min(size, total - first_row)


def rank_all(
    model: VLM,
    pruner: Ranker,
    prompts: Prompts,
    images: Images,
    *,
    steps: int,
    batch_size: int,
) -> tuple[Ranking, float]:
    """Orders the tokens of each prompt's image once for all budgets of a `Ranker`.

    Args:
        model: the model.
        pruner: the ranker, from `place_pruner`.
        prompts: prompts with one image each.
        images: all images after the tower, on the host.
        steps: number of tokens in each order; reduced to the padded number of image tokens.
        batch_size: prompts per batch.

    Returns:
        The ranking, on the host; and the mean seconds per row of the batches that compiled no
        program, or NaN if every batch compiled a program.
    """
    batch_rankings, batch_seconds = [], []
    assert images.features is not None
    steps = min(steps, images.features.shape[1])
    for rows, num_rows in batches(len(prompts.length), batch_size):
        start_time, num_compiled_before = time.perf_counter(), num_compiled()
        padded = to_host(pipeline.rank(model, pruner, prompts.take(rows), images, steps))
        if num_compiled() == num_compiled_before:
            batch_seconds.append(time.perf_counter() - start_time)
        batch_rankings.append(_take(padded, np.arange(num_rows)))
    ranking = jax.tree.map(lambda *arrays: np.concatenate(arrays), *batch_rankings)
    seconds_per_row = float(np.mean(batch_seconds)) / batch_size if batch_seconds else np.nan
    return ranking, seconds_per_row


def _answer_all(
    model: VLM,
    pruner: Pruner,
    questions: EncodedQuestions,
    options: RunOptions,
    batching: Batching,
    *,
    ranking: Ranking | None,
) -> Answers:
    """Answers every question with one pruner.

    Prompts are sorted before they are divided into batches: by padded width, then by number of kept
    tokens if a ranking gives this number. So the prompts of a batch need about the same padding.
    Prompts without an image come last.

    Args:
        model: the model.
        pruner: the pruner, from `place_pruner`.
        questions: the questions.
        options: how the model is run.
        batching: how the questions are divided into batches.
        ranking: the order of each question's tokens; None runs the pruner in each batch.

    Returns:
        The answers, in the order of the questions.
    """
    prompts, images = questions.prompts, questions.images
    num_prompts, batch_size = len(prompts.length), batching.batch_size
    widths = batching.widths or (prompts.ids.shape[1],)
    width_index = np.searchsorted(widths, prompts.length)
    counts, order = prompts.has_image.astype(np.int32), [np.zeros(0, np.int32)] * num_prompts
    if ranking is not None and isinstance(pruner, Ranker):
        image_sizes = images.sizes[prompts.image_of[:, 0]]
        max_counts = exact_counts(model.config, pruner, image_sizes)
        if pruner.budget.is_exact:
            max_counts = adapt_counts(pruner, images, prompts.image_of[:, 0], max_counts)
        counts = np.asarray(pruner.counts(ranking, max_counts), np.int32)
        order = [indices[:count] for indices, count in zip(ranking.order, counts, strict=True)]
    sorted_rows = np.lexsort((-counts, -width_index))  # the last key sorts first
    sampling = greedy(model.config.eos_token_ids)
    texts, seconds = [""] * num_prompts, np.zeros(num_prompts)
    num_kept, is_finite = np.zeros(num_prompts, np.int32), np.ones(num_prompts, bool)
    for places, num_rows in batches(num_prompts, batch_size):
        rows = sorted_rows[places]
        start_time, num_compiled_before = time.perf_counter(), num_compiled()
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
        has_compiled = num_compiled() > num_compiled_before
        row_seconds = np.nan if has_compiled else (time.perf_counter() - start_time) / batch_size
        index = to_host(result.trace.stages[-1].index) if ranking is None else None
        rows, batch_rows = rows[:num_rows], np.arange(num_rows)  # without padding
        seconds[rows], num_kept[rows] = row_seconds, result.kept[batch_rows]
        is_finite[rows] = finite[batch_rows]
        for batch_row, row in enumerate(rows.tolist()):
            if finite[batch_row]:
                ids = tokens[batch_row, : num_tokens[batch_row]].tolist()
                texts[row] = answer_text(model.tokenizer, ids)
            if index is not None:
                order[row] = index[batch_row][index[batch_row] >= 0]
    return Answers(texts, num_kept, order, seconds, is_finite)
