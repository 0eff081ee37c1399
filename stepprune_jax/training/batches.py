"""Batches of conversations. The batch of a step is a pure function of seed and step."""

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

# Finished batches that may wait, in addition to the batches that threads are building. Two cover
# the variation in the time that a batch takes.
_NUM_WAITING = 2


class Bucket(NamedTuple):
    """Padded widths of the rows of a batch.

    Attributes:
        ids: number of ids of a conversation, with one id for the image.
        text: number of ids of the user's words.
        targets: number of supervised tokens.
    """

    ids: int
    text: int
    targets: int


class Loading(NamedTuple):
    """Options of building batches. Only `skip_unreadable` changes the results of a run.

    Attributes:
        threads: number of threads that build batches.
        local: rows of each batch that this host builds.
        skip_unreadable: True replaces a row whose image cannot be read by the next row of the
            batch, with a warning. False raises an error.
    """

    threads: int = 2
    local: slice = slice(None)
    skip_unreadable: bool = False


class Preprocessing(NamedTuple):
    """Conversion of images to pixels by a model family.

    Attributes:
        read: maps a path to pixels, for example `Backbone.pixel_cache`.
        grids: maps pixels of r images to [r, 2], the rows and columns of their visual tokens.
        largest: pixels of an image of the largest size; only the shapes are used. If several hosts
            build a batch, each host pads its images to this size. None if all images have one size.
    """

    read: Callable[[Path], Pixels]
    grids: Callable[[Pixels], Int[np.ndarray, "r 2"]]
    largest: Pixels | None = None


class Batches:
    """The batches of a run by step, padded to a few shapes.

    The width of ids determines all other widths, so one program is compiled for each width of ids.
    Widths are computed from stored token counts before any row is tokenized, so hosts that build
    different rows of a batch use the same widths.

    Attributes:
        corpus: rows of the training file.
    """

    def __init__(
        self,
        corpus: Corpus,
        images: Preprocessing,
        *,
        batch_size: int,
        seed: int,
        multiple: int,
        group: int = 1,
        loading: Loading | None = None,
    ):
        """Plans the shapes of the batches.

        Args:
            corpus: rows of the training file.
            images: how images are converted to pixels.
            batch_size: rows of a batch, over all hosts.
            seed: seed of the order of rows.
            multiple: widths of ids and text are rounded up to a multiple of this number.
            group: number of consecutive batches whose rows are sorted by width, as in `Order`.
            loading: how batches are built; None selects the defaults of `Loading`.
        """
        self.corpus, self._images, self._loading = corpus, images, loading or Loading()
        self._is_shared = len(range(batch_size)[self._loading.local]) < batch_size
        self.buckets = plan_buckets(corpus.lengths, multiple)
        widths = [bucket.ids for bucket in self.buckets]
        self._row_bucket = np.searchsorted(widths, corpus.lengths.ids).astype(np.int32)
        self._order = Order(self._row_bucket, batch_size, seed, group)

    def __len__(self) -> int:
        """Returns the number of rows in an epoch. Batches continue into the next epoch."""
        return len(self.corpus)

    @property
    def identity(self) -> str:
        """Hash of the usable rows of the training file."""
        return self.corpus.identity

    def indices(self, step: int) -> Int[np.ndarray, " b"]:
        """Returns the rows of batch `step`, over all hosts."""
        return self._order.indices(step)

    def samples(self, step: int) -> list[JsonObject]:
        """Describes the rows of batch `step`, over all hosts; see `Corpus.describe`."""
        return [self.corpus.describe(row) for row in self.indices(step).tolist()]

    def first_images(self, count: int) -> Iterator[Pixels]:
        """Yields the pixels of up to `count` distinct readable images, in the order of training."""
        paths: set[Path] = set()  # of images that have been read
        num_yielded = 0
        for row in self._order.epoch(0).tolist():
            if num_yielded == count:
                break
            path = self.corpus.image(row)
            if path in paths:
                continue
            paths.add(path)
            pixels = self._read_image(row)
            if pixels is not None:
                num_yielded += 1
                yield pixels

    def bucket(self, indices: Int[np.ndarray, " b"]) -> Bucket:
        """Returns the padded widths of a batch that has the rows `indices`."""
        return self.buckets[self._row_bucket[indices].max()]

    def __getitem__(self, step: int) -> TrainingBatch:
        """Returns the rows of batch `step` that this host builds."""
        indices = self.indices(step)
        widths = self.bucket(indices)
        row_numbers, pixels = self._read_images(indices)
        rows = self.corpus.rows(row_numbers)
        text, text_length = pad_batch([row.text for row in rows], width=widths.text)
        targets = stack_targets(rows, self._images.grids(pixels), widths.ids, widths.targets)
        return TrainingBatch(pixels, text, text_length, targets)

    def _read_images(self, indices: Int[np.ndarray, " b"]) -> tuple[list[int], Pixels]:
        """Reads the images of a batch's rows that this host builds.

        Args:
            indices: rows of the batch, over all hosts.

        Returns:
            The rows of the training file, after unreadable rows are replaced; and their pixels.

        Raises:
            FileNotFoundError, UserError: an image cannot be read, and `Loading.skip_unreadable` is
                False or no other image of the batch can be read.
        """
        row_numbers, images = [], []
        for position in range(len(indices))[self._loading.local]:
            # An unreadable row is replaced by the next readable row of the batch. Each host does
            # the same, whichever rows it builds.
            for row in np.roll(indices, -position).tolist():
                image = self._read_image(row)
                if image is not None:
                    break
            else:
                where = self.corpus.where(int(indices[position]))
                raise UserError(f"{where}: no image of its batch can be read")
            row_numbers.append(row)
            images.append(image)
        pixels = stack_images(images)
        largest = self._images.largest
        if self._is_shared and largest is not None:
            # Joining with zero images of the largest size pads the pixels to this size.
            no_images = jax.tree.map(lambda x: np.zeros((0, *x.shape[1:]), x.dtype), largest)
            pixels = join_images([no_images, pixels])
        return row_numbers, pixels

    def _read_image(self, row: int) -> Pixels | None:
        """Returns the pixels of a row's image.

        If the image cannot be read, returns None after a warning if `Loading.skip_unreadable`, and
        raises an error that names the row otherwise.
        """
        try:
            return self._images.read(self.corpus.image(row))
        except (FileNotFoundError, MemoryError, UserError) as error:
            reason = error if str(error) else "it needs more memory than is available"
            message = f'{self.corpus.where(row)}: "image": {reason}'
            if not self._loading.skip_unreadable:
                kind = FileNotFoundError if isinstance(error, FileNotFoundError) else UserError
                raise kind(message) from error
            _LOG.warning("%s; skipped", message)
            return None

    def stream(self, steps: int, state: JsonObject | None = None) -> "Stream":
        """Returns an iterator of the batches of a run; threads build the next batches in advance.

        Args:
            steps: number of steps of the run.
            state: `Stream.state` to resume from; None begins with the first batch.

        Returns:
            An iterator up to the batch of step `steps` - 1, which the caller must close.

        Raises:
            UserError: the state is from a stream of other rows.
        """
        first_step = 0
        if state is not None:
            if state["rows"] != self.identity:
                raise UserError(
                    f"the run began with other samples of {self.corpus.file} than the "
                    f"{len(self.corpus):,} that can be used now: images were added or removed"
                )
            first_step = state["next_batch"]
        return Stream(self, first_step, steps, self._loading.threads)


class Stream(Iterator):
    """An iterator of batches. Its state resumes it on any number of hosts."""

    def __init__(self, batches: Batches, first_step: int, steps: int, threads: int):
        """Initializes the iterator; the first `next` starts the threads.

        Args:
            batches: the batches of the run.
            first_step: step of the first batch.
            steps: number of steps of the run.
            threads: number of threads that build batches.
        """
        self._batches, self._next_step = batches, first_step
        self._unsubmitted = iter(range(first_step, steps))
        self._pool, self._max_pending = ThreadPoolExecutor(threads), threads + _NUM_WAITING
        self._pending: collections.deque[Future[TrainingBatch]] = collections.deque()

    @property
    def state(self) -> JsonObject:
        """The state that `Batches.stream` resumes from, as JSON values."""
        return {"next_batch": self._next_step, "rows": self._batches.identity}

    def __next__(self) -> TrainingBatch:
        num_free = self._max_pending - len(self._pending)
        for step in itertools.islice(self._unsubmitted, num_free):
            self._pending.append(self._pool.submit(self._batches.__getitem__, step))
        if not self._pending:
            raise StopIteration
        batch = self._pending.popleft().result()
        self._next_step += 1
        return batch

    def close(self) -> None:
        """Stops the threads, after the batches that they are building."""
        self._pool.shutdown(cancel_futures=True)


def stack_targets(
    rows: Sequence[TrainingRow], grid: Int[np.ndarray, "r 2"], ids_width: int, targets_width: int
) -> Targets:
    """Pads conversations and stacks the conversations in arrays.

    Args:
        rows: the conversations, tokenized.
        grid: [r, 2] rows and columns of each image's visual tokens.
        ids_width: number of ids of a padded row.
        targets_width: number of supervised tokens of a padded row.

    Returns:
        The conversations with their supervised tokens.
    """
    ids, length = pad_batch([row.ids for row in rows], width=ids_width)
    place, count = pad_batch([row.place for row in rows], width=targets_width)
    target, _ = pad_batch([row.target for row in rows], width=targets_width)
    return Targets(ids, length, place, target, np.arange(targets_width) < count[:, None], grid)


def plan_buckets(lengths: Lengths, multiple: int) -> tuple[Bucket, ...]:
    """Plans one shape of batches for each padded width of ids.

    The shape has room for the text and the targets of every row that is at most as long.

    Args:
        lengths: numbers of ids, text ids and targets of each row of the training file.
        multiple: widths of ids and text are rounded up to a multiple of this number.

    Returns:
        The shapes, by increasing width of ids.
    """
    order = np.argsort(lengths.ids, kind="stable")
    # A batch may also have shorter rows, so the widths of text and targets are running maxima.
    max_text = np.maximum.accumulate(np.maximum(lengths.text[order], 1))
    max_targets = np.maximum.accumulate(np.maximum(lengths.targets[order], 1))
    ids_widths = round_up(lengths.ids[order], multiple)
    is_last_of_width = np.append(ids_widths[1:] != ids_widths[:-1], True)
    widths = np.stack([ids_widths, round_up(max_text, multiple), max_targets], axis=1)
    return tuple(Bucket(*row) for row in widths[is_last_of_width].tolist())


def row_limits(data: DataSettings, model: ModelConfig) -> LengthLimits:
    """Returns the limits on the length of a row.

    Raises:
        UserError: the largest image leaves no room for text.
    """
    limits = LengthLimits(model.max_image_tokens, data.context_limit, data.policy_text_limit)
    expected = f"more than the {limits.image_tokens} visual tokens of an image"
    data.expect("context_limit", limits.ids > 1, expected)
    return limits


def open_batches(
    run: Run,
    source: Source,
    identity: str,
    model: ModelFolder,
    *,
    local: slice = slice(None),
    say: Callable[[str], None] = _LOG.info,
) -> Batches:
    """Reads a run's training file and plans its batches; does not read weights.

    Args:
        run: settings of the run.
        source: paths of the training file and its images.
        identity: hash of the training file.
        model: folder of the frozen model.
        local: rows of each batch that this host builds.
        say: called with each line of the report on the training file.

    Returns:
        The batches of the run.
    """
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
        corpus,
        Preprocessing(
            read=backbone.pixel_cache(settings, int(data.cache_gb * 2**30)),
            grids=backbone.grids,
            largest=backbone.largest_pixel_shapes(1) if config.sizes_vary else None,
        ),
        batch_size=run.batch_size,
        seed=run.seed,
        multiple=data.length_multiple,
        group=data.length_group,
        loading=Loading(data.threads, local, data.missing == "skip"),
    )
