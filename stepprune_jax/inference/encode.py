"""Data sets of questions as arrays: prompts, and images after one pass of the tower."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from stepprune_jax.benchmarks.questions import BenchmarkQuestion
from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.data.llava import Question
from stepprune_jax.data.prompts import pad_batch
from stepprune_jax.inference.base import Images, Prompts, join_media
from stepprune_jax.inference.pipeline import encode
from stepprune_jax.inference.programs import num_compiled
from stepprune_jax.inference.request import Request, read_request
from stepprune_jax.inference.truncation import truncate_prompts
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.placement import to_host
from stepprune_jax.policy.buckets import WIDTHS, prompt_width

# A chunk is a part of a data set whose features the host stores at once. The limits of a chunk, in
# bytes of features and in questions, keep a chunk much smaller than the model's weights.
_CHUNK_BYTES, CHUNK = 300_000_000, 1024


class EncodedQuestions(NamedTuple):
    """A data set of questions, each with at most one image or video, on the host.

    Attributes:
        prompts: the prompts.
        images: the distinct images, before or after the tower; a placeholder of zeros if no
            question has an image.
        seconds: mean seconds to read and encode a question with an image. NaN if every measurement
            includes a compilation.
    """

    prompts: Prompts
    images: Images
    seconds: float = 0.0

    @property
    def sizes(self) -> Int[np.ndarray, "q"]:
        """Number of visual tokens of each question; 0 without an image."""
        prompts = self.prompts
        sizes = self.images.sizes[np.maximum(prompts.image_of[:, 0], 0)]
        return np.where(prompts.has_image, sizes, 0)

    @property
    def all_have_images(self) -> bool:
        """Whether every question has an image."""
        return bool(self.prompts.has_image.all())

    def take(self, rows: np.ndarray) -> "EncodedQuestions":
        """Returns the questions at the given row indices, with all images."""
        return self._replace(prompts=self.prompts.take(rows))


def chunk_size(
    model: VLM, batch_size: int, questions: Sequence[Question | BenchmarkQuestion] = ()
) -> int:
    """Returns the number of questions to encode at once, a multiple of the batch size.

    Args:
        model: the model.
        batch_size: questions per batch.
        questions: the questions. Questions about videos are encoded batch by batch, because a video
            may have many times the tokens of an image.
    """
    if any(getattr(question, "video", None) is not None for question in questions):
        return batch_size
    config, dtype = model.config, jax.tree.leaves(model.params)[0].dtype
    image_bytes = config.max_image_tokens * config.token_width * dtype.itemsize
    max_questions = min(CHUNK, _CHUNK_BYTES // image_bytes)
    return max(1, max_questions // batch_size) * batch_size


def encode_questions(
    model: VLM,
    questions: Sequence[Question | BenchmarkQuestion],
    *,
    batch_size: int,
    taps: Sequence[Tap] = (),
    execution: Execution = Execution(),
    tower: bool = True,
    numbers: Sequence[int] | None = None,
    as_shown: bool = False,
) -> EncodedQuestions:
    """Reads every distinct image once, runs the tower over it, and tokenizes every question.

    Prompts that exceed the context of the model's family with all visual tokens are truncated, with
    a warning.

    Args:
        model: the model.
        questions: the questions.
        batch_size: images per batch of the tower.
        taps: intermediate arrays of the tower for pruners.
        execution: how the layers of the tower are run.
        tower: whether to run the tower. False keeps pixels, and later programs run the tower; this
            is faster if each image is used only once.
        numbers: number of each question in its data set; 0, 1, 2, ... by default.
        as_shown: whether images are turned by their EXIF orientation, see `data.images.open_image`.
            The default reads them as stored, as LLaVA's programs do.

    Returns:
        The questions, with padded prompts.
    """
    rows_of: dict[Path | bytes | None, list[int]] = {}  # questions of each distinct image
    for row, question in enumerate(questions):
        rows_of.setdefault(question.image, []).append(row)
    rows_without_image = rows_of.pop(None, [])
    image_index = {image: index for index, image in enumerate(rows_of)}
    prompt_ids: dict[int, Sequence[int]] = {}  # by row
    word_ids: dict[int, Sequence[int]] = {}
    image_batches, seconds, num_timed = [], 0.0, 0
    for first_image in range(0, len(image_index), batch_size):
        batch_images = list(rows_of)[first_image : first_image + batch_size]
        rows = [row for image in batch_images for row in rows_of[image]]
        start_time, num_compiled_before = time.perf_counter(), num_compiled()
        request = _read_questions(model, [questions[row] for row in rows], as_shown)
        read_time, images = time.perf_counter(), request.images
        assert images is not None  # each question of `rows` has an image
        num_images = len(images.sizes)
        if tower:
            images = _run_tower(model, images, batch_size, taps, execution)
        if num_compiled() == num_compiled_before:
            # The tower's time is for a full batch; images that pad the batch are not counted.
            tower_seconds = time.perf_counter() - read_time
            seconds += read_time - start_time + tower_seconds * num_images / batch_size
            num_timed += len(rows)
        prompt_ids.update(zip(rows, request.ids, strict=True))
        word_ids.update(zip(rows, request.question_ids, strict=True))
        image_batches.append(images)
    if rows_without_image:
        request = _read_questions(model, [questions[row] for row in rows_without_image])
        prompt_ids.update(zip(rows_without_image, request.ids, strict=True))
        word_ids.update(zip(rows_without_image, request.question_ids, strict=True))
    images = join_media(model.backbone, image_batches or [_placeholder_images(model)])
    padded_ids, padded_words = (
        pad_batch(
            [ids[row] for row in range(len(questions))],
            width=prompt_width(max(map(len, ids.values())), WIDTHS),
        )
        for ids in (prompt_ids, word_ids)
    )
    image_of = np.array([image_index.get(question.image, -1) for question in questions], np.int32)
    number = np.arange(len(questions)) if numbers is None else np.asarray(numbers)
    prompts = Prompts(*padded_ids, *padded_words, image_of[:, None], number.astype(np.int32))
    mean_seconds = seconds / num_timed if num_timed else 0.0
    if not num_timed and len(rows_without_image) < len(questions):
        mean_seconds = np.nan
    encoded = EncodedQuestions(prompts, images, mean_seconds)
    limit = model.backbone.CONTEXT_LIMIT
    return encoded._replace(prompts=truncate_prompts(prompts, encoded.sizes[:, None], limit))


def encode_chunks(
    model: VLM, questions: Sequence[Question | BenchmarkQuestion], **options: Any
) -> Iterator[tuple[int, EncodedQuestions]]:
    """Encodes a long data set in chunks that fit into the memory of the host.

    Args:
        model: the model.
        questions: the questions.
        **options: keyword arguments of `encode_questions`, with `batch_size`.

    Yields:
        The row of the first question of each chunk, and the encoded questions of the chunk.
    """
    num_questions = chunk_size(model, options["batch_size"], questions)
    for first_row in range(0, len(questions), num_questions):
        chunk = questions[first_row : first_row + num_questions]
        yield first_row, encode_questions(model, chunk, **options)


def _run_tower(
    model: VLM, images: Images, batch_size: int, taps: Sequence[Tap], execution: Execution
) -> Images:
    """Runs the tower over one batch of images, and returns the encoded images on the host.

    Fewer than `batch_size` images are repeated, so that one program serves every batch.
    """
    num_images = len(images.sizes)
    rows = np.arange(batch_size) % num_images
    encoded = to_host(encode(model, images.take(rows), taps, execution))
    return encoded.take(np.arange(num_images))


def _placeholder_images(model: VLM) -> Images:
    """Returns an image of zeros, for a data set without images."""
    shape = (1, model.config.max_image_tokens, model.config.token_width)
    features = np.zeros(shape, jax.tree.leaves(model.params)[0].dtype)
    grid, sizes = np.ones((1, 2), np.int32), np.full(1, shape[1], np.int32)
    return Images(grid, sizes, np.zeros(1, np.uint32), features=features, taps={})


def _read_questions(
    model: VLM, questions: Sequence[Question | BenchmarkQuestion], as_shown: bool = False
) -> Request:
    """Reads the ids and pixels of questions; an image of several questions is read once."""
    texts = [question.text for question in questions]
    images = [getattr(question, "video", None) or question.image for question in questions]
    return read_request(model, texts, images, as_shown=as_shown)
