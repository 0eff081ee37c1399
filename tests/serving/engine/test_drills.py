"""What may happen to a service: vLLM is killed, clients vanish, too many of them come."""

import asyncio
import collections
import concurrent.futures
import contextlib
import threading
import time
from pathlib import Path

import httpx2
import jax.numpy as jnp
import openai
import pytest
from servers import ask, front_before, opened, until, user
from visual import noise

from stepprune_jax.checkpoints.load import load_vlm
from tools.bench.serving import WAYS, load
from tools.bench.vllm_server import Vllm, free_port

MOST, LONG = 64, 1500
FLAGS = ("--dtype", "float32")


@pytest.fixture(scope="module")
def model(wide_llava):
    return load_vlm(wide_llava, dtype=jnp.float32, progress=False)


def figure(engine, *names):
    """The sum of some of vLLM's figures."""
    lines = httpx2.get(f"{engine.address}/metrics").text.splitlines()
    names = tuple(f"vllm:{name}{{" for name in names)
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))


def running(engine):
    return figure(engine, "num_requests_running", "num_requests_waiting")


def test_an_engine_that_is_killed_and_started_again(model, wide_llava, tmp_path):
    """Every request that was accepted ends: with its whole answer, or with an error."""
    port = free_port()
    engine = Vllm(wide_llava, tmp_path / "log", *FLAGS, port=port).wait()
    outcomes = collections.Counter()

    def stream(number):
        try:
            chunks = list(ask(client, "red dog?", [noise(number)], 180, stream=True))
            outcomes["whole" if chunks[-1].choices[0].finish_reason else "cut"] += 1
        except openai.APIError as error:
            outcomes[type(error).__name__] += 1

    try:
        with front_before(engine.address, model) as address, opened(address) as client:
            ask(client, "two", [noise(0)], 2)
            threads = [threading.Thread(target=stream, args=(number,)) for number in range(24)]
            [thread.start() for thread in threads]
            until(lambda: running(engine) > 0, 60)
            engine.kill()
            [thread.join(30) for thread in threads]
            assert not any(thread.is_alive() for thread in threads)
            assert outcomes.total() == 24 and "cut" not in outcomes
            assert outcomes.total() > outcomes["whole"]
            with pytest.raises(openai.APIStatusError) as caught:
                ask(client, "two", [noise(1)], 2)
            assert caught.value.status_code == 503
            engine = Vllm(wide_llava, tmp_path / "log", *FLAGS, port=port).wait()
            assert len(ask(client, "two", [noise(1)], 2).choices[0].token_ids) == 2
    finally:
        engine.kill()


@pytest.mark.parametrize("stream", [True, False])
def test_vllm_stops_what_nobody_waits_for(model, wide_llava, start, stream):
    engine = start(wide_llava)
    body = {"model": "tiny", "messages": [user("two", noise(1))], "max_tokens": LONG}
    body["stream"] = stream

    def vanish(number):
        with (
            contextlib.suppress(httpx2.ReadTimeout),
            httpx2.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=0.5) as one,
        ):
            next(one.iter_lines())

    with front_before(engine.address, model) as address, opened(address) as client:
        ask(client, "two", [noise(1)], 2)
        before = figure(engine, "generation_tokens_total")
        with concurrent.futures.ThreadPoolExecutor(16) as threads:
            list(threads.map(vanish, range(16)))
        until(lambda: running(engine) == 0, 20)
        assert figure(engine, "generation_tokens_total") - before < 16 * LONG / 2


def test_ten_thousand_requests_at_once(model, wide_llava, start):
    """All are answered, most of them with 429, in bounded memory; afterwards all is as before."""
    engine = start(wide_llava)
    body = {"model": "tiny", "messages": [user("two", noise(1))], "max_tokens": 8}

    async def crowd(address):
        limits = httpx2.Limits(max_connections=500)
        found, memory = collections.Counter(), []
        async with httpx2.AsyncClient(base_url=address, timeout=300, limits=limits) as client:

            async def post():
                answer = await client.post("/v1/chat/completions", json=body)
                found[answer.status_code] += 1
                memory.append(resident())

            await asyncio.gather(*(post() for _ in range(10_000)))
        return found, max(memory)

    with front_before(engine.address, model, MOST) as address, opened(address) as client:
        ask(client, "two", [noise(1)], 2)
        begin, before = time.monotonic(), resident()
        found, most = asyncio.run(crowd(address))
        assert set(found) == {200, 429} and found.total() == 10_000
        assert found[200] >= MOST
        assert most - before < 1 << 30, (before, most)  # the clients' share included
        assert time.monotonic() - begin < 240
        until(lambda: "stepprune_in_flight 0\n" in httpx2.get(f"{address}/metrics").text)
        assert len(ask(client, "two", [noise(1)], 2).choices[0].token_ids) == 2


def test_a_short_load(model, wide_llava, start):
    """The measurement of `tools.bench.serving`, on a tiny model."""
    engine = start(wide_llava)
    with front_before(engine.address, model) as address:
        alone, behind = (
            asyncio.run(load(*place, way, 4, 8, 3, 0))
            for place, way in (
                ((engine.address, engine.name), WAYS[0]),
                ((address, "tiny"), WAYS[1]),
            )
        )
    assert min(alone.rate, behind.rate) > 0 and behind.kept == 9
    assert 0 < behind.median <= behind.late and 0 < alone.median <= alone.late


def resident():
    """Bytes of memory of this process, in which the front runs."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
