"""Greedy answers to all questions of a split, for any selection of each question's tokens."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.evaluation.split import Encoded
from stepprune_jax.evaluation.timing import timed
from stepprune_jax.inference import decoding
from stepprune_jax.inference.prefix import place
from stepprune_jax.inference.text import answer_text
from stepprune_jax.models.llava.prompts import CONTEXT_LIMIT
from stepprune_jax.parallel.placement import fetch, mesh_of, place_rows
from stepprune_jax.policy import Pruned, choose_bucket
from stepprune_jax.user_input import user_input


class Selection(NamedTuple):
    """What is kept for each question: the first `count` entries of its order.

    Attributes:
        order: [q, t] token indices in order of choice; what lies behind the count does not matter.
        count: [q] tokens kept.
    """

    order: Int[np.ndarray, "q t"]
    count: Int[np.ndarray, "q"]


class Answering(NamedTuple):
    """How answers are made.

    Attributes:
        ladder: sizes that kept tokens are padded to; programs are compiled once for each in use.
        batch_size: questions at a time.
        max_new_tokens: longest answer.
        positions: position ids of kept tokens, "original" or "compact".
        attention: "matmul", "xla" or "cudnn".
        widths: sizes that prompts of a batch are padded to; without any, that of all questions.
    """

    ladder: tuple[int, ...]
    batch_size: int
    max_new_tokens: int
    positions: str = "original"
    attention: str = "matmul"
    widths: tuple[int, ...] = ()


class Answered(NamedTuple):
    """What was answered.

    Attributes:
        texts: one a question.
        seconds: [q] of each question: its share of the time of its batch, from kept features to
            the last token.
    """

    texts: list[str]
    seconds: np.ndarray


@user_input()
def check_lengths(split: Encoded, num_tokens: int) -> None:
    """Refuses prompts that are too long for the model with all their visual tokens.

    Args:
        split: the questions.
        num_tokens: visual tokens of a picture.

    Raises:
        ValueError: the number of the first such question and its length.
    """
    longest = int(np.argmax(split.length))
    total = int(split.length[longest]) - 1 + num_tokens
    if total > CONTEXT_LIMIT:
        raise ValueError(
            f"question {longest} takes {total} embeddings with all visual tokens, more than "
            f"{CONTEXT_LIMIT}: its end would be cut"
        )


def cut_prompts(split: Encoded, num_tokens: int, numbers: Sequence[int]) -> Encoded:
    """Cuts prompts at the right end that are too long with all visual tokens, as LLaVA does.

    Args:
        split: the questions.
        num_tokens: visual tokens of a picture.
        numbers: of the questions, for the warning.

    Returns:
        The questions; a `UserWarning` tells of those that were cut.
    """
    most = CONTEXT_LIMIT - np.where(split.has_image, num_tokens - 1, 0)
    long = np.flatnonzero(split.length > most)
    if len(long):
        warnings.warn(
            f"question {numbers[int(long[0])]} and {len(long) - 1} more take more than "
            f"{CONTEXT_LIMIT} embeddings: the ends of their prompts were cut",
            stacklevel=2,
        )
    return split._replace(length=np.minimum(split.length, most).astype(np.int32))


def answer(
    model: VLM,
    split: Encoded,
    selection: Selection,
    how: Answering,
    report: Callable[[int], None] = lambda done: None,
) -> Answered:
    """Answers every question from its kept tokens, in raster order, as `generate` does.

    Questions are sorted by their widths, if there are several, and their counts, so that a batch is
    padded to the smallest sizes that hold it. What a question is answered does not depend on the
    others.

    Args:
        model: the model.
        split: the questions.
        selection: what is kept.
        how: sizes and settings.
        report: called with the number of questions done at each batch.

    Returns:
        The answers, in the order of the split.

    Raises:
        ValueError: a count above the largest size.
    """
    total, size = len(split.length), how.batch_size
    widths = how.widths or (split.ids.shape[1],)
    bucket = np.searchsorted(widths, split.length)
    ranked = np.lexsort((-selection.count, -bucket))
    known: dict[tuple[int, ...], str] = {}
    texts, seconds = [""] * total, np.zeros(total)
    for first in range(0, total, size):
        rows = ranked[np.minimum(np.arange(first, first + size), total - 1)]
        count = min(size, total - first)
        batch = functools.partial(
            _answer_batch, model, split, selection, how, rows, widths[bucket[rows[0]]]
        )
        found, taken = timed(batch, *_COMPILED)
        for row, ids in zip(rows[:count], found, strict=False):
            if ids not in known:
                known[ids] = answer_text(model.tokenizer, ids)
            texts[row], seconds[row] = known[ids], taken / count
        report(first + count)
    return Answered(texts, seconds)


_COMPILED = tuple(
    program.num_compiled for program in (place, decoding.run_start, decoding.run_decode)
)


def _answer_batch(
    model: VLM, split: Encoded, selection: Selection, how: Answering, rows: np.ndarray, width: int
) -> Sequence[tuple[int, ...]]:
    """Generated ids of a batch of full size."""
    mesh = mesh_of(model.params)
    pruned = keep(split, selection, rows, how.ladder)
    # One capacity for each size of the ladder: prompts are padded to one width.
    capacity = width + pruned.tokens.shape[1]
    slot = np.arange(len(rows), dtype=np.int32)[:, None]
    ids, length, pruned, slot, present = place_rows(
        mesh,
        (split.ids[rows, :width], split.length[rows], pruned, slot, np.ones(slot.shape, bool)),
    )
    sequence = place(
        model.params, model.config, ids, length, pruned, slot, present,
        positions=how.positions, capacity=capacity, mesh=mesh,
    )  # fmt: skip
    # Greedy: the keys are never used.
    keys = decoding.row_keys(jax.random.key(0), len(rows))
    stops = np.array(model.config.eos_token_ids, np.int32)
    greedy = decoding.Settings(np.float32(0), np.float32(1), stops)
    state = decoding.run_start(
        model.params, model.config, sequence, keys, greedy,
        max_tokens=how.max_new_tokens, attention=how.attention, mesh=mesh,
    )  # fmt: skip
    state = decoding.run_decode(
        model.params, model.config, state, greedy, np.int32(how.max_new_tokens), mesh=mesh
    )
    tokens, counts = fetch((state.tokens, state.count))
    return [tuple(row[:n].tolist()) for row, n in zip(tokens, counts, strict=True)]


def keep(split: Encoded, selection: Selection, rows: np.ndarray, ladder: Sequence[int]) -> Pruned:
    """Gathers what is kept of a batch on the host, in raster order.

    Args:
        split: the questions.
        selection: what is kept for each.
        rows: [b] questions of the batch.
        ladder: sizes to choose from.

    Returns:
        The kept tokens in the smallest size that holds the batch.
    """
    n = split.features.shape[1]
    count = selection.count[rows].astype(np.int32)
    size = choose_bucket(count, ladder)
    picks = selection.order[rows, :size]
    real = np.arange(picks.shape[1]) < count[:, None]
    index = np.full((len(rows), size), n, np.int32)
    index[:, : picks.shape[1]] = np.where(real, picks, n)
    index.sort(axis=1)
    valid = index < n
    tokens = split.features[split.image_of[rows][:, None], np.minimum(index, n - 1)]
    tokens = np.where(valid[..., None], tokens, np.zeros((), tokens.dtype))
    return Pruned(np.where(valid, index, -1), tokens, valid, count)
