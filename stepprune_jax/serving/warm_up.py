"""Compiles all programs of requests up to a given size before the server listens.

A program depends only on the shapes of a batch: the numbers of requests and images, and the padded
sizes of images, questions and rows. One synthetic request of each shape, with placeholder images
and ids, therefore compiles the programs of all requests.
"""

import dataclasses
import logging
import time
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.inference.base import Images, RunOptions, read_images
from stepprune_jax.inference.programs import num_compiled
from stepprune_jax.inference.request import Request, read_request
from stepprune_jax.inference.sampling import Sampling
from stepprune_jax.inference.shapes import (
    enters_known,
    exact_counts,
    has_joint_bucket,
    list_texts,
)
from stepprune_jax.models.images import Pixels
from stepprune_jax.parallel.programs import num_evicted
from stepprune_jax.policy.buckets import text_bucket
from stepprune_jax.pruning import Budget, Pruner
from stepprune_jax.selectors import TrainedPruner
from stepprune_jax.serving.batching import pad_requests
from stepprune_jax.serving.engine import EngineBackend
from stepprune_jax.serving.local import LocalBackend
from stepprune_jax.serving.messages import ChatRequest, RequestParser
from stepprune_jax.user_input import UserError

_Settings = tuple[Pruner, Sampling, RunOptions]
_logger = logging.getLogger(__name__)
# Images per request. Most chats have one or two images; each further image adds many programs.
_MAX_IMAGES = 2
# Exceeds every stop logit: the policy stops at its smallest number of tokens.
_STOP_BIAS = 1e4
# Tokens. A text by itself and the same text within a prompt may differ by this many tokens.
_TOKENIZER_SLACK = 3


class Extent(NamedTuple):
    """Limits of the requests whose programs are compiled.

    Attributes:
        size: width and height of the largest image. Images may also have the sides swapped.
        text: number of tokens of the longest text, including the tokens of the template.
    """

    size: tuple[int, int]
    text: int


class _BatchKind(NamedTuple):
    """Batches that differ only in the lengths of their texts.

    Attributes:
        rows: number of requests.
        is_sampled: whether the requests have a temperature.
        images: images of each request, or None.
    """

    rows: int
    is_sampled: bool
    images: Images | None = None

    @property
    def num_images(self) -> int:
        """Number of images of each request."""
        return 0 if self.images is None else len(self.images.sizes)

    def __str__(self) -> str:
        text = f"{self.rows} request{'s' * (self.rows > 1)}, {self.num_images or 'no'} image"
        text += "s" * (self.num_images != 1)
        if self.images is not None:
            text += f" of {self.images.sizes[0]} tokens"
        return text + ", sampled" * self.is_sampled


def warm_up(parser: RequestParser, backend: EngineBackend | LocalBackend, extent: Extent) -> None:
    """Compiles all programs of an extent by running them, and logs the seconds of each.

    Covers requests with up to two images, in all batch sizes of the server, with the server's
    default pruner, budget and length limit. A method that counts tokens at a cut inside the
    language model, such as GlimpsePrune without a budget, may compile the rows after the cut later.

    Args:
        parser: has the default settings of the server.
        backend: runs the requests.
        extent: limits of the requests.

    Raises:
        UserError: a batch does not fit into the memory of the device.
    """
    start_time, start_count, start_evicted = time.perf_counter(), num_compiled(), num_evicted()
    work = _WarmUp(parser, backend, extent)
    for kind in work.kinds():
        try:
            work.run_kind(kind)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise UserError(
                f"--warm_up: {kind} do not fit into the device's memory; use a smaller "
                "--batch_size or smaller images"
            ) from error
    num_programs, seconds = num_compiled() - start_count, time.perf_counter() - start_time
    _logger.info("warm-up: %d programs in %.0f s", num_programs, seconds)
    if num_evicted() > start_evicted:
        _logger.warning(
            "warm-up: this process cannot keep all programs on CPUs, so requests compile the first "
            "ones again; use a smaller --batch_size or smaller images"
        )


class _WarmUp:
    """Runs the synthetic requests of `warm_up`."""

    def __init__(
        self, parser: RequestParser, backend: EngineBackend | LocalBackend, extent: Extent
    ):
        self._parser, self._backend, self._extent = parser, backend, extent
        self._model, self._shapes = parser.model, set[Hashable]()
        shortest_prompt = read_request(self._model, ["."], system="").ids[0]
        self._min_text = max(1, len(shortest_prompt) - _TOKENIZER_SLACK)
        self._pixels = self._model.backbone.list_example_pixels(*extent.size)
        self._sizes = np.concatenate([self._repeat(pixels, 1).sizes for pixels in self._pixels])

    def _repeat(self, pixels: Pixels, count: int) -> Images:
        """Returns copies of an image."""
        return read_images(self._model.backbone, [pixels] * count)

    def kinds(self) -> Iterator[_BatchKind]:
        """Yields batches of all numbers of requests and images, and of all sizes of images."""
        batch_sizes = range(1, self._backend.batch_size + 1)
        for rows in sorted({len(pad_requests(range(size))) for size in batch_sizes}):
            # A sampled request runs by itself.
            for is_sampled in (False, True) if rows == 1 and self._backend.samples else (False,):
                yield _BatchKind(rows, is_sampled)
                for count in range(1, _MAX_IMAGES + 1):
                    for pixels in self._pixels:
                        yield _BatchKind(rows, is_sampled, self._repeat(pixels, count))

    def run_kind(self, kind: _BatchKind) -> None:
        """Compiles the programs of one kind, for texts and questions of all lengths."""
        config = self._model.config
        pruner, sampling, options = self._parser.default_settings(is_sampled=kind.is_sampled)
        is_counted = enters_known(config, pruner)
        is_joint = has_joint_bucket(config, kind.num_images)
        pruner = pruner if is_counted else _stop_at_once(pruner)
        # No id ends an answer, so every run computes a second token.
        sampling = sampling._replace(stop_ids=(-1,) * len(config.eos_token_ids))
        settings = pruner, sampling, options
        # In a joint bucket of text and question, text lengths cover all question lengths.
        varies_question = (
            kind.num_images > 0 and pruner.reads_text and not (is_joint and is_counted)
        )
        for question in self._list_questions(is_joint) if varies_question else [1]:
            first_text = self._min_text + max(0, question - 1 - _TOKENIZER_SLACK)
            if is_counted or not kind.num_images:
                kept = self._count_kept(pruner, kind, kind.num_images)
                min_kept = self._count_kept(pruner, kind, min(1, kind.num_images))
            else:
                kept = min_kept = self._run_batch(kind, settings, first_text, question)
            for text in self._list_texts(kind, pruner, kept, first_text + min_kept - kept):
                self._run_batch(kind, settings, text, question)

    def _run_batch(self, kind: _BatchKind, settings: _Settings, text: int, question: int) -> int:
        """Runs a batch, and returns how many visual tokens each of its requests keeps.

        Args:
            kind: the kind of batch.
            settings: pruner, sampling and options.
            text: number of text tokens of each prompt.
            question: number of tokens of each question, which the policy reads.
        """
        start_time, start_count, count = time.perf_counter(), num_compiled(), kind.num_images
        ids = (IMAGE_TOKEN,) * count + (1,) * text
        request = Request((ids,), ((1,) * question,), kind.images, (tuple(range(count)),))
        chats = [ChatRequest(request, *settings)] * kind.rows
        kept = self._backend.warm(chats, self._shapes)
        if num_compiled() > start_count:
            seconds = time.perf_counter() - start_time
            _logger.info("compiled in %.1f s: %s, rows of %d tokens", seconds, kind, text + kept)
        return kept

    def _list_questions(self, is_joint: bool) -> list[int]:
        """Lists one question length for each padded length."""
        lengths, length = [], 1
        while length <= max(1, self._extent.text - self._min_text + _TOKENIZER_SLACK):
            lengths.append(length)
            request = Request(((1,),), ((1,) * length,), None, ((),))
            padded_length = request.prompts().words.shape[1]
            length = 1 + (text_bucket(padded_length) if is_joint else padded_length)
        return lengths

    def _list_texts(
        self, kind: _BatchKind, pruner: Pruner, kept: int, first_text: int
    ) -> list[int]:
        """Lists text lengths from `first_text` on that have every row shape of real requests.

        Real requests may keep other numbers of visual tokens than the synthetic ones, which keep
        `kept`. The list covers their row lengths by shorter or longer texts.
        """
        config, count, max_visual = self._model.config, kind.num_images, 0
        if count and not (has_joint_bucket(config, count) and enters_known(config, pruner)):
            n = self._model.backbone.num_padded_tokens(kind.images.pixels)
            max_visual = count * pruner.schedule(config, n).bound
        limit = self._model.backbone.CONTEXT_LIMIT
        last_text = min(self._extent.text + max_visual, limit) - (kept if max_visual else 0)
        kept_per_image = [kept // max(1, count)] * count
        texts = range(max(1, first_text), last_text + 1)
        return list_texts(config, pruner, kept_per_image, texts, limit)

    def _count_kept(self, pruner: Pruner, kind: _BatchKind, num_large: int) -> int:
        """Counts the visual tokens of a request that enter the language model.

        The first `num_large` images have the size of `kind`, and the remaining images have the
        smallest size. Sizes must determine the counts (`enters_known`).
        """
        if not kind.num_images:
            return 0
        config = self._model.config
        smallest_count = exact_counts(config, pruner, self._sizes).min()
        counts = exact_counts(config, pruner, kind.images.sizes)
        return int(counts[:num_large].sum() + (kind.num_images - num_large) * smallest_count)


def _stop_at_once(pruner: Pruner) -> Pruner:
    """Returns a pruner with the same programs whose learned stop ends selection at once.

    A pruner without a learned stop is returned unchanged.
    """
    if not isinstance(pruner, TrainedPruner) or not pruner.has_stop:
        return pruner
    return dataclasses.replace(
        pruner, budget=Budget("adaptive"), stop_bias=pruner.bias + _STOP_BIAS
    )
