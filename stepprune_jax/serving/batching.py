"""One worker thread that runs requests together, a few at a time."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

from stepprune_jax.serving.metrics import Metrics

T = TypeVar("T")
_logger = logging.getLogger(__name__)


class Started(NamedTuple):
    """The first event of an answer.

    Attributes:
        prompt_tokens: length of the row that enters the language model.
        visual_tokens: visual tokens of the images.
        kept: number of these that remain.
    """

    prompt_tokens: int
    visual_tokens: int
    kept: int


class Tokens(NamedTuple):
    """Some tokens of an answer.

    Attributes:
        ids: their ids.
        finish: why these are the last ones, "stop" or "length"; None if they are not.
    """

    ids: tuple[int, ...]
    finish: str | None = None


def padded(chats: Sequence[T]) -> list[T]:
    """Repeats the first request until their number is a power of two, to bound the programs."""
    size = 1 << (len(chats) - 1).bit_length()
    return [*chats, *[chats[0]] * (size - len(chats))]


class Job:
    """A request in the worker's queue, and the events that the worker reports of it.

    Attributes:
        chat: the request.
        key: requests with equal keys may run together; None for one that runs alone.
        gone: whether nobody waits for it any more.
    """

    def __init__(self, chat: Any, key: Hashable):
        """Takes a request; called on the event loop."""
        self.chat, self.key, self.gone = chat, key, False
        self.since = time.monotonic()
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, event: Any) -> None:
        """Reports an event, an error, or the end (None); called by the worker."""
        with contextlib.suppress(RuntimeError):  # the loop has ended with the server
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)


class Batcher:
    """Runs jobs in one thread, which alone uses the devices.

    Those that may run together wait for each other for a moment, and while others run. The number
    of jobs is bounded by whoever accepts them.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Job]], None],
        key: Callable[[Any], Hashable],
        size: int,
        seconds: float,
        metrics: Metrics,
    ):
        """Starts the thread.

        Args:
            run: runs jobs with equal keys, and reports their events.
            key: the key of a request.
            size: most jobs that run together.
            seconds: longest time that a job waits for others while nothing runs.
            metrics: where batches are counted.
        """
        self._run, self._key, self._size, self._seconds = run, key, size, seconds
        self._metrics, self._open = metrics, True
        self._waiting: list[Job] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="stepprune-worker", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of jobs that wait."""
        return len(self._waiting)

    def close(self) -> None:
        """Ends the thread after the batch that it runs."""
        with self._changed:
            self._open = False
            self._changed.notify()
        self._thread.join()

    async def events(self, chat: Any) -> AsyncIterator[Any]:
        """Yields the events of a request; once the iterator is closed its work is dropped."""
        job = Job(chat, self._key(chat))
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()
        try:
            while (event := await job.events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            job.gone = True

    def _next(self) -> list[Job]:
        """Waits for jobs that can run together; none once the batcher is closed."""
        with self._changed:
            while self._open:
                self._waiting = [job for job in self._waiting if not job.gone]
                left = None
                if self._waiting:
                    first = self._waiting[0]
                    alike = [job for job in self._waiting if job.key == first.key][: self._size]
                    alike = [first] if first.key is None else alike
                    left = first.since + self._seconds - time.monotonic()
                    if first.key is None or len(alike) == self._size or left <= 0:
                        self._waiting = [job for job in self._waiting if job not in alike]
                        return alike
                self._changed.wait(left)
        return []

    def _work(self) -> None:
        while batch := self._next():
            begin, end = time.perf_counter(), None
            try:
                self._run(batch)
            except Exception as error:
                _logger.exception("the worker failed")
                end = error
            # Before the ends: who has an answer finds its batch counted.
            self._metrics.batch_rows.observe(len(batch))
            self._metrics.batch_seconds.observe(time.perf_counter() - begin)
            for job in batch:
                job.put(end)
