"""Compiles all programs of requests up to a given size before the server listens.

A program depends only on the shapes of a batch: the number of requests, the number of images, and
the padded lengths of images, questions (the user's part of the text) and rows (the language model's
input). The server therefore runs one synthetic batch of each shape, with placeholder images and
token ids.
"""

import dataclasses
import itertools
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

# Settings of a request: the pruner, the sampling of the answer, and how the model is run.
_Settings = tuple[Pruner, Sampling, RunOptions]
_logger = logging.getLogger(__name__)
# Images per request. Most chats have one or two images; each further image adds many programs.
_MAX_IMAGES = 2
# Exceeds every stop logit: the policy stops at its smallest number of tokens.
_STOP_BIAS = 1e4
# Tokens. A text by itself and the same text within a prompt may differ by this many tokens.
_TOKENIZER_SLACK = 3
# Token of all synthetic texts. Programs do not depend on the ids, so any text token serves.
_PLACEHOLDER_ID = 1


class Extent(NamedTuple):
    """Limits of the requests whose programs are compiled.

    Attributes:
        size: width and height of the largest image in pixels. Images may also have the sides
            swapped.
        text: number of tokens of the longest text, including the tokens of the chat template.
        budgets: budgets of requests that set one. Requests without a budget are always included.
    """

    size: tuple[int, int]
    text: int
    budgets: tuple[str, ...] = ()


class _BatchKind(NamedTuple):
    """A set of batches that differ only in the lengths of their texts.

    Attributes:
        batch_size: number of requests.
        is_sampled: whether the requests have a temperature.
        images: images of each request; None for requests without images.
        budget: budget that the requests set; None for the server's budget.
    """

    batch_size: int
    is_sampled: bool
    images: Images | None = None
    budget: str | None = None

    @property
    def num_images(self) -> int:
        """Number of images of each request."""
        return 0 if self.images is None else len(self.images.sizes)

    def __str__(self) -> str:
        description = f"{self.batch_size} request{'s' * (self.batch_size > 1)}, "
        description += f"{self.num_images or 'no'} image{'s' * (self.num_images != 1)}"
        if self.images is not None:
            description += f" of {self.images.sizes[0]} tokens"
        description += "" if self.budget is None else f", budget {self.budget}"
        return description + ", sampled" * self.is_sampled


def warm_up(parser: RequestParser, backend: EngineBackend | LocalBackend, extent: Extent) -> None:
    """Compiles the programs of all requests within an extent, and logs the time of each program.

    Covers requests with up to two images, in all batch sizes of the server, with the server's
    default pruner and length limit, and with its default budget and the extent's budgets. Some
    pruners drop tokens between two layers of the language model and choose the number of tokens
    from the image, such as GlimpsePrune without a budget. The layers after such a cut may still be
    compiled at a later request.

    Args:
        parser: has the default settings of the server.
        backend: runs the requests.
        extent: limits of the requests.

    Raises:
        UserError: a batch does not fit into the memory of the device.
    """
    start_time = time.perf_counter()
    num_compiled_before, num_evicted_before = num_compiled(), num_evicted()
    runner = _WarmUp(parser, backend, extent)
    kinds = [*runner.list_kinds()]
    _logger.info(
        "warm-up: %d kinds of batches, each with a program for every padded length of text and "
        "question; fewer with a smaller --batch_size or --warm_up_text",
        len(kinds),
    )
    for index, kind in enumerate(kinds):
        try:
            runner.run_kind(kind, f"{index + 1} of {len(kinds)}")
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise UserError(
                f"--warm_up: {kind} do not fit into the device's memory; use a smaller "
                "--batch_size or smaller images"
            ) from error
    num_programs, seconds = num_compiled() - num_compiled_before, time.perf_counter() - start_time
    _logger.info("warm-up: %d programs in %.0f s", num_programs, seconds)
    if not extent.budgets:
        _logger.info(
            "warm-up: a request with another budget waits for the compiler; --warm_up_budgets "
            "covers budgets"
        )
    if num_evicted() > num_evicted_before:
        _logger.warning(
            "warm-up: this process cannot keep all programs on CPUs, so requests compile the first "
            "ones again; use a smaller --batch_size or smaller images"
        )


class _WarmUp:
    """Runs the synthetic batches of `warm_up`."""

    def __init__(
        self, parser: RequestParser, backend: EngineBackend | LocalBackend, extent: Extent
    ):
        """Prepares placeholder images; Args as in `warm_up`."""
        self._parser, self._backend, self._extent = parser, backend, extent
        self._place = ""
        self._model, self._compiled_shapes = (
            parser.model,
            {budget: set[Hashable]() for budget in (None, *extent.budgets)},
        )
        # Text tokens of the shortest prompt, most of them from the chat template.
        shortest_prompt = read_request(self._model, ["."], system="").ids[0]
        self._min_text_length = max(1, len(shortest_prompt) - _TOKENIZER_SLACK)
        # Placeholder images with the padded shapes of all images up to the extent's size.
        self._example_pixels = self._model.backbone.list_example_pixels(*extent.size)
        sizes = [self._repeat_image(pixels, 1).sizes for pixels in self._example_pixels]
        self._image_sizes = np.concatenate(sizes)

    def _repeat_image(self, pixels: Pixels, num_images: int) -> Images:
        """Returns `num_images` copies of an image."""
        return read_images(self._model.backbone, [pixels] * num_images)

    def list_kinds(self) -> Iterator[_BatchKind]:
        """Yields a kind for each padded batch size, budget, number of images and example image."""
        batch_sizes = range(1, self._backend.batch_size + 1)
        padded_sizes = {len(pad_requests(range(batch_size))) for batch_size in batch_sizes}
        for batch_size in sorted(padded_sizes):
            # The local backend runs a request with a temperature in a batch of one request.
            has_sampling = batch_size == 1 and self._backend.samples
            for budget, is_sampled in itertools.product(
                self._compiled_shapes, (False, True) if has_sampling else (False,)
            ):
                yield _BatchKind(batch_size, is_sampled, budget=budget)
                for num_images in range(1, _MAX_IMAGES + 1):
                    for pixels in self._example_pixels:
                        images = self._repeat_image(pixels, num_images)
                        yield _BatchKind(batch_size, is_sampled, images, budget)

    def run_kind(self, kind: _BatchKind, place: str) -> None:
        """Compiles the programs of one kind of batch, for texts and questions of all lengths.

        Args:
            kind: the kind of batch; one of `list_kinds`.
            place: the place of the kind among all kinds, for the log, such as "3 of 14".
        """
        self._place = place
        config = self._model.config
        pruner, sampling, options = self._parser.default_settings(
            is_sampled=kind.is_sampled, budget=kind.budget
        )
        is_count_known = enters_known(config, pruner)
        is_joint = has_joint_bucket(config, kind.num_images)
        if not is_count_known:
            # A learned stop would keep a meaningless number of tokens of a placeholder image.
            pruner = _stop_at_once(pruner)
        # No token has the id -1, so no answer ends early, and every run also decodes a token.
        sampling = sampling._replace(stop_ids=(-1,) * len(config.eos_token_ids))
        reads_question = kind.num_images > 0 and pruner.reads_text
        # A joint bucket pads the text and its question to one length. If the number of kept tokens
        # is known, the text lengths then cover all question lengths.
        varies_question = reads_question and not (is_joint and is_count_known)
        for question_length in self._list_question_lengths(is_joint) if varies_question else [1]:
            self._run_question_length(kind, (pruner, sampling, options), question_length)

    def _run_question_length(
        self, kind: _BatchKind, settings: _Settings, question_length: int
    ) -> None:
        """Compiles the programs of one kind of batch, for all texts that contain a question.

        Args:
            kind: the kind of batch.
            settings: pruner, sampling and options.
            question_length: number of tokens of the question.
        """
        pruner, *_ = settings
        # A text contains its question, so it is at least this long.
        min_length = self._min_text_length + max(0, question_length - 1 - _TOKENIZER_SLACK)
        if enters_known(self._model.config, pruner) or not kind.num_images:
            num_kept = self._count_kept(pruner, kind, kind.num_images)
            min_kept = self._count_kept(pruner, kind, min(1, kind.num_images))
        else:
            num_kept = self._run_batch(kind, settings, min_length, question_length)
            min_kept = num_kept
        # The synthetic request repeats its first image. Real requests may have smaller further
        # images and hence fewer visual tokens. Shorter texts give the same row lengths.
        min_length += min_kept - num_kept
        for text_length in self._list_text_lengths(kind, pruner, num_kept, min_length):
            self._run_batch(kind, settings, text_length, question_length)

    def _run_batch(
        self, kind: _BatchKind, settings: _Settings, text_length: int, question_length: int
    ) -> int:
        """Runs a batch of equal requests, and logs the time if this compiled a program.

        Args:
            kind: the kind of batch.
            settings: pruner, sampling and options.
            text_length: number of text tokens of each prompt.
            question_length: number of tokens of each question, which the pruner reads.

        Returns:
            The number of visual tokens that each request keeps.
        """
        start_time, num_compiled_before = time.perf_counter(), num_compiled()
        prompt_ids = (IMAGE_TOKEN,) * kind.num_images + (_PLACEHOLDER_ID,) * text_length
        question_ids = (_PLACEHOLDER_ID,) * question_length
        image_of = tuple(range(kind.num_images))
        request = Request((prompt_ids,), (question_ids,), kind.images, (image_of,))
        chats = [ChatRequest(request, *settings)] * kind.batch_size
        num_kept = self._backend.warm(chats, self._compiled_shapes[kind.budget])
        if num_compiled() > num_compiled_before:
            seconds, row_length = time.perf_counter() - start_time, text_length + num_kept
            question = f", a question of {question_length} tokens" if kind.num_images else ""
            lengths = f"rows of {row_length} tokens{question}"
            _logger.info("%s, compiled in %.1f s: %s, %s", self._place, seconds, kind, lengths)
        return num_kept

    def _list_question_lengths(self, is_joint: bool) -> list[int]:
        """Lists the shortest question length of each padded length.

        Args:
            is_joint: whether text and question are padded to one length.
        """
        lengths, length = [], 1
        max_length = max(1, self._extent.text - self._min_text_length + _TOKENIZER_SLACK)
        while length <= max_length:
            lengths.append(length)
            question_ids = (_PLACEHOLDER_ID,) * length
            request = Request(((_PLACEHOLDER_ID,),), (question_ids,), None, ((),))
            padded_length = request.prompts().words.shape[1]
            length = 1 + (text_bucket(padded_length) if is_joint else padded_length)
        return lengths

    def _list_text_lengths(
        self, kind: _BatchKind, pruner: Pruner, num_kept: int, min_length: int
    ) -> list[int]:
        """Lists text lengths from `min_length` on that have every row shape of real requests.

        A row consists of the kept visual tokens and the text. A real request may keep more visual
        tokens than the synthetic request. The list therefore includes texts that are longer than
        the texts of real requests, but give the same row lengths.

        Args:
            kind: the kind of batch.
            pruner: the pruner.
            num_kept: number of visual tokens that the synthetic request keeps.
            min_length: smallest text length.
        """
        config, num_images, max_visual = self._model.config, kind.num_images, 0
        is_joint = has_joint_bucket(config, num_images)
        if kind.images is not None and not (is_joint and enters_known(config, pruner)):
            # `bound` is the largest number of tokens that the pruner keeps of an image.
            image_size = self._model.backbone.num_padded_tokens(kind.images.pixels)
            max_visual = num_images * pruner.schedule(config, image_size).bound
        limit = self._model.backbone.CONTEXT_LIMIT
        max_length = min(self._extent.text + max_visual, limit) - (num_kept if max_visual else 0)
        kept_per_image = [num_kept // max(1, num_images)] * num_images
        lengths = range(max(1, min_length), max_length + 1)
        return list_texts(config, pruner, kept_per_image, lengths, limit)

    def _count_kept(self, pruner: Pruner, kind: _BatchKind, num_large: int) -> int:
        """Counts the visual tokens of a request that enter the language model.

        Image sizes must determine the counts (`enters_known`).

        Args:
            pruner: the pruner.
            kind: the kind of batch.
            num_large: number of images with the size of the kind's images. All further images have
                the smallest size.
        """
        if kind.images is None:
            return 0
        config = self._model.config
        smallest_count = exact_counts(config, pruner, self._image_sizes).min()
        counts = exact_counts(config, pruner, kind.images.sizes)
        return int(counts[:num_large].sum() + (kind.num_images - num_large) * smallest_count)


def _stop_at_once(pruner: Pruner) -> Pruner:
    """Returns a pruner with the same programs whose learned stop ends selection at once.

    The learned stop is a logit that competes with the logits of all tokens; a bias raises it. A
    pruner without a learned stop is returned unchanged.
    """
    if not isinstance(pruner, TrainedPruner) or not pruner.has_stop:
        return pruner
    return dataclasses.replace(
        pruner, budget=Budget("adaptive"), stop_bias=pruner.bias + _STOP_BIAS
    )
