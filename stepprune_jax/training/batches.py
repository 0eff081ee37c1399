"""Batches of conversations; the batch of a step is a pure function of seed and step."""

import collections
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from stepprune_jax.checkpoints.folder import ModelFolder, load_tokenizer
from stepprune_jax.data.corpus import Corpus, LengthLimits, Lengths, TrainingRow
from stepprune_jax.data.encoding import ConversationEncoder
from stepprune_jax.data.json_files import JsonObject
from stepprune_jax.data.open_corpus import open_corpus
from stepprune_jax.data.order import Order
from stepprune_jax.data.prompts import pad_batch
from stepprune_jax.data.source import DataSettings, Source
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.images import Pixels, join_images, stack_images
from stepprune_jax.policy.buckets import round_up
from stepprune_jax.training.language_loss import Targets
from stepprune_jax.training.settings import Run
from stepprune_jax.training.step import TrainingBatch
from stepprune_jax.user_input import UserError

_LOG = logging.getLogger(__name__)

# Batches that wait in addition to those that threads are working on.
_AHEAD = 2


class Bucket(NamedTuple):
    """Static widths of a batch: ids, text and targets."""

    ids: int
    text: int
    targets: int


class Loading(NamedTuple):
    """How batches are built; it affects no number in them, except for `skip_unreadable`.

    Attributes:
        threads: threads that build batches.
        local: rows of each batch that are built here; other hosts build the others.
        skip_unreadable: whether a row whose image cannot be read is replaced by the next row of the
            batch, with a warning; otherwise it is an error.
    """

    threads: int = 2
    local: slice = slice(None)
    skip_unreadable: bool = False


class Preprocessing(NamedTuple):
    """How a family converts images to pixels.

    Attributes:
        read: maps a path to pixels, for example `Backbone.pixel_cache`.
        grids: maps pixels of several images to the grids of their visual tokens.
        largest: shapes of the pixels of the largest image, with any number of images, to which
            batches are padded if hosts build parts of them and must agree; None if all images have
            one size.
    """

    read: Callable[[Path], Pixels]
    grids: Callable[[Pixels], Int[np.ndarray, "r 2"]]
    largest: Pixels | None = None


class Batches:
    """Batches by step, with a few shapes.

    The width of ids is a multiple of `multiple`; the other widths follow from it, so that there are
    no more programs than widths. They are computed from token counts before any row is tokenised,
    so that hosts that build different rows of a batch agree.
    """

    def __init__(
        self,
        corpus: Corpus,
        images: Preprocessing,
        batch_size: int,
        seed: int,
        multiple: int,
        group: int = 1,
        loading: Loading | None = None,
    ):
        """Plans the shapes."""
        self._corpus, self._images, self._loading = corpus, images, loading or Loading()
        self._shared = len(range(batch_size)[self._loading.local]) < batch_size
        self.buckets = plan_buckets(corpus.lengths, multiple)
        widths = [bucket.ids for bucket in self.buckets]
        self._bucket = np.searchsorted(widths, corpus.lengths.ids).astype(np.int32)
        self._order = Order(self._bucket, batch_size, seed, group)

    def __len__(self) -> int:
        """Returns the number of rows in an epoch; the batches continue past its end."""
        return len(self._corpus)

    @property
    def identity(self) -> str:
        """Hash of the usable rows of the training file."""
        return self._corpus.identity

    def indices(self, step: int) -> Int[np.ndarray, " b"]:
        """Returns the rows of batch `step`, over all hosts."""
        return self._order.indices(step)

    def samples(self, step: int) -> list[JsonObject]:
        """Describes the rows of batch `step`, over all hosts; see `Corpus.describe`."""
        return [self._corpus.describe(row) for row in self.indices(step).tolist()]

    def first_images(self, count: int) -> Iterator[Pixels]:
        """Yields up to `count` distinct readable images, in the order of training."""
        seen: set[Path] = set()
        for row in self._order.epoch(0).tolist():
            if not count:
                break
            path = self._corpus.image(row)
            if path in seen:
                continue
            seen.add(path)
            pixels = self._read(row)
            if pixels is not None:
                count -= 1
                yield pixels

    def bucket(self, indices: Int[np.ndarray, " b"]) -> Bucket:
        """Returns the widths of a batch of these rows."""
        return self.buckets[self._bucket[indices].max()]

    def __getitem__(self, step: int) -> TrainingBatch:
        """Returns the rows of batch `step` that are built here."""
        indices = self.indices(step)
        widths = self.bucket(indices)
        numbers, pixels = self._readable(indices)
        rows = self._corpus.rows(numbers)
        text, text_length = pad_batch([row.text for row in rows], width=widths.text)
        targets = stack_targets(rows, self._images.grids(pixels), widths.ids, widths.targets)
        return TrainingBatch(pixels, text, text_length, targets)

    def _readable(self, indices: Int[np.ndarray, " b"]) -> tuple[list[int], Pixels]:
        """Returns the rows to build here, and the pixels of their images."""
        numbers, pixels = [], []
        for place in range(len(indices))[self._loading.local]:
            # Every host replaces an unreadable row by the same row.
            for row in np.roll(indices, -place).tolist():
                image = self._read(row)
                if image is not None:
                    break
            else:
                where = self._corpus.where(int(indices[place]))
                raise UserError(f"{where}: no image of its batch can be read")
            numbers.append(row)
            pixels.append(image)
        pixels = stack_images(pixels)
        largest = self._images.largest
        if self._shared and largest is not None:
            none = jax.tree.map(lambda x: np.zeros((0, *x.shape[1:]), x.dtype), largest)
            pixels = join_images([none, pixels])
        return numbers, pixels

    def _read(self, row: int) -> Pixels | None:
        """Returns the pixels of a row; None if unreadable and rows may be skipped."""
        try:
            return self._images.read(self._corpus.image(row))
        except (FileNotFoundError, MemoryError, UserError) as error:
            reason = error if str(error) else "it needs more memory than is available"
            message = f'{self._corpus.where(row)}: "image": {reason}'
            if not self._loading.skip_unreadable:
                kind = FileNotFoundError if isinstance(error, FileNotFoundError) else UserError
                raise kind(message) from error
            _LOG.warning("%s; skipped", message)
            return None

    def stream(self, steps: int, state: JsonObject | None = None) -> "Stream":
        """Returns the batches up to step `steps` - 1, built a few ahead in the background.

        Args:
            steps: number of steps of the whole run.
            state: `Stream.state` to resume from; by default the stream begins with the first batch.

        Returns:
            An iterator that must be closed.

        Raises:
            ValueError: the state is from a stream of other rows.
        """
        first = 0
        if state is not None:
            if state["rows"] != self.identity:
                raise UserError(
                    f"the run began with other samples of {self._corpus.file} than the "
                    f"{len(self._corpus):,} that can be used now: images were added or removed"
                )
            first = state["next_batch"]
        return Stream(self, first, steps, self._loading.threads)


class Stream(Iterator):
    """An iterator of batches, whose state resumes it on any number of hosts."""

    def __init__(self, batches: Batches, first: int, steps: int, threads: int):
        """Starts building batches when the first is requested."""
        self._batches, self._next = batches, first
        self._steps = iter(range(first, steps))
        self._pool, self._ahead = ThreadPoolExecutor(threads), threads + _AHEAD
        self._waiting: collections.deque[Future[TrainingBatch]] = collections.deque()

    @property
    def state(self) -> JsonObject:
        """Returns the state that `Batches.stream` resumes from, as JSON values."""
        return {"next_batch": self._next, "rows": self._batches.identity}

    def __next__(self) -> TrainingBatch:
        for step in itertools.islice(self._steps, self._ahead - len(self._waiting)):
            self._waiting.append(self._pool.submit(self._batches.__getitem__, step))
        if not self._waiting:
            raise StopIteration
        batch = self._waiting.popleft().result()
        self._next += 1
        return batch

    def close(self) -> None:
        """Stops the threads, after the batches that they are building."""
        self._pool.shutdown(cancel_futures=True)


def stack_targets(
    rows: Sequence[TrainingRow], grid: Int[np.ndarray, "r 2"], ids: int, targets: int
) -> Targets:
    """Stacks conversations to one batch."""
    tokens, length = pad_batch([row.ids for row in rows], width=ids)
    place, count = pad_batch([row.place for row in rows], width=targets)
    target, _ = pad_batch([row.target for row in rows], width=targets)
    return Targets(tokens, length, place, target, np.arange(targets) < count[:, None], grid)


def plan_buckets(lengths: Lengths, multiple: int) -> tuple[Bucket, ...]:
    """Plans one shape for each padded width of ids, with the widest texts and targets."""
    order = np.argsort(lengths.ids, kind="stable")
    # A batch holds shorter rows as well, so the other widths never fall.
    text = np.maximum.accumulate(np.maximum(lengths.text[order], 1))
    targets = np.maximum.accumulate(np.maximum(lengths.targets[order], 1))
    widths = round_up(lengths.ids[order], multiple)
    last = np.flatnonzero(np.append(widths[1:] != widths[:-1], True))
    shapes = np.stack([widths, round_up(text, multiple), targets], axis=1)[last]
    return tuple(Bucket(*shape) for shape in shapes.tolist())


def row_limits(data: DataSettings, model: ModelConfig) -> LengthLimits:
    """Returns the limits on the length of a row, in which an image must leave room for text."""
    limits = LengthLimits(model.max_image_tokens, data.context_limit, data.policy_text_limit)
    expected = f"more than the {limits.image_tokens} visual tokens of an image"
    data.expect("context_limit", limits.ids > 1, expected)
    return limits


def open_batches(
    run: Run,
    source: Source,
    identity: str,
    model: ModelFolder,
    local: slice = slice(None),
    say: Callable[[str], None] = _LOG.info,
) -> Batches:
    """Reads a run's training file and plans its batches; needs no weights."""
    data, backbone, config = run.data, model.backbone, model.config
    limits = row_limits(data, config)
    encoder = ConversationEncoder(
        load_tokenizer(model.folder),
        backbone.place_images,
        backbone.conversation,
        config.text.vocab_size,
    )
    corpus = open_corpus(source, encoder, limits, identity, say)
    settings = backbone.image_settings(model.vision_folder or model.folder)
    return Batches(
        corpus=corpus,
        images=Preprocessing(
            backbone.pixel_cache(settings, int(data.cache_gb * 2**30)),
            backbone.grids,
            backbone.largest_pixel_shapes(1) if config.sizes_vary else None,
        ),
        batch_size=run.batch_size,
        seed=run.seed,
        multiple=data.length_multiple,
        group=data.length_group,
        loading=Loading(data.threads, local, data.missing == "skip"),
    )
