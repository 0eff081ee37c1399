"""Whole sets of questions as arrays: prompts, and images after one pass of the tower."""

import time
import warnings
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
from stepprune_jax.inference.base import Images, Prompts
from stepprune_jax.inference.pipeline import encode
from stepprune_jax.inference.programs import num_compiled
from stepprune_jax.inference.request import Request, read_request
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.images import join_images
from stepprune_jax.models.stack import Execution
from stepprune_jax.parallel.placement import to_host
from stepprune_jax.policy.buckets import bucket_ladder
from stepprune_jax.user_input import UserError

# Widths that prompts and the user's words are padded to, so that all sets share programs. One more
# program for each budget takes longer than padding the shortest prompts to 32 ids.
WIDTHS = tuple(width for width in bucket_ladder(1 << 16) if width >= 32)
# Limits of a chunk: bytes of features, and questions.
_CHUNK_BYTES, CHUNK = 300_000_000, 1024


class EncodedQuestions(NamedTuple):
    """A set of questions, each with one image or none, on the host.

    `images` are the distinct images, after the tower or before it; zeros if there is none.
    `seconds` is the mean time of image and ids of a question with an image, NaN if it could only be
    measured with the compilation of a program.
    """

    prompts: Prompts
    images: Images
    seconds: float = 0.0

    @property
    def sizes(self) -> Int[np.ndarray, "q"]:
        """Visual tokens of each question's image; 0 without one."""
        prompts = self.prompts
        sizes = self.images.sizes[np.maximum(prompts.image_of[:, 0], 0)]
        return np.where(prompts.has_image, sizes, 0)

    @property
    def all_shown(self) -> bool:
        """Whether every question has an image."""
        return bool(self.prompts.has_image.all())

    def take(self, rows: np.ndarray) -> "EncodedQuestions":
        """Returns some of the questions, with all images."""
        return self._replace(prompts=self.prompts.take(rows))


def chunk_size(model: VLM, batch_size: int) -> int:
    """Returns how many questions share a pass of the tower: whole batches that fit in memory."""
    config, dtype = model.config, jax.tree.leaves(model.params)[0].dtype
    image = config.max_image_tokens * config.token_width * dtype.itemsize
    most = min(CHUNK, _CHUNK_BYTES // image)
    return max(1, most // batch_size) * batch_size


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
    """Reads every distinct image once, runs the tower over it, and tokenises every question.

    Without `tower`, images remain pixels: if each is used once, a batch is answered by fewer
    programs. `numbers` are those of the questions in their whole set, by default 0, 1, 2, ...
    Images are read as stored, which is the protocol of LLaVA's programs, unless they are to be read
    `as_shown`: see `data.images.open_image`. Prompts that exceed the family's context with all
    visual tokens are truncated, with a warning.
    """
    asked: dict[Path | bytes | None, list[int]] = {}
    for row, question in enumerate(questions):
        asked.setdefault(question.image, []).append(row)
    without = asked.pop(None, [])
    places = {image: number for number, image in enumerate(asked)}
    ids: list[Sequence[int]] = [()] * len(questions)
    words: list[Sequence[int]] = [()] * len(questions)
    parts, seconds, counted = [], 0.0, 0
    for first in range(0, len(places), batch_size):
        rows = [row for image in list(asked)[first : first + batch_size] for row in asked[image]]
        asked_here = [questions[row] for row in rows]
        begin, before = time.perf_counter(), num_compiled()
        request = _request(model, asked_here, as_shown)
        images, count, read = request.images, len(request.images.sizes), time.perf_counter()
        if tower:
            images = _run_tower(model, images, batch_size, taps, execution)
        if num_compiled() == before:
            # Padding images do not count.
            seconds += read - begin + (time.perf_counter() - read) * count / batch_size
            counted += len(rows)
        _fill(ids, words, rows, request)
        parts.append(images)
    if without:
        _fill(ids, words, without, _request(model, [questions[row] for row in without]))
    if not parts:
        parts = [_no_images(model)]
    images = join_images(parts)
    prompt, said = (pad_batch(rows, multiple=_width(rows)) for rows in (ids, words))
    image_of = np.array([places.get(question.image, -1) for question in questions], np.int32)
    number = np.arange(len(questions)) if numbers is None else np.asarray(numbers)
    prompts = Prompts(*prompt, *said, image_of[:, None], number.astype(np.int32))
    shown = len(questions) - len(without)
    mean = seconds / counted if counted else np.nan if shown else 0.0
    return cut_prompts(EncodedQuestions(prompts, images, mean), model.backbone.CONTEXT_LIMIT)


def encode_chunks(
    model: VLM, questions: Sequence[Question | BenchmarkQuestion], **options: Any
) -> Iterator[tuple[int, EncodedQuestions]]:
    """Encodes questions chunk by chunk; yields the number of the first of each, and the chunk."""
    size = chunk_size(model, options["batch_size"])
    for first in range(0, len(questions), size):
        yield first, encode_questions(model, questions[first : first + size], **options)


def _run_tower(
    model: VLM, images: Images, batch_size: int, taps: Sequence[Tap], execution: Execution
) -> Images:
    """Runs the tower over images, repeated to fill a batch; the result is on the host."""
    count = len(images.sizes)
    repeated = np.arange(batch_size) % count
    images = jax.tree.map(lambda part: part[repeated], images)
    vision = to_host(encode(model, images, taps, execution))
    return jax.tree.map(lambda part: part[:count], vision)


def _no_images(model: VLM) -> Images:
    """Returns placeholder images for questions without one."""
    shape = (1, model.config.max_image_tokens, model.config.token_width)
    features = np.zeros(shape, jax.tree.leaves(model.params)[0].dtype)
    grid, sizes = np.ones((1, 2), np.int32), np.full(1, shape[1], np.int32)
    return Images(grid, sizes, np.zeros(1, np.uint32), features=features, taps={})


def _request(
    model: VLM, questions: Sequence[Question | BenchmarkQuestion], as_shown: bool = False
) -> Request:
    """Reads ids and pixels; an image that is used twice is read once."""
    texts, images = [q.text for q in questions], [q.image for q in questions]
    return read_request(model, texts, images, as_shown=as_shown)


def _fill(
    ids: list[Sequence[int]], words: list[Sequence[int]], rows: Sequence[int], request: Request
) -> None:
    """Stores the ids of a batch in their rows."""
    for row, prompt, said in zip(rows, request.ids, request.question_ids, strict=True):
        ids[row], words[row] = prompt, said


def _width(rows: Sequence[Sequence[int]]) -> int:
    """Returns the width that holds the longest row: its own, if it exceeds all."""
    longest = max(map(len, rows))
    return next((size for size in WIDTHS if size >= longest), longest)


def cut_prompts(encoded: EncodedQuestions, limit: int) -> EncodedQuestions:
    """Truncates prompts that exceed `limit` with all visual tokens, as LLaVA does, and warns."""
    prompts = encoded.prompts
    most = limit - np.maximum(encoded.sizes - 1, 0)
    long = np.flatnonzero(prompts.length > most)
    if len(long):
        warnings.warn(
            f"question {int(prompts.number[long[0]])} and {len(long) - 1} more take more than "
            f"{limit} embeddings: the ends of their prompts were truncated",
            stacklevel=2,
        )
    length = np.minimum(prompts.length, most).astype(np.int32)
    return encoded._replace(prompts=prompts._replace(length=length))


def check_lengths(encoded: EncodedQuestions, limit: int) -> None:
    """Rejects prompts that are longer than `limit` with all their visual tokens, by number."""
    total = encoded.prompts.length + np.maximum(encoded.sizes - 1, 0)
    longest = int(np.argmax(total))
    if total[longest] > limit:
        raise UserError(
            f"question {longest} takes {total[longest]} embeddings with all visual tokens, more "
            f"than {limit}: its end would be truncated"
        )
