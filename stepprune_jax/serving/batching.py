"""A worker thread that runs requests in batches, and the server's metrics."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Summary,
    disable_created_metrics,
)

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.inference.generate import list_grids, list_kept_indices
from stepprune_jax.inference.plan import num_padded_tokens
from stepprune_jax.inference.request import Request
from stepprune_jax.policy.buckets import power_of_two

T = TypeVar("T")
_logger = logging.getLogger(__name__)

# Upper bounds of histogram buckets in seconds: from a small model on a GPU to a queue that is full.
_SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
# Upper bounds of histogram buckets of visual tokens: from one token to several large images.
_TOKENS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384)

# Seconds that a server which ends waits for the running batch. A batch may compile for minutes.
_CLOSE_SECONDS = 5.0
_WORKER_NAME = "stepprune-worker"

# Otherwise each metric has a companion metric with its creation time, which nobody needs.
disable_created_metrics()


class Metrics:
    """Counters and gauges of a running server, for Prometheus. Thread-safe.

    Names of metrics begin with "stepprune_".
    """

    def __init__(self):
        self.registry = CollectorRegistry()
        options = {"namespace": "stepprune", "registry": self.registry}
        help_text = "answers by HTTP status; 499: the client went away"
        self.requests = Counter("requests_total", help_text, ["status"], **options)
        self.in_flight = Gauge("in_flight", "requests that are being read or answered", **options)
        self.queue = Gauge("queue", "requests that wait for the worker", **options)
        self.batch_rows = Summary("batch_rows", "requests in a batch of the worker", **options)
        self.batch_seconds = Summary("batch_seconds", "seconds of a batch", **options)
        self.visual_tokens = Counter("visual_tokens_total", "visual tokens of images", **options)
        help_text = "visual tokens that remained after pruning"
        self.visual_tokens_kept = Counter("visual_tokens_kept_total", help_text, **options)
        help_text = "visual tokens that remained of a request with images"
        self.kept_tokens = Histogram("kept_tokens", help_text, buckets=_TOKENS_BUCKETS, **options)
        seconds = {"buckets": _SECONDS_BUCKETS, **options}
        help_text = "seconds from a request to the first token of its answer"
        self.first_token_seconds = Histogram("first_token_seconds", help_text, **seconds)
        help_text = "seconds from a request to the end of its answer"
        self.request_seconds = Histogram("request_seconds", help_text, **seconds)


class KeptTokens(NamedTuple):
    """The visual tokens of one image or video that remain after pruning. Made by `list_kept`.

    Attributes:
        grid: rows and columns of the image's tokens before pruning; for a video, the number of its
            temporal patches, and rows and columns of each of them.
        indices: indices of the kept tokens among the tokens of the image, in the order of selection
            for a method with an order, otherwise in the order of the row; -1 for a merged token.
    """

    grid: tuple[int, ...]
    indices: tuple[int, ...]


class AnswerStart(NamedTuple):
    """The first event of an answer: token counts of the request. Made by the backends.

    Attributes:
        prompt_tokens: number of tokens that enter the language model: text and kept visual tokens.
        visual_tokens: number of visual tokens of the images, before pruning.
        kept: number of visual tokens that remain after pruning.
        images: the kept tokens of each image.
    """

    prompt_tokens: int
    visual_tokens: int
    kept: int
    images: tuple[KeptTokens, ...] = ()


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position of an answer. Made by `EngineBackend`.

    Attributes:
        token: text of the sampled token.
        logprob: log-probability of the sampled token.
        top: texts and log-probabilities of the most probable tokens, the most probable first.
    """

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]


class AnswerTokens(NamedTuple):
    """An event with new tokens of an answer. Made by the backends.

    Attributes:
        ids: the new token ids.
        finish: why the answer ends with these tokens: "stop" for an end-of-sequence token or a stop
            text, "length" for the length limit. None if the answer continues.
        choice: number of the answer, from 0, if a request asks for several answers.
        logprobs: log-probabilities of the new tokens; empty unless the request asks for them.
    """

    ids: tuple[int, ...]
    finish: str | None = None
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


def list_kept(
    request: Request,
    index: Int[np.ndarray, "b s"],
    image: Int[np.ndarray, "b s"],
    order: Int[np.ndarray, "b j t"] | None,
) -> list[tuple[KeptTokens, ...]]:
    """Lists the kept tokens of each image of each row of a batch.

    Args:
        request: the joint request of the batch.
        index: [b, s] index of each visual token in its image, as in `Sequence`.
        image: [b, s] number of each token's image in its row; -1 for text and padding.
        order: [b, j, t] indices of the tokens of each image in the order of selection; None for a
            method without an order.
    """
    kept = []
    for row, images_of_row in enumerate(request.image_of):
        grids = list_grids(request.images, images_of_row)
        order_of_row = None if order is None else order[row]
        indices = list_kept_indices(index[row], image[row], order_of_row, len(images_of_row))
        kept.append(tuple(map(KeptTokens, grids, indices)))
    return kept


def shape_key(model: VLM, request: Request) -> Hashable:
    """Returns a key that is equal for requests with images and videos of shared programs.

    Only requests with equally many images and videos share a batch, and a request with videos only
    requests with videos of the same padded length. This bounds the number of programs, and a long
    video does not fill the rows of short ones with padding.
    """
    images, num_images = request.images, len(request.image_of[0])
    if images is None or images.clips is None:
        return num_images, 0
    return num_images, num_padded_tokens(model, images)


def pad_requests(requests: Sequence[T]) -> list[T]:
    """Pads a batch to a power of two with copies of the first request.

    Each batch size is a program, so padding bounds the number of programs.
    """
    num_copies = power_of_two(len(requests)) - len(requests)
    return [*requests, *[requests[0]] * num_copies]


def has_worker() -> bool:
    """Returns whether the thread of a `Batcher` is alive, as while it compiles a program."""
    return any(thread.name == _WORKER_NAME for thread in threading.enumerate())


class Job:
    """A request in the worker's queue, with the events that the worker reports.

    Attributes:
        chat: the request.
        key: jobs with equal keys may share a batch; None for a job that runs by itself.
        is_abandoned: whether the client no longer waits for the answer.
        queue_time: time at which the job joined the queue, by `time.monotonic`.
        events: events that the worker has reported and `Batcher.events` has not yet read.
    """

    def __init__(self, chat: Any, key: Hashable):
        """Creates the job; must be called on the event loop."""
        self.chat, self.key, self.is_abandoned = chat, key, False
        self.queue_time = time.monotonic()
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, event: Any) -> None:
        """Reports an event to the event loop. Called in the worker's thread.

        Args:
            event: an event of the answer, an exception, or None at the end of the answer.
        """
        with contextlib.suppress(RuntimeError):  # The server has ended and closed the event loop.
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)


class Batcher:
    """Runs jobs in batches, in one thread. No other thread of the server uses the devices.

    An idle worker waits up to `max_wait` seconds for a batch to fill. While a batch runs, new jobs
    queue up. The queue has no limit, because `ChatApp` limits the number of requests.
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
            run: runs a batch of jobs with equal keys and reports their events with `Job.put`.
            key: returns the key of a request. Requests with equal keys may share a batch.
            max_batch: largest number of jobs in a batch.
            max_wait: longest time in seconds that an idle worker waits for a batch to fill.
            metrics: records size and time of each batch.
        """
        self._run, self._key = run, key
        self._max_batch, self._max_wait, self._metrics = max_batch, max_wait, metrics
        self._is_open = True
        self._queue: list[Job] = []
        self._queue_changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=_WORKER_NAME, daemon=True)
        self._thread.start()

    @property
    def queue_length(self) -> int:
        """Number of jobs that wait for the worker."""
        return len(self._queue)

    def close(self) -> None:
        """Ends the thread after the running batch. Waits for it at most `_CLOSE_SECONDS`."""
        with self._queue_changed:
            self._is_open = False
            self._queue_changed.notify()
        self._thread.join(_CLOSE_SECONDS)

    async def events(self, chat: Any) -> AsyncGenerator[Any]:
        """Queues a request and yields its events. Closing the iterator cancels the request.

        Args:
            chat: the request; `key` and `run` of the batcher define its type.

        Raises:
            Exception: the worker reported an exception for this request.
        """
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
        """Waits until a batch is full or its oldest job has waited `max_wait` seconds.

        Returns:
            The oldest job and jobs with the same key, removed from the queue. An empty list once
            the batcher is closed.
        """
        with self._queue_changed:
            while self._is_open:
                self._queue = [job for job in self._queue if not job.is_abandoned]
                seconds_left = None  # An empty queue waits without a time limit.
                if self._queue:
                    oldest_job = self._queue[0]
                    key, batch = oldest_job.key, [oldest_job]
                    if key is not None:
                        batch = [job for job in self._queue if job.key == key][: self._max_batch]
                    is_full = key is None or len(batch) == self._max_batch
                    seconds_left = oldest_job.queue_time + self._max_wait - time.monotonic()
                    if is_full or seconds_left <= 0:
                        self._queue = [job for job in self._queue if job not in batch]
                        return batch
                self._queue_changed.wait(seconds_left)
        return []

    def _work(self) -> None:
        """Runs batches until the batcher is closed. The main function of the worker's thread."""
        while batch := self._next_batch():
            start_time, final_event = time.perf_counter(), None
            try:
                self._run(batch)
            except Exception as error:
                _logger.exception("the worker failed")
                final_event = error
            # Metrics come before the final events, so they include every answer that has ended.
            self._metrics.batch_rows.observe(len(batch))
            self._metrics.batch_seconds.observe(time.perf_counter() - start_time)
            for job in batch:
                job.put(final_event)
