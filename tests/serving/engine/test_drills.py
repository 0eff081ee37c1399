"""What may happen to a service: vLLM is killed, clients vanish, too many of them come.

No test measures time: each waits for what it expects, for as long as a busy machine needs.
"""

import asyncio
import collections
import math
import threading
from pathlib import Path

import httpx2
import jax.numpy as jnp
import openai
import pytest
from servers import (
    PATIENCE,
    ask,
    openai_client,
    send_chat,
    serve_with_engine,
    user_message,
    wait_until,
)
from visual import noise

from stepprune_jax.checkpoints.load import load_vlm
from tools.bench.serving import MODES, measure_load

MOST, LONG, CROWD = 64, 1500, 2_000
# Requests pass tower and policy one by one, so that one program of each is compiled.
ONE_BY_ONE = {"batch_size": 1}
ENDLESS = {"2": -100}  # a bias against the token that ends an answer


@pytest.fixture(scope="module")
def model(wide_llava):
    return load_vlm(wide_llava, dtype=jnp.float32, progress=False)


def figure(engine, *names):
    """The sum of some of vLLM's figures."""
    lines = httpx2.get(f"{engine.address}/metrics", timeout=PATIENCE).text.splitlines()
    names = tuple(f"vllm:{name}{{" for name in names)
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))


def running(engine):
    return figure(engine, "num_requests_running", "num_requests_waiting")


def test_an_engine_that_is_killed_and_started_again(model, wide_llava, start):
    """Every request that was accepted ends: with its whole answer, or with an error."""
    engine, outcomes = start(wide_llava), collections.Counter()

    def stream(number):
        try:
            how = {"stream": True, "logit_bias": ENDLESS}
            chunks = list(ask(client, "red dog?", [noise(number)], LONG, **how))
            outcomes["whole" if chunks[-1].choices[0].finish_reason else "cut"] += 1
        except openai.APIError as error:
            outcomes[type(error).__name__] += 1

    front = serve_with_engine(engine.address, model, batching=ONE_BY_ONE)
    with front as address, openai_client(address) as client:
        ask(client, "two", [noise(0)], 2)
        threads = [threading.Thread(target=stream, args=(number,)) for number in range(24)]
        [thread.start() for thread in threads]
        wait_until(lambda: running(engine) > 0)
        engine.kill()
        [thread.join(PATIENCE) for thread in threads]
        assert not any(thread.is_alive() for thread in threads)
        assert outcomes.total() == 24 and "cut" not in outcomes
        assert outcomes.total() > outcomes["whole"]
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client, "two", [noise(1)], 2)
        assert caught.value.status_code == 503
        assert start(wide_llava).address == engine.address
        assert len(ask(client, "two", [noise(1)], 2).choices[0].token_ids) == 2


@pytest.mark.parametrize("stream", [True, False])
def test_vllm_stops_what_nobody_waits_for(model, wide_llava, start, stream):
    engine, clients = start(wide_llava), 16
    body = {"model": "tiny", "messages": [user_message("two", noise(1))], "max_tokens": LONG}
    body |= {"stream": stream, "logit_bias": ENDLESS}

    def generated():
        return figure(engine, "generation_tokens_total")

    front = serve_with_engine(engine.address, model, batching=ONE_BY_ONE)
    with front as address, openai_client(address) as client:
        ask(client, "two", [noise(1)], 2)
        before = generated()
        connections = [send_chat(address, body) for _ in range(clients)]
        wait_until(lambda: running(engine) == clients)
        if stream:
            [connection.getresponse().readline() for connection in connections]
        [connection.close() for connection in connections]
        left = clients * LONG - (generated() - before)
        wait_until(lambda: running(engine) == 0)
        assert clients * LONG - (generated() - before) > left / 2


def test_thousands_of_requests_at_once(model, wide_llava, start):
    """All are answered, most of them with 429, in bounded memory; afterwards all is as before."""
    engine = start(wide_llava)
    body = {"model": "tiny", "messages": [user_message("two", noise(1))], "max_tokens": 8}

    async def crowd(address):
        limits = httpx2.Limits(max_connections=500)
        statuses, memory = collections.Counter(), []
        async with httpx2.AsyncClient(base_url=address, timeout=None, limits=limits) as client:

            async def post():
                answer = await client.post("/v1/chat/completions", json=body)
                statuses[answer.status_code] += 1
                memory.append(resident())

            await asyncio.gather(*(post() for _ in range(CROWD)))
        return statuses, max(memory)

    front = serve_with_engine(engine.address, model, max_in_flight=MOST, batching=ONE_BY_ONE)
    with front as address, openai_client(address) as client:
        ask(client, "two", [noise(1)], 2)
        before = resident()
        statuses, most = asyncio.run(crowd(address))
        assert set(statuses) == {200, 429} and statuses.total() == CROWD
        assert statuses[200] >= MOST
        assert most - before < 1 << 30, (before, most)  # the clients' share included
        metrics = f"{address}/metrics"
        wait_until(
            lambda: "stepprune_in_flight 0.0\n" in httpx2.get(metrics, timeout=PATIENCE).text
        )
        assert len(ask(client, "two", [noise(1)], 2).choices[0].token_ids) == 2


def test_a_load_reads_the_answers_of_vllm_and_of_the_front(model, wide_llava, start):
    """The figures of a load are those of `tests/tools/test_serving_benchmark.py`."""
    engine = start(wide_llava)
    sizes = {"clients": 4, "requests": 8, "tokens": 3, "seed": 0}
    with serve_with_engine(engine.address, model, batching=ONE_BY_ONE) as address:
        alone = asyncio.run(measure_load(engine.address, engine.name, MODES[0], **sizes))
        behind = asyncio.run(measure_load(address, "tiny", MODES[1], **sizes))
    assert math.isnan(alone.kept) and behind.kept == 9


def resident():
    """Bytes of memory of this process, in which the front runs."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
