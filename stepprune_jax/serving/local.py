"""Answers without an engine, by the library's own `Generator`: any method, on any machine.

A batch is answered to its end before the next one starts, so this serves a few users.
"""

import dataclasses
import logging
from collections.abc import AsyncIterator, Hashable, Sequence

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.inference.base import Begun
from stepprune_jax.inference.decoding import NotFiniteError
from stepprune_jax.inference.generate import Generator
from stepprune_jax.inference.request import join_requests
from stepprune_jax.serving.batching import Batcher, Job, Started, Tokens, padded
from stepprune_jax.serving.errors import RequestError
from stepprune_jax.serving.messages import Chat
from stepprune_jax.serving.metrics import Metrics

_logger = logging.getLogger(__name__)


class Local:
    """Answers with the whole model in this process."""

    def __init__(
        self, model: VLM, metrics: Metrics, *, batch_size: int = 8, batch_seconds: float = 0.005
    ):
        """Starts the worker; arguments are those of `engine.Engine`."""
        self._model = model
        self.batcher = Batcher(self._run, self._key, batch_size, batch_seconds, metrics)

    async def close(self) -> None:
        """Has nothing to end."""

    async def check(self) -> None:
        """Can always answer."""

    async def answer(self, chat: Chat) -> AsyncIterator[Started | Tokens]:
        """Yields the events of an answer; closing the iterator ends the work on it."""
        async for event in self.batcher.events(chat):
            yield event

    def _longest(self, chat: Chat) -> int:
        """Returns the longest answer of the program: a power of two, to bound their number."""
        most = 1 << (chat.options.max_tokens - 1).bit_length()
        return min(most, self._model.config.text.max_positions)

    def _key(self, chat: Chat) -> Hashable:
        """A request that draws its answer runs alone: draws depend on the row of a batch."""
        if chat.sampling.temperature:
            return None
        return id(chat.pruner), chat.sampling, chat.options.positions, self._longest(chat)

    def _run(self, jobs: Sequence[Job]) -> None:
        """Reports each token of each job when it is drawn, or that its logits are not finite."""
        chat, stops = jobs[0].chat, self._model.config.eos_token_ids
        remaining = [job.chat.options.max_tokens for job in jobs]

        def start(begun: Begun) -> None:
            length = begun.trace.stages[0].length.tolist()
            counts = zip(length, begun.visual_tokens.tolist(), begun.kept.tolist(), strict=True)
            for job, numbers in zip(jobs, counts, strict=False):
                job.put(Started(*numbers))

        request = join_requests([chat.request for chat in padded([job.chat for job in jobs])])
        options = dataclasses.replace(chat.options, max_tokens=self._longest(chat))
        generator = Generator(self._model, chat.pruner, chat.sampling, options)
        try:
            for row, token, _ in generator.stream(request, start):
                if row < len(jobs) and remaining[row]:  # otherwise the row is padding, or has ended
                    remaining[row] -= 1
                    finish = "stop" if token in stops else None if remaining[row] else "length"
                    remaining[row] = 0 if finish else remaining[row]
                    jobs[row].put(Tokens((token,), finish))
                if all(job.gone or not count for job, count in zip(jobs, remaining, strict=True)):
                    break  # nobody waits for more
        except NotFiniteError as error:
            for row in error.numbers:
                if row < len(jobs) and remaining[row]:
                    _logger.warning("a request has no answer: %s", error.REASON)
                    jobs[row].put(RequestError(500, error.REASON))
