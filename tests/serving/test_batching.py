"""The worker thread: which requests share a batch, and where errors and cancellations go."""

import asyncio
import threading

import pytest

from stepprune_jax.serving import batching
from stepprune_jax.serving.batching import Batcher, Metrics, pad_requests


class Worker:
    """Records the batches. They wait until `may_run` is set."""

    def __init__(self):
        self.batches, self.may_run, self.metrics = [], threading.Event(), Metrics()
        self.may_run.set()
        self.is_running = threading.Event()
        self.batcher = Batcher(self.run, self.key, max_batch=3, max_wait=0.0, metrics=self.metrics)

    def key(self, chat):
        return None if chat == "alone" else chat[0]

    def run(self, jobs):
        self.is_running.set()
        self.may_run.wait()
        self.batches.append([job.chat for job in jobs])
        for job in jobs:
            if job.chat == "bad":
                raise ArithmeticError(job.chat)
            job.put(job.chat.upper())

    async def ask(self, chat):
        return [event async for event in self.batcher.events(chat)]


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.may_run.set()
    worker.batcher.close()


def ask_while_busy(worker, *chats):
    """Sends requests while another request runs, so they all wait in the queue."""

    async def run():
        worker.may_run.clear()
        worker.is_running.clear()
        busy = asyncio.ensure_future(worker.ask("busy"))
        while not worker.is_running.is_set():
            await asyncio.sleep(0.001)
        tasks = [asyncio.ensure_future(worker.ask(chat)) for chat in chats]
        while worker.batcher.queue_length < len(chats):
            await asyncio.sleep(0.001)
        worker.may_run.set()
        await busy
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(run())


def test_requests_with_one_key_share_batches_up_to_the_limit(worker):
    chats = ["a1", "c1", "a2", "alone", "a3", "a4", "alone"]
    assert ask_while_busy(worker, *chats) == [[chat.upper()] for chat in chats]
    expected = [["busy"], ["a1", "a2", "a3"], ["c1"], ["alone"], ["a4"], ["alone"]]
    assert worker.batches == expected
    metric = worker.metrics.registry.get_sample_value
    assert metric("stepprune_batch_rows_sum") == 8 and metric("stepprune_batch_rows_count") == 6


def test_an_error_reaches_only_the_requests_of_its_batch(worker, caplog):
    first, second, third = ask_while_busy(worker, "b1", "bad", "c1")
    assert isinstance(first, ArithmeticError) and isinstance(second, ArithmeticError)
    assert third == ["C1"]


def test_a_cancelled_request_is_not_run(worker):
    async def run():
        worker.may_run.clear()
        tasks = [asyncio.ensure_future(worker.ask(chat)) for chat in ("x1", "y1", "z1")]
        await asyncio.sleep(0.02)
        tasks[1].cancel()
        await asyncio.sleep(0)
        worker.may_run.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(run())
    assert results[0] == ["X1"] and isinstance(results[1], asyncio.CancelledError)
    assert worker.batches == [["x1"], ["z1"]]


def test_closing_waits_only_briefly_for_a_batch_that_compiles(worker, monkeypatch):
    monkeypatch.setattr(batching, "_CLOSE_SECONDS", 0.1)

    async def run():
        worker.may_run.clear()
        busy = asyncio.ensure_future(worker.ask("busy"))
        while not worker.is_running.is_set():
            await asyncio.sleep(0.001)
        worker.batcher.close()
        assert batching.has_worker()
        worker.may_run.set()
        await busy

    asyncio.run(run())


def test_batches_are_padded_to_powers_of_two():
    assert {len(pad_requests(["a"] * count)) for count in range(1, 9)} == {1, 2, 4, 8}
    assert pad_requests(["a", "b", "c"]) == ["a", "b", "c", "a"]
