"""Answers without an engine, by the library's own `Generator`: any method, on any machine.

A batch is answered to its end before the next one starts, so this serves a few users.
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
from stepprune_jax.inference.request import Request, join_requests
from stepprune_jax.serving.batching import Batcher, Job, Started, Tokens, padded
from stepprune_jax.serving.errors import RequestError
from stepprune_jax.serving.messages import ChatRequest
from stepprune_jax.serving.metrics import Metrics

_logger = logging.getLogger(__name__)


class Local:
    """Answers with the whole model in this process."""

    samples = True  # a temperature changes the program

    def __init__(
        self,
        model: VLM,
        metrics: Metrics,
        *,
        batch_size: int = 8,
        batch_seconds: float = 0.005,
        max_tokens: int = 1,
    ):
        """Starts the worker.

        Args:
            model: the model.
            metrics: where batches are counted.
            batch_size: most requests that run together.
            batch_seconds: longest time that a request waits for others.
            max_tokens: answers of up to this length share their programs, and batches.
        """
        self._model, self.batch_size, self._max_tokens = model, batch_size, max_tokens
        self.batcher = Batcher(self._run, self._key, batch_size, batch_seconds, metrics)

    async def close(self) -> None:
        """Has nothing to end."""

    async def check(self) -> None:
        """Can always answer."""

    async def answer(self, chat: ChatRequest) -> AsyncIterator[Started | Tokens]:
        """Yields the events of an answer; closing the iterator ends the work on it."""
        async for event in self.batcher.events(chat):
            yield event

    def _longest(self, chat: ChatRequest) -> int:
        """Returns the longest answer of the program: a power of two, to bound their number."""
        longest = max(chat.options.max_tokens, self._max_tokens)
        return min(1 << (longest - 1).bit_length(), self._model.config.text.max_positions)

    def _key(self, chat: ChatRequest) -> Hashable:
        """Returns what the requests of a batch have in common.

        The number of images bounds the programs. A request that draws its answer shares no batch,
        because draws depend on the row.
        """
        if chat.sampling.temperature:
            return None
        shared = id(chat.pruner), chat.sampling, chat.options.positions, self._longest(chat)
        return *shared, chat.num_images

    def _prepare(self, chats: Sequence[ChatRequest]) -> tuple[Generator, Request]:
        """Returns what answers requests with equal keys, and the requests as one."""
        chat, request = chats[0], join_requests([chat.request for chat in padded(chats)])
        options = dataclasses.replace(chat.options, max_tokens=self._longest(chat))
        return Generator(self._model, chat.pruner, chat.sampling, options), request

    def warm(self, chats: Sequence[ChatRequest], shapes: set[Hashable]) -> int:
        """Compiles the programs of a batch, unless its shape is among `shapes`.

        Returns:
            The visual tokens that remain of the first request.
        """
        generator, request = self._prepare(chats)
        prompts, options = request.prompts(), generator.options
        batch = pipeline.prepare(self._model, generator.placed, prompts, request.images, options)
        key = bool(chats[0].sampling.temperature), _shape(batch)
        if key not in shapes:
            shapes.add(key)
            state = pipeline.begin(self._model, batch, generator.resolved).state
            later = pipeline.decode(self._model, state, generator.resolved, options)
            jax.block_until_ready(next(later, None))
        return int(batch.kept[0])

    def _run(self, jobs: Sequence[Job]) -> None:
        """Reports each token of each job when it is drawn, or that its logits are not finite."""
        stops = self._model.config.eos_token_ids
        remaining = [job.chat.options.max_tokens for job in jobs]

        def start(begun: PrefillResult) -> None:
            length = begun.trace.stages[0].length.tolist()
            counts = zip(length, begun.visual_tokens.tolist(), begun.kept.tolist(), strict=True)
            for job, numbers in zip(jobs, counts, strict=False):
                job.put(Started(*numbers))

        generator, request = self._prepare([job.chat for job in jobs])
        with contextlib.suppress(NotFiniteError):  # each request has been told
            for row, token, _ in generator.stream(request, start):
                if row < len(jobs) and remaining[row]:  # otherwise the row is padding, or has ended
                    remaining[row] -= 1
                    finish = "stop" if token in stops else None if remaining[row] else "length"
                    remaining[row] = 0 if finish or token < 0 else remaining[row]
                    jobs[row].put(Tokens((token,), finish) if token >= 0 else _failure())
                if all(job.gone or not count for job, count in zip(jobs, remaining, strict=True)):
                    break  # nobody waits for more


def _failure() -> RequestError:
    """Logs that the logits of a request are not finite, and returns what its client is told."""
    _logger.warning("a request has no answer: %s", NotFiniteError.REASON)
    return RequestError(500, NotFiniteError.REASON)


def _shape(batch: Batch) -> Hashable:
    """Returns what the program of a batch depends on, besides pruner and sampling."""
    leaves, structure = jax.tree.flatten((batch.tokens, batch.texts))
    return batch.plan, structure, tuple((leaf.shape, leaf.dtype.name) for leaf in leaves)
