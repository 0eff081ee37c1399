"""One worker thread that runs requests in batches, and the server's metrics."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, disable_created_metrics

from stepprune_jax.policy.buckets import power_of_two

T = TypeVar("T")
_logger = logging.getLogger(__name__)

# Otherwise each metric has a second metric: the time at which the first one was created.
disable_created_metrics()


class Metrics:
    """Counters and gauges of a running server, for Prometheus. Thread-safe.

    Names of metrics begin with "stepprune_".
    """

    def __init__(self):
        self.registry = CollectorRegistry()
        options = {"namespace": "stepprune", "registry": self.registry}
        text = "answers by HTTP status; 499: the client went away"
        self.requests = Counter("requests_total", text, ["status"], **options)
        self.in_flight = Gauge("in_flight", "requests that are being read or answered", **options)
        self.queue = Gauge("queue", "requests that wait for the worker", **options)
        self.batch_rows = Summary("batch_rows", "requests in a batch of the worker", **options)
        self.batch_seconds = Summary("batch_seconds", "seconds of a batch", **options)
        self.visual_tokens = Counter("visual_tokens_total", "visual tokens of images", **options)
        text = "visual tokens that remained after pruning"
        self.visual_tokens_kept = Counter("visual_tokens_kept_total", text, **options)
        text = "seconds from a request to the first token of its answer"
        self.first_token_seconds = Summary("first_token_seconds", text, **options)
        text = "seconds from a request to the end of its answer"
        self.request_seconds = Summary("request_seconds", text, **options)


class AnswerStart(NamedTuple):
    """The first event of an answer.

    Attributes:
        prompt_tokens: length of the row that enters the language model.
        visual_tokens: number of visual tokens of the images, before pruning.
        kept: number of visual tokens that remain after pruning.
    """

    prompt_tokens: int
    visual_tokens: int
    kept: int


class AnswerTokens(NamedTuple):
    """New tokens of an answer.

    Attributes:
        ids: token ids.
        finish: None, unless the answer ends with these tokens. Then "stop" after an end-of-sequence
            token and "length" at the length limit.
    """

    ids: tuple[int, ...]
    finish: str | None = None


def pad_requests(requests: Sequence[T]) -> list[T]:
    """Repeats the first request up to a power of two, which bounds the number of programs."""
    return [*requests, *[requests[0]] * (power_of_two(len(requests)) - len(requests))]


class Job:
    """A request in the worker's queue, with the events that the worker reports.

    Attributes:
        chat: the request.
        key: jobs with equal keys may share a batch; None for a job that runs by itself.
        is_abandoned: whether the client went away.
        queue_time: when the job joined the queue, by `time.monotonic`.
        events: reported events, until `Batcher.events` reads them.
    """

    def __init__(self, chat: Any, key: Hashable):
        """Creates the job; must be called on the event loop."""
        self.chat, self.key, self.is_abandoned = chat, key, False
        self.queue_time = time.monotonic()
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, event: Any) -> None:
        """Reports an event, an error, or the end of the answer (None); called by the worker."""
        with contextlib.suppress(RuntimeError):  # The server has ended, and its loop with it.
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)


class Batcher:
    """Runs jobs in one thread, the only thread that uses the devices.

    A batch waits a moment for further jobs with its key, or until the running batch ends. The queue
    has no limit: `ChatApp` limits the number of requests.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Job]], None],
        key: Callable[[Any], Hashable],
        *,
        max_batch: int,
        max_wait: float,
        metrics: Metrics,
    ):
        """Starts the thread.

        Args:
            run: runs jobs with equal keys and reports their events.
            key: returns the key of a request.
            max_batch: largest number of jobs in a batch.
            max_wait: seconds that an idle worker waits for a batch to fill.
            metrics: counts the batches.
        """
        self._run, self._key = run, key
        self._max_batch, self._max_wait, self._metrics = max_batch, max_wait, metrics
        self._is_open = True
        self._queue: list[Job] = []
        self._queue_changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="stepprune-worker", daemon=True)
        self._thread.start()

    @property
    def queue_length(self) -> int:
        """Number of jobs that wait for the worker."""
        return len(self._queue)

    def close(self) -> None:
        """Waits for the running batch and ends the thread."""
        with self._queue_changed:
            self._is_open = False
            self._queue_changed.notify()
        self._thread.join()

    async def events(self, chat: Any) -> AsyncIterator[Any]:
        """Yields the events of a request. Closing the iterator cancels the request."""
        job = Job(chat, self._key(chat))
        with self._queue_changed:
            self._queue.append(job)
            self._queue_changed.notify()
        try:
            while (event := await job.events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            job.is_abandoned = True

    def _next_batch(self) -> list[Job]:
        """Waits for the next batch; returns an empty list once the batcher is closed."""
        with self._queue_changed:
            while self._is_open:
                self._queue = [job for job in self._queue if not job.is_abandoned]
                seconds = None
                if self._queue:
                    first = self._queue[0]
                    batch = [job for job in self._queue if job.key == first.key][: self._max_batch]
                    batch = [first] if first.key is None else batch
                    seconds = first.queue_time + self._max_wait - time.monotonic()
                    if first.key is None or len(batch) == self._max_batch or seconds <= 0:
                        self._queue = [job for job in self._queue if job not in batch]
                        return batch
                self._queue_changed.wait(seconds)
        return []

    def _work(self) -> None:
        """Runs batches until the batcher is closed."""
        while batch := self._next_batch():
            start_time, final_event = time.perf_counter(), None
            try:
                self._run(batch)
            except Exception as error:
                _logger.exception("the worker failed")
                final_event = error
            # Counted before the final events: a client with an answer sees its batch counted.
            self._metrics.batch_rows.observe(len(batch))
            self._metrics.batch_seconds.observe(time.perf_counter() - start_time)
            for job in batch:
                job.put(final_event)
