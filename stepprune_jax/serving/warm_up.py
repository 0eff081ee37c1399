"""Compiles all programs that requests up to a size can reach, before the server listens.

Programs depend on the shapes of a batch alone: on the numbers of requests and images, and on the
padded sizes of images, words and rows. Requests with made-up images and ids, one of each shape,
therefore compile the programs of all requests.
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
from stepprune_jax.inference.plan import (
    enters_known,
    exact_counts,
    has_joint_bucket,
    list_texts,
)
from stepprune_jax.inference.programs import num_compiled
from stepprune_jax.inference.request import Request, read_request
from stepprune_jax.inference.sampling import Sampling
from stepprune_jax.models.images import Pixels
from stepprune_jax.parallel.programs import num_evicted
from stepprune_jax.policy.buckets import text_bucket
from stepprune_jax.pruning import Budget, Pruner
from stepprune_jax.selectors import TrainedPruner
from stepprune_jax.serving.batching import padded
from stepprune_jax.serving.engine import Engine
from stepprune_jax.serving.local import Local
from stepprune_jax.serving.messages import ChatRequest, RequestParser
from stepprune_jax.user_input import UserError

_How = tuple[Pruner, Sampling, RunOptions]
_logger = logging.getLogger(__name__)
_MOST_IMAGES = 2  # of a request
_STOP_BIAS = 1e4  # stops a policy at its fewest tokens
_SLACK = 3  # tokens by which a text alone may differ from the same text in a prompt


class Extent(NamedTuple):
    """The requests whose programs are compiled.

    Attributes:
        size: width and height of the largest image; an image may also be turned.
        text: tokens of the longest text, with the tokens of the template.
    """

    size: tuple[int, int]
    text: int


class _Kind(NamedTuple):
    """Batches that differ in the lengths of their texts alone."""

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


def warm_up(reader: RequestParser, backend: Engine | Local, extent: Extent) -> None:
    """Compiles all programs of an extent by running them, and logs a line with seconds for each.

    These are the programs of requests with up to two images, with the pruner, the budget and the
    longest answer of the server, in batches of all sizes that the server uses. The rows behind a
    cut at which a method counts, as GlimpsePrune does without a budget, may compile later.

    Args:
        reader: reads requests, with the defaults of the server.
        backend: answers them.
        extent: the requests.

    Raises:
        UserError: a batch does not fit into the memory of the device.
    """
    begin, before, evicted_before = time.perf_counter(), num_compiled(), num_evicted()
    work = _WarmUp(reader, backend, extent)
    for kind in work.kinds():
        try:
            work.run(kind)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            problem = f"--warm_up: {kind} do not fit into the device's memory"
            raise UserError(f"{problem}: lower --batch_size or the sizes") from error
    count, seconds = num_compiled() - before, time.perf_counter() - begin
    _logger.info("warm-up: %d programs in %.0f s", count, seconds)
    if num_evicted() > evicted_before:
        _logger.warning(
            "warm-up: a process on CPUs keeps fewer programs, so the first ones are compiled again "
            "when requests need them: lower --batch_size or the sizes"
        )


class _WarmUp:
    """The work of `warm_up`."""

    def __init__(self, reader: RequestParser, backend: Engine | Local, extent: Extent):
        self._reader, self._backend, self._extent = reader, backend, extent
        self._model, self._shapes = reader.model, set[Hashable]()
        shortest = read_request(self._model, ["."], system="").ids[0]
        self._first_text = max(1, len(shortest) - _SLACK)
        self._pixels = self._model.backbone.list_example_pixels(*extent.size)
        self._sizes = np.concatenate([self._draw(pixels, 1).sizes for pixels in self._pixels])

    def _draw(self, pixels: Pixels, count: int) -> Images:
        """Returns copies of an image."""
        return read_images(self._model.backbone, [pixels] * count)

    def kinds(self) -> Iterator[_Kind]:
        """Yields batches of all numbers of requests and images, and of all sizes of images."""
        most = self._backend.batch_size
        for rows in sorted({len(padded(range(count))) for count in range(1, most + 1)}):
            for is_sampled in (False, True)[: 1 + (rows == 1 and self._backend.samples)]:
                yield _Kind(rows, is_sampled)
                for count in range(1, _MOST_IMAGES + 1):
                    for pixels in self._pixels:
                        yield _Kind(rows, is_sampled, self._draw(pixels, count))

    def run(self, kind: _Kind) -> None:
        """Compiles the programs of a kind of batch, for texts and words of all lengths."""
        config = self._model.config
        pruner, sampling, options = self._reader.usual(is_sampled=kind.is_sampled)
        counted, is_joint = enters_known(config, pruner), has_joint_bucket(config, kind.num_images)
        pruner = pruner if counted else _stopping(pruner)
        # No token ends an answer, so that a second token is computed.
        sampling = sampling._replace(stop_ids=(-1,) * len(config.eos_token_ids))
        how = pruner, sampling, options
        # Where text and words share a bucket, the lengths of text cover those of words.
        reads_text = kind.num_images > 0 and pruner.reads_text and not (is_joint and counted)
        for words in self._list_words(is_joint) if reads_text else [1]:
            first = self._first_text + max(0, words - 1 - _SLACK)
            if counted or not kind.num_images:
                kept = self._count(pruner, kind, kind.num_images)
                fewest = self._count(pruner, kind, min(1, kind.num_images))
            else:
                kept = fewest = self._run(kind, how, first, words)
            for text in self._list_texts(kind, pruner, kept, first + fewest - kept):
                self._run(kind, how, text, words)

    def _run(self, kind: _Kind, how: _How, text: int, words: int) -> int:
        """Runs a batch; returns the visual tokens that its requests keep."""
        begin, before, count = time.perf_counter(), num_compiled(), kind.num_images
        ids = (IMAGE_TOKEN,) * count + (1,) * text
        request = Request((ids,), ((1,) * words,), kind.images, (tuple(range(count)),))
        kept = self._backend.warm([ChatRequest(request, *how)] * kind.rows, self._shapes)
        if num_compiled() > before:
            seconds = time.perf_counter() - begin
            _logger.info("compiled in %.1f s: %s, rows of %d tokens", seconds, kind, text + kept)
        return kept

    def _list_words(self, is_joint: bool) -> list[int]:
        """Lists numbers of words that together have every padded number."""
        numbers, words = [], 1
        while words <= max(1, self._extent.text - self._first_text + _SLACK):
            numbers.append(words)
            request = Request(((1,),), ((1,) * words,), None, ((),))
            padded_words = request.prompts().words.shape[1]
            words = 1 + (text_bucket(padded_words) if is_joint else padded_words)
        return numbers

    def _list_texts(self, kind: _Kind, pruner: Pruner, kept: int, first: int) -> list[int]:
        """Lists lengths of text, from the first one, with every shape of the rows of requests.

        Requests keep other numbers of visual tokens than these `kept`, and so have rows of other
        lengths. A text that is longer or shorter than theirs makes rows of the same lengths.
        """
        config, count, most = self._model.config, kind.num_images, 0
        if count and not (has_joint_bucket(config, count) and enters_known(config, pruner)):
            n = self._model.backbone.num_padded_tokens(kind.images.pixels)
            most = count * pruner.schedule(config, n).bound
        limit = self._model.backbone.CONTEXT_LIMIT
        last = min(self._extent.text + most, limit) - (kept if most else 0)
        each = [kept // max(1, count)] * count
        return list_texts(config, pruner, each, range(max(1, first), last + 1), limit)

    def _count(self, pruner: Pruner, kind: _Kind, large: int) -> int:
        """Counts the tokens of a request that enter the language model, if they are known.

        The first `large` images are of the kind, and its other images are the smallest.
        """
        if not kind.num_images:
            return 0
        config = self._model.config
        smallest = exact_counts(config, pruner, self._sizes).min()
        counts = exact_counts(config, pruner, kind.images.sizes)
        return int(counts[:large].sum() + (kind.num_images - large) * smallest)


def _stopping(pruner: Pruner) -> Pruner:
    """Returns a pruner with the same programs that stops at once, if its stop is learned."""
    if not isinstance(pruner, TrainedPruner) or not pruner.has_stop:
        return pruner
    return dataclasses.replace(pruner, budget=Budget("own"), stop_bias=pruner.bias + _STOP_BIAS)
