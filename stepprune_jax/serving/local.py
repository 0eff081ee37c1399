"""Answers with the model in this process, by the library's `Generator`. Serves every method.

A batch runs until all its answers have ended, so this backend suits a few users.
"""

import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Hashable, Sequence

import jax

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.inference import pipeline
from stepprune_jax.inference.base import Batch, PrefillResult
from stepprune_jax.inference.decoding import NotFiniteError
from stepprune_jax.inference.generate import Generator
from stepprune_jax.inference.plan import plan_batch
from stepprune_jax.inference.request import Request, join_requests
from stepprune_jax.policy.buckets import power_of_two
from stepprune_jax.serving.batching import (
    AnswerStart,
    AnswerTokens,
    Batcher,
    Job,
    Metrics,
    pad_requests,
)
from stepprune_jax.serving.fields import RequestError
from stepprune_jax.serving.messages import ChatRequest

_logger = logging.getLogger(__name__)


class LocalBackend:
    """Generates answers in this process."""

    samples = True  # Sampling with a temperature is another program than greedy decoding.

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
            metrics: counts the batches.
            batch_size: largest number of requests in a batch.
            batch_seconds: longest time that a request waits for its batch to fill.
            max_tokens: answers of up to this length share programs and batches.
        """
        self._model, self.batch_size, self._max_tokens = model, batch_size, max_tokens
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

    async def answer(self, chat: ChatRequest) -> AsyncIterator[AnswerStart | AnswerTokens]:
        """Yields the events of an answer. Closing the iterator cancels the request."""
        async for event in self.batcher.events(chat):
            yield event

    def _padded_max_tokens(self, chat: ChatRequest) -> int:
        """Returns the length limit of the program: a power of two, to bound their number."""
        max_tokens = max(chat.options.max_tokens, self._max_tokens)
        return min(power_of_two(max_tokens), self._model.config.text.max_positions)

    def _batch_key(self, chat: ChatRequest) -> Hashable:
        """Returns a key that is equal for requests that may share a batch, or None.

        One number of images per batch bounds the number of programs. A request with a temperature
        runs by itself: random numbers depend on the row, and its seed must reproduce its answer.
        """
        if chat.sampling.temperature:
            return None
        max_tokens, positions = self._padded_max_tokens(chat), chat.options.positions
        return id(chat.pruner), chat.sampling, positions, max_tokens, chat.num_images

    def _join_batch(self, chats: Sequence[ChatRequest]) -> tuple[Generator, Request]:
        """Returns a generator for chats with equal keys, and the padded chats as one request."""
        chat, request = chats[0], join_requests([chat.request for chat in pad_requests(chats)])
        options = dataclasses.replace(chat.options, max_tokens=self._padded_max_tokens(chat))
        return Generator(self._model, chat.pruner, chat.sampling, options), request

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
        batch = pipeline.complete_plan(self._model, batch)
        key = bool(chats[0].sampling.temperature), _batch_shape(batch)
        if key not in shapes:
            shapes.add(key)
            state = pipeline.prefill(self._model, batch, generator.resolved).state
            steps = pipeline.decode(self._model, state, generator.resolved, options)
            jax.block_until_ready(next(steps, None))
        return int(batch.num_kept[0])

    def _run(self, jobs: Sequence[Job]) -> None:
        """Answers a batch, and reports each token or that a row's logits are not finite."""
        eos_ids = self._model.config.eos_token_ids
        # Tokens that each job may still get; 0 after its end.
        remaining = [job.chat.options.max_tokens for job in jobs]

        def report_start(prefill: PrefillResult) -> None:
            lengths = prefill.trace.stages[0].length.tolist()
            rows = zip(lengths, prefill.visual_tokens.tolist(), prefill.kept.tolist(), strict=True)
            for job, counts in zip(jobs, rows, strict=False):  # Rows of padding have no job.
                job.put(AnswerStart(*counts))

        generator, request = self._join_batch([job.chat for job in jobs])
        # The client of each failed row has received its error by then.
        with contextlib.suppress(NotFiniteError):
            for row, token in generator.stream(request, report_start):
                if row < len(jobs) and remaining[row]:
                    remaining[row] -= 1
                    finish = "stop" if token in eos_ids else None if remaining[row] else "length"
                    if finish or token < 0:
                        remaining[row] = 0
                    event = _not_finite_error() if token < 0 else AnswerTokens((token,), finish)
                    jobs[row].put(event)
                if all(
                    job.is_abandoned or not count
                    for job, count in zip(jobs, remaining, strict=True)
                ):
                    break


def _not_finite_error() -> RequestError:
    """Logs that a request's logits are not finite, and returns the error for its client."""
    _logger.warning("a request has no answer: %s", NotFiniteError.REASON)
    return RequestError(500, NotFiniteError.REASON)


def _batch_shape(batch: Batch) -> Hashable:
    """Returns the plan and the shapes of a batch, which determine its program.

    The program also depends on pruner and sampling.
    """
    # The result of the last stage before the prefill is the input of the prefill.
    stages = batch.paused, batch.kept, batch.pairs
    inputs = next(stage for stage in stages if stage is not None)
    leaves, structure = jax.tree.flatten((inputs, batch.layout))
    return batch.plan, structure, tuple((leaf.shape, leaf.dtype.name) for leaf in leaves)
