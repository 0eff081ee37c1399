"""Batches of conversations. The batch of a step is a pure function of seed and step."""

import collections
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

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
from stepprune_jax.data.videos import Video
from stepprune_jax.inference.base import CHUNK_PATCHES
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.images import Clip, Pixels, join_images, stack_images
from stepprune_jax.models.sequence import Clips
from stepprune_jax.policy.buckets import round_up, row_bucket
from stepprune_jax.training.language_loss import Targets
from stepprune_jax.training.settings import Run
from stepprune_jax.training.step import TrainingBatch
from stepprune_jax.user_input import UserError

_LOG = logging.getLogger(__name__)

# Finished batches that may wait, in addition to the batches that threads are building. Two cover
# the variation in the time that a batch takes.
_NUM_WAITING = 2
# Temporal patches of a video that feature statistics read: enough to cover its scenes, few enough
# that images count, too.
_STATS_PATCHES = 4


class Bucket(NamedTuple):
    """Padded sizes of a batch.

    Attributes:
        ids: number of ids of a conversation, with one id for the image.
        text: number of ids of the user's words.
        targets: number of supervised tokens.
        media: padded sizes of a batch with videos; None for a batch of images.
    """

    ids: int
    text: int
    targets: int
    media: "MediaShape | None" = None


class MediaShape(NamedTuple):
    """Padded sizes of the images and videos of a batch with videos.

    Attributes:
        patches: number of temporal patches of all rows together. An image is one.
        patch_tokens: number of visual tokens of a temporal patch.
        tokens: number of visual tokens of a row.
    """

    patches: int
    patch_tokens: int
    tokens: int


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
        videos: conversion of videos; None if the model reads images only.
    """

    read: Callable[[Path], Pixels]
    grids: Callable[[Pixels], Int[np.ndarray, "r 2"]]
    largest: Pixels | None = None
    videos: "VideoPreprocessing | None" = None


class VideoPreprocessing(NamedTuple):
    """Conversion of videos to temporal patches by a model family.

    Attributes:
        read: maps a video to its temporal patches.
        backbone: the model.
        num_devices: number of devices that rows are split over.
    """

    read: Callable[[Video], Clip]
    backbone: Backbone
    num_devices: int = 1


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
        row_order = self._row_bucket
        if corpus.lengths.visual is not None:  # rows are sorted by visual tokens first
            key = np.stack([round_tokens(corpus.lengths.visual), self._row_bucket])
            row_order = np.unique(key, axis=1, return_inverse=True)[1].reshape(-1)
        self._order = Order(row_order, batch_size, seed, group)

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
        """Yields the pixels of up to `count` distinct readable images, in the order of training.

        A video counts as one image, and gives the pixels of up to `_STATS_PATCHES` temporal
        patches. If the training file has videos, the pixels of images have the form of a temporal
        patch.
        """
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
            if pixels is None:
                continue
            num_yielded += 1
            if self.corpus.lengths.patches is None:
                yield pixels
                continue
            patches = self._as_patches(pixels)
            num_patches = _num_rows(patches)
            spaced = np.unique(np.linspace(0, num_patches - 1, _STATS_PATCHES).round().astype(int))
            for patch in spaced.tolist():
                yield jax.tree.map(lambda array, patch=patch: array[patch], patches)

    def bucket(self, indices: Int[np.ndarray, " b"]) -> Bucket:
        """Returns the padded sizes of a batch that has the rows `indices`.

        The sizes of images and videos are upper bounds, which hosts that build parts of a batch
        share, and which a dry run assumes.
        """
        bucket = self.buckets[self._row_bucket[indices].max()]
        return bucket._replace(media=self._bound_media(indices))

    @property
    def widest(self) -> Bucket:
        """Sizes that hold every batch of the run."""
        rows, patches = np.arange(len(self.corpus)), self.corpus.lengths.patches
        most = rows[:1] if patches is None else np.argmax(patches)[None]
        num_rows = len(self.indices(0))
        return self.buckets[-1]._replace(media=self._bound_media(most.repeat(num_rows)))

    def _bound_media(self, indices: Int[np.ndarray, " b"]) -> MediaShape | None:
        """Returns padded sizes for any videos and images of a batch; None without a video."""
        lengths, videos = self.corpus.lengths, self._images.videos
        if videos is None or lengths.patches is None or lengths.visual is None:
            return None
        if not lengths.patches[indices].any():
            return None
        assert self._images.largest is not None  # models that read videos read images of any size
        most_tokens = videos.backbone.config.max_image_tokens
        patch_tokens = videos.backbone.num_padded_tokens(self._images.largest)
        is_video = lengths.patches > 0
        clip_tokens = lengths.visual[is_video]
        largest_patch = int((clip_tokens // lengths.patches[is_video]).max())
        pad = videos.backbone.num_padded_clip_tokens
        num_rows = len(range(len(indices))[self._loading.local])
        return MediaShape(
            pad_patches(num_rows * int(lengths.patches[indices].max()), videos.num_devices),
            max(patch_tokens, videos.backbone.num_padded_patch_tokens(largest_patch)),
            pad(max(most_tokens, int(clip_tokens.max()))),
        )

    def __getitem__(self, step: int) -> TrainingBatch:
        """Returns the rows of batch `step` that this host builds."""
        indices = self.indices(step)
        widths = self.bucket(indices)
        row_numbers, images = self._read_images(indices)
        rows = self.corpus.rows(row_numbers)
        text, text_length = pad_batch([row.text for row in rows], width=widths.text)
        if widths.media is not None:
            pixels, token_of, grids, clips = self._join_media(images, widths.media)
        else:
            pixels, token_of, clips = self._stack_images(images), None, None
            grids = self._images.grids(pixels)
        targets = stack_targets(rows, grids, widths.ids, widths.targets, clips)
        return TrainingBatch(pixels, text, text_length, targets, token_of)

    def _stack_images(self, images: Sequence[Pixels]) -> Pixels:
        """Stacks the images of a batch without videos, and pads them to one size."""
        pixels = stack_images(images)
        largest = self._images.largest
        if self._is_shared and largest is not None:
            # Joining with zero images of the largest size pads the pixels to this size.
            no_images = jax.tree.map(lambda x: np.zeros((0, *x.shape[1:]), x.dtype), largest)
            pixels = join_images([no_images, pixels])
        return pixels

    def _as_patches(self, image: Pixels | Clip) -> Pixels:
        """Returns the pixels of an image or video with a leading axis of temporal patches."""
        if isinstance(image, Clip):
            return image.pixels
        assert self._images.videos is not None
        return self._images.videos.backbone.as_patch_of_clip(stack_images([image]))

    def _join_media(
        self, images: Sequence[Pixels | Clip], bound: MediaShape
    ) -> tuple[Pixels, Int[np.ndarray, "b n"], Int[np.ndarray, "b 2"], Clips]:
        """Packs the temporal patches of the images and videos of a batch.

        Args:
            images: the pixels of each row's image, or the clip of its video.
            bound: sizes that hold any rows of the batch. If several hosts build the batch, these
                are its sizes; otherwise the sizes follow from the rows.

        Returns:
            The [p, ...] temporal patches; the [b, n] index of each visual token among the tokens of
            all temporal patches, -1 in the padding; the [b, 2] grids; and the clips.
        """
        videos = self._images.videos
        assert videos is not None  # the corpus has videos
        backbone, patches = videos.backbone, [self._as_patches(image) for image in images]
        patch_grids = [np.asarray(self._images.grids(pixels), np.int32) for pixels in patches]
        frames = np.array([len(patch_grid) for patch_grid in patch_grids], np.int32)
        grids = np.stack([patch_grid[0] for patch_grid in patch_grids])
        grids[:, 0] *= frames
        sizes, pixels = np.asarray(backbone.num_tokens(grids)), join_images(patches)
        if self._is_shared:
            num_patches, patch_tokens, num_tokens = bound
        else:
            num_patches = pad_patches(int(frames.sum()), videos.num_devices)
            patch_tokens = backbone.num_padded_tokens(pixels)
            num_tokens = backbone.num_padded_clip_tokens(int(sizes.max()))
        # Zero patches of the padded size pad all patches to this size. Absent patches repeat the
        # first one.
        no_patches = backbone.patch_shapes(0, patch_tokens)
        no_patches = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), no_patches)
        patch_rows = np.arange(num_patches)
        patch_rows[int(frames.sum()) :] = 0
        pixels = jax.tree.map(lambda x: x[patch_rows], join_images([no_patches, pixels]))
        first_host_patch = self._loading.local.start or 0
        first_host_patch = first_host_patch // len(images) * num_patches
        token_of = np.full((len(images), num_tokens), -1, np.int32)
        first_patches = first_host_patch + np.cumsum(frames) - frames
        for row, (first, count, size) in enumerate(
            zip(first_patches.tolist(), frames.tolist(), sizes.tolist(), strict=True)
        ):
            first_tokens = patch_tokens * np.arange(first, first + count)
            token_of[row, :size] = (first_tokens[:, None] + np.arange(size // count)).ravel()
        is_video = np.array([isinstance(image, Clip) for image in images])
        intervals = [image.interval if isinstance(image, Clip) else 0.0 for image in images]
        return pixels, token_of, grids, Clips(frames, np.array(intervals, np.float32), is_video)

    def _read_images(self, indices: Int[np.ndarray, " b"]) -> tuple[list[int], list[Any]]:
        """Reads the images and videos of a batch's rows that this host builds.

        Args:
            indices: rows of the batch, over all hosts.

        Returns:
            The rows of the training file, after unreadable rows are replaced; and the pixels of
            each row's image, or the clip of its video.

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
        return row_numbers, images

    def _read_image(self, row: int) -> Pixels | Clip | None:
        """Returns the pixels of a row's image, or the clip of its video.

        If the image cannot be read, returns None after a warning if `Loading.skip_unreadable`, and
        raises an error that names the row otherwise.
        """
        video = None if self.corpus.lengths.patches is None else self.corpus.video(row)
        try:
            if video is not None and self._images.videos is not None:
                return self._images.videos.read(video)
            return self._images.read(self.corpus.image(row))
        except (FileNotFoundError, MemoryError, UserError) as error:
            reason = error if str(error) else "it needs more memory than is available"
            field = "image" if video is None else "video"
            message = f'{self.corpus.where(row)}: "{field}": {reason}'
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


def _num_rows(tree: Pixels) -> int:
    """Returns the length of the leading axis of a tree of arrays."""
    return len(jax.tree.leaves(tree)[0])


def round_tokens(counts: Int[np.ndarray, " r"]) -> Int[np.ndarray, " r"]:
    """Rounds numbers of tokens up to powers of two, for sorting rows by size; 0 remains 0."""
    return np.where(counts > 0, 1 << np.ceil(np.log2(np.maximum(counts, 1))).astype(int), 0)


def pad_patches(num_patches: int, num_devices: int = 1) -> int:
    """Returns the padded number of temporal patches of a batch.

    The tower encodes `CHUNK_PATCHES` patches on each device at once, so more patches fill complete
    chunks. There are two sizes per doubling.

    Args:
        num_patches: number of temporal patches.
        num_devices: number of devices that the patches are split over.
    """
    per_device = -(-num_patches // num_devices)  # rounded up
    if per_device <= CHUNK_PATCHES:
        return num_devices * row_bucket(per_device)
    return num_devices * CHUNK_PATCHES * row_bucket(-(-per_device // CHUNK_PATCHES))


def cache_clips(read: Callable[[Video], Clip], limit_bytes: int) -> Callable[[Video], Clip]:
    """Returns a function that reads videos, and keeps the clips that were read last.

    The function may be called from several threads.

    Args:
        read: reads a video.
        limit_bytes: largest number of bytes of all kept clips together.
    """
    clips: collections.OrderedDict[Any, Clip] = collections.OrderedDict()
    lock, num_bytes = threading.Lock(), 0

    def count_bytes(clip: Clip) -> int:
        return sum(array.nbytes for array in jax.tree.leaves(clip.pixels))

    def read_cached(video: Video) -> Clip:
        nonlocal num_bytes
        with lock:
            if video.identity in clips:
                clips.move_to_end(video.identity)
                return clips[video.identity]
        clip = read(video)
        with lock:
            if video.identity not in clips and count_bytes(clip) <= limit_bytes:
                clips[video.identity] = clip
                num_bytes += count_bytes(clip)
            while num_bytes > limit_bytes:
                num_bytes -= count_bytes(clips.popitem(last=False)[1])
        return clip

    return read_cached


def stack_targets(
    rows: Sequence[TrainingRow],
    grid: Int[np.ndarray, "r 2"],
    ids_width: int,
    targets_width: int,
    clips: Clips | None = None,
) -> Targets:
    """Pads conversations and stacks the conversations in arrays.

    Args:
        rows: the conversations, tokenized.
        grid: [r, 2] rows and columns of each image's visual tokens.
        ids_width: number of ids of a padded row.
        targets_width: number of supervised tokens of a padded row.
        clips: [r] temporal patches of each image or video; None without videos.

    Returns:
        The conversations with their supervised tokens.
    """
    ids, length = pad_batch([row.ids for row in rows], width=ids_width)
    place, count = pad_batch([row.place for row in rows], width=targets_width)
    target, _ = pad_batch([row.target for row in rows], width=targets_width)
    is_target = np.arange(targets_width) < count[:, None]
    return Targets(ids, length, place, target, is_target, grid, clips)


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
    num_devices: int = 1,
    say: Callable[[str], None] = _LOG.info,
) -> Batches:
    """Reads a run's training file and plans its batches; does not read weights.

    Args:
        run: settings of the run.
        source: paths of the training file and its images.
        identity: hash of the training file.
        model: folder of the frozen model.
        local: rows of each batch that this host builds.
        num_devices: number of devices that rows are split over, of all hosts.
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
        backbone.place_videos,
    )
    settings, cache_bytes = (
        backbone.image_settings(model.vision_folder or model.folder),
        int(data.cache_gb * 2**30),
    )
    corpus = open_corpus(
        source,
        encoder,
        limits,
        identity,
        say,
        inspect=functools.partial(backbone.inspect_video, settings),
        processor=f"{settings!r} {config.image_bounds}",
    )
    read_video = functools.partial(backbone.read_video, settings)
    return Batches(
        corpus,
        Preprocessing(
            read=backbone.pixel_cache(settings, cache_bytes),
            grids=backbone.grids,
            largest=backbone.largest_pixel_shapes(1) if config.sizes_vary else None,
            videos=VideoPreprocessing(cache_clips(read_video, cache_bytes), backbone, num_devices),
        ),
        batch_size=run.batch_size,
        seed=run.seed,
        multiple=data.length_multiple,
        group=data.length_group,
        loading=Loading(data.threads, local, data.missing == "skip"),
    )
