"""Answers with the model in this process, by the library's `Generator`. Serves every method.

A batch runs until all its answers have ended, so this backend suits a few users.
"""

import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, Hashable, Sequence
from typing import Any

import jax

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.inference import pipeline
from stepprune_jax.inference.base import PrefillInputs, PrefillResult
from stepprune_jax.inference.decoding import NotFiniteError
from stepprune_jax.inference.generate import Generator
from stepprune_jax.inference.plan import plan_batch
from stepprune_jax.inference.request import Request, join_requests
from stepprune_jax.parallel.placement import to_host
from stepprune_jax.policy.buckets import power_of_two
from stepprune_jax.serving.batching import (
    AnswerStart,
    AnswerTokens,
    Batcher,
    Job,
    Metrics,
    list_kept,
    pad_requests,
    shape_key,
)
from stepprune_jax.serving.fields import RequestError
from stepprune_jax.serving.messages import ChatRequest

_logger = logging.getLogger(__name__)


class LocalBackend:
    """Generates answers in this process.

    Attributes:
        batcher: runs batches of requests.
        batch_size: largest number of requests in a batch.
        samples: whether a temperature changes the programs of this process. Sampling and greedy
            decoding are different programs, so it does.
    """

    samples = True

    def __init__(
        self,
        model: VLM,
        metrics: Metrics,
        *,
        batch_size: int = 8,
        batch_seconds: float = 0.005,
        max_tokens: int = 1,
    ):
        """Starts the worker thread.

        Args:
            model: the model.
            metrics: records the batches.
            batch_size: largest number of requests in a batch.
            batch_seconds: longest time in seconds that a request waits for its batch to fill.
            max_tokens: requests with a length limit up to this number share programs and batches.
        """
        self._model, self.batch_size, self._shared_max_tokens = model, batch_size, max_tokens
        self.batcher = Batcher(
            self._run,
            self._batch_key,
            max_batch=batch_size,
            max_wait=batch_seconds,
            metrics=metrics,
        )

    async def close(self) -> None:
        """No-op: there is no engine to close."""

    async def check(self) -> None:
        """No-op: this backend is always healthy."""

    def answer(self, chat: ChatRequest) -> AsyncGenerator[Any]:
        """Iterates over the events of an answer. Closing the iterator cancels the request.

        Args:
            chat: the request.

        Returns:
            An iterator of an `AnswerStart` with the token counts of the prompt, and then of one
            `AnswerTokens` per token.
        """
        return self.batcher.events(chat)

    def _padded_max_tokens(self, chat: ChatRequest) -> int:
        """Returns the length limit of the program, which is at least the limit of the request.

        Each length limit is a program. Powers of two bound the number of programs.
        """
        max_tokens = max(chat.options.max_tokens, self._shared_max_tokens)
        return min(power_of_two(max_tokens), self._model.config.text.max_positions)

    def _batch_key(self, chat: ChatRequest) -> Hashable:
        """Returns a key that is equal for requests that may share a batch.

        Only requests whose images and videos have equal `shape_key`s share a batch, which bounds
        the number of programs. A request with a temperature has the key None and runs by itself:
        random numbers depend on the position in the batch, and the seed of a request must reproduce
        its answer.
        """
        if chat.sampling.temperature:
            return None
        max_tokens, positions = self._padded_max_tokens(chat), chat.options.positions
        images_key = shape_key(self._model, chat.request)
        return id(chat.pruner), chat.sampling, positions, max_tokens, images_key

    def _join_batch(self, chats: Sequence[ChatRequest]) -> tuple[Generator, Request]:
        """Joins chats with equal keys to one request, padded to a power of two.

        Returns:
            A generator with the settings of the chats, and the joint request.
        """
        requests = [chat.request for chat in pad_requests(chats)]
        request = join_requests(self._model.backbone, requests)
        first_chat = chats[0]
        max_tokens = self._padded_max_tokens(first_chat)
        options = dataclasses.replace(first_chat.options, max_tokens=max_tokens)
        return Generator(self._model, first_chat.pruner, first_chat.sampling, options), request

    def warm(self, chats: Sequence[ChatRequest], shapes: set[Hashable]) -> int:
        """Compiles the programs of a batch, unless `shapes` has its shape.

        Args:
            chats: requests with equal keys.
            shapes: shapes of batches whose programs are compiled; the shape of this batch is added.

        Returns:
            The number of visual tokens that the first request keeps.
        """
        generator, request = self._join_batch(chats)
        prompts, options = request.prompts(), generator.options
        batch = plan_batch(self._model, generator.placed, prompts, request.images, options)
        inputs = pipeline.prepare_prefill(self._model, batch)
        key = bool(chats[0].sampling.temperature), _batch_shape(inputs)
        if key not in shapes:
            shapes.add(key)
            state = pipeline.prefill(self._model, inputs, generator.resolved).state
            steps = pipeline.decode(self._model, state, generator.resolved, options)
            jax.block_until_ready(next(steps, None))  # All decoding steps are the same program.
        return int(inputs.num_kept[0])

    def _run(self, jobs: Sequence[Job]) -> None:
        """Answers a batch of jobs with equal keys, and reports the events of each job.

        A job gets an error instead of a token if the logits of its row are not finite.

        Args:
            jobs: a batch from the batcher, without padding.
        """
        eos_ids = self._model.config.eos_token_ids
        # Number of tokens that each job may still get; 0 once its answer has ended.
        num_remaining = [job.chat.options.max_tokens for job in jobs]

        def report_start(prefill: PrefillResult) -> None:
            lengths = prefill.trace.stages[0].length.tolist()
            num_visual, num_kept = prefill.visual_tokens.tolist(), prefill.kept.tolist()
            stage, order = prefill.trace.stages[-1], prefill.trace.order
            kept = list_kept(request, *to_host((stage.index, stage.image, order)))
            starts = map(AnswerStart, lengths, num_visual, num_kept, kept)
            for job, start in zip(jobs, starts, strict=False):  # Padded rows have no job.
                job.put(start)

        generator, request = self._join_batch([job.chat for job in jobs])
        # The stream raises NotFiniteError at its end. All failed jobs have got their errors before.
        with contextlib.suppress(NotFiniteError):
            for row_index, token in generator.stream(request, report_start):
                if row_index < len(jobs) and num_remaining[row_index]:
                    num_remaining[row_index] -= 1
                    finish_reason = "length" if num_remaining[row_index] == 0 else None
                    finish_reason = "stop" if token in eos_ids else finish_reason
                    event = AnswerTokens((token,), finish_reason)
                    if token < 0:  # The stream has a negative id for logits with NaN.
                        _logger.warning("a request has no answer: %s", NotFiniteError.REASON)
                        event = RequestError(500, NotFiniteError.REASON)
                    if finish_reason or token < 0:
                        num_remaining[row_index] = 0
                    jobs[row_index].put(event)
                if all(
                    job.is_abandoned or count == 0
                    for job, count in zip(jobs, num_remaining, strict=True)
                ):
                    break


def _batch_shape(inputs: PrefillInputs) -> Hashable:
    """Returns the plan and the shapes of a batch, which determine its prefill and decode programs.

    Programs also depend on pruner and sampling, which are not included.
    """
    leaves, structure = jax.tree.flatten((inputs.tokens, inputs.layout))
    return inputs.plan, structure, tuple((leaf.shape, leaf.dtype.name) for leaf in leaves)
