import asyncio
import threading

import pytest

from stepprune_jax.serving.batching import Batcher, padded
from stepprune_jax.serving.metrics import Metrics


class Worker:
    """Notes what runs together, once it may."""

    def __init__(self):
        self.batches, self.may_run, self.metrics = [], threading.Event(), Metrics()
        self.may_run.set()
        self.is_running = threading.Event()
        self.batcher = Batcher(self.run, self.key, 3, 0.0, self.metrics)

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
    """Asks while another request runs, so that all of them wait together."""

    async def run():
        worker.may_run.clear()
        worker.is_running.clear()
        busy = asyncio.ensure_future(worker.ask("busy"))
        while not worker.is_running.is_set():
            await asyncio.sleep(0.001)
        asked = [asyncio.ensure_future(worker.ask(chat)) for chat in chats]
        while worker.batcher.waiting < len(chats):
            await asyncio.sleep(0.001)
        worker.may_run.set()
        await busy
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(run())


def test_requests_of_one_kind_run_together_up_to_a_size(worker):
    chats = ["a1", "c1", "a2", "alone", "a3", "a4", "alone"]
    assert ask_while_busy(worker, *chats) == [[chat.upper()] for chat in chats]
    expected = [["busy"], ["a1", "a2", "a3"], ["c1"], ["alone"], ["a4"], ["alone"]]
    assert worker.batches == expected
    figure = worker.metrics.registry.get_sample_value
    assert figure("stepprune_batch_rows_sum") == 8 and figure("stepprune_batch_rows_count") == 6


def test_an_error_reaches_all_that_ran_with_it_and_nobody_else(worker, caplog):
    first, second, third = ask_while_busy(worker, "b1", "bad", "c1")
    assert isinstance(first, ArithmeticError) and isinstance(second, ArithmeticError)
    assert third == ["C1"]


def test_what_nobody_waits_for_is_not_run(worker):
    async def run():
        worker.may_run.clear()
        tasks = [asyncio.ensure_future(worker.ask(chat)) for chat in ("x1", "y1", "z1")]
        await asyncio.sleep(0.02)
        tasks[1].cancel()
        await asyncio.sleep(0)
        worker.may_run.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(run())
    assert found[0] == ["X1"] and isinstance(found[1], asyncio.CancelledError)
    assert worker.batches == [["x1"], ["z1"]]


def test_padding_bounds_the_sizes():
    assert {len(padded(["a"] * count)) for count in range(1, 9)} == {1, 2, 4, 8}
    assert padded(["a", "b", "c"]) == ["a", "b", "c", "a"]
