"""Conversations as batches: the batch of a step is a pure function of seed and step."""

import collections
import concurrent.futures
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from stepprune_jax.data.llava import Sample, encode_conversation
from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.training.language_loss import Targets
from stepprune_jax.training.pixels import PixelCache
from stepprune_jax.training.step import Batch

_AHEAD = 2


class Row(NamedTuple):
    """One conversation as numbers; its image is read when it is needed.

    Attributes:
        image: path of the picture.
        ids: with `IMAGE_TOKEN` at the image.
        text: ids of the human words.
        place: indices in the expanded sequence at which supervised tokens are predicted.
        target: the supervised tokens.
    """

    image: Any
    ids: Int[np.ndarray, " l"]
    text: Int[np.ndarray, " t"]
    place: Int[np.ndarray, " k"]
    target: Int[np.ndarray, " k"]


class Bucket(NamedTuple):
    """Static widths of a batch: ids, text and targets."""

    ids: int
    text: int
    targets: int


def encode_rows(
    samples: Sequence[Sample], tokenizer: Any, image_tokens: int, context_limit: int
) -> list[Row]:
    """Tokenises conversations and finds where their supervised tokens are predicted.

    Args:
        samples: conversations with one image each.
        tokenizer: the model's.
        image_tokens: N.
        context_limit: longest expanded sequence; what is beyond is cut off.

    Returns:
        A row for each sample.

    Raises:
        ValueError: no samples; one without an image, or without a supervised token within the
            limit. The message names it.
    """
    if not samples:
        raise ValueError("the training file has no conversation, expected at least one")
    return [_encode_row(sample, tokenizer, image_tokens, context_limit) for sample in samples]


def _encode_row(sample: Sample, tokenizer: Any, image_tokens: int, context_limit: int) -> Row:
    where = f"conversation {sample.index} (id {sample.id!r})"
    if sample.image is None:
        raise ValueError(
            f"{where} has no image: training needs one in each conversation, leave out those of "
            "text alone"
        )
    encoded = encode_conversation(tokenizer, sample.turns, 1)
    limit = context_limit - image_tokens + 1
    ids = np.array(encoded.ids[:limit], np.int32)
    labels = np.array(encoded.labels[:limit], np.int32)
    image = np.flatnonzero(ids == IMAGE_TOKEN)
    if len(image) != 1:
        raise ValueError(
            f"{where} has {len(image)} images within the first {context_limit} embeddings, "
            "expected 1"
        )
    at = np.flatnonzero(labels[1:] != -100) + 1
    if not len(at):
        raise ValueError(
            f"{where} has no answer within the first {context_limit} embeddings, which "
            "data.context_limit allows"
        )
    # A token is predicted one place before its own; the image takes N places and not one.
    place = at - 1 + (image_tokens - 1) * (at > image[0])
    text = np.array(encoded.text, np.int32)
    return Row(sample.image, ids, text, place.astype(np.int32), labels[at])


class Batches:
    """Batches by step, and the few shapes that they have.

    Every epoch is a permutation of its own. Nothing is kept between steps, so a resumed run needs
    no iterator state. The width of ids is a multiple of `multiple`; the other widths follow from
    it, so that there are no more programs than widths.
    """

    def __init__(
        self, rows: Sequence[Row], batch_size: int, seed: int, multiple: int,
        pixels: PixelCache | Callable, workers: int = 2,
    ):  # fmt: skip
        """Plans the shapes.

        Args:
            rows: from `encode_rows`.
            batch_size: rows of a batch.
            seed: of the permutations.
            multiple: of the width of ids and text.
            pixels: path to pixels.
            workers: threads that decode pictures.
        """
        self._rows, self._size, self._seed = rows, batch_size, seed
        self._pixels, self._workers = pixels, workers
        self.buckets = plan_buckets(rows, multiple)
        self._permutation = functools.lru_cache(2)(self._permute)

    def indices(self, step: int) -> Int[np.ndarray, " b"]:
        """Rows of batch `step`; an epoch may end within a batch."""
        number = np.arange(step * self._size, (step + 1) * self._size)
        epoch, at = np.divmod(number, len(self._rows))
        return np.array([self._permutation(int(e))[i] for e, i in zip(epoch, at, strict=True)])

    def _permute(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._rows))

    def first_images(self, count: int) -> list[Any]:
        """Paths of up to `count` distinct pictures, in the order in which training sees them."""
        order = (self._rows[i].image for i in self._permutation(0))
        return list(dict.fromkeys(order))[:count]

    def bucket(self, indices: Int[np.ndarray, " b"]) -> Bucket:
        """The widths of a batch of these rows."""
        longest = max(len(self._rows[i].ids) for i in indices)
        return next(bucket for bucket in self.buckets if bucket.ids >= longest)

    def _make(self, step: int, pool: concurrent.futures.Executor) -> Batch:
        indices = self.indices(step)
        rows, widths = [self._rows[i] for i in indices], self.bucket(indices)
        pixels = np.stack(list(pool.map(self._pixels, [row.image for row in rows])))
        ids, length = _padded([row.ids for row in rows], widths.ids)
        text, text_length = _padded([row.text for row in rows], widths.text)
        place, count = _padded([row.place for row in rows], widths.targets)
        target, _ = _padded([row.target for row in rows], widths.targets)
        supervised = np.arange(widths.targets) < count[:, None]
        targets = Targets(ids, length, place, target, supervised)
        return Batch(pixels, text, text_length, targets)

    def stream(self, first: int, last: int) -> Iterator[Batch]:
        """Batches of the steps first to last - 1, made in the background a few ahead.

        Args:
            first: first step.
            last: step to stop before.

        Yields:
            Batches of host arrays.

        Raises:
            FileNotFoundError: a picture is missing.
            ValueError: a picture is damaged or of another size.
        """
        decoders = concurrent.futures.ThreadPoolExecutor(self._workers)
        maker = concurrent.futures.ThreadPoolExecutor(1)
        waiting: collections.deque = collections.deque()
        try:
            for step in range(first, last):
                waiting.append(maker.submit(self._make, step, decoders))
                if len(waiting) > _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            maker.shutdown(cancel_futures=True)
            decoders.shutdown(cancel_futures=True)


def plan_buckets(rows: Sequence[Row], multiple: int) -> tuple[Bucket, ...]:
    """One shape for each padded width of ids: texts and targets as wide as any that may occur.

    Args:
        rows: all rows.
        multiple: of the widths of ids and text.

    Returns:
        Buckets in the order of their width.
    """
    widest: dict[int, tuple[int, int]] = {}
    for row in rows:
        width = _round_up(len(row.ids), multiple)
        text, targets = widest.get(width, (1, 1))
        widest[width] = (max(text, len(row.text)), max(targets, len(row.target)))
    buckets, text, targets = [], 1, 1
    for width in sorted(widest):
        # A batch holds shorter rows as well.
        text, targets = max(text, widest[width][0]), max(targets, widest[width][1])
        buckets.append(Bucket(width, _round_up(text, multiple), targets))
    return tuple(buckets)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(rows: Sequence[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded with 0 to a width, and the lengths."""
    length = np.array([len(row) for row in rows], np.int32)
    padded = np.zeros((len(rows), width), np.int32)
    for row, target in zip(rows, padded, strict=True):
        target[: len(row)] = row
    return padded, length
