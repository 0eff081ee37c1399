"""The measurement of `tools.bench.serving`, with prepared answers and a fake clock."""

import asyncio
import json
import math
from types import SimpleNamespace

import pytest
from servers import run_server
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tools.bench import serving as bench
from tools.bench.serving import MODES, measure_load

VLLM, SERVER = MODES[:2]
ROLE, TOKEN = {"role": "assistant", "content": ""}, {"content": "red"}


def answer(*deltas, **usage):
    """Returns the streamed response of an answer."""
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    events += [{"choices": [], "usage": usage}] if usage else []
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return Response("".join([*lines, "data: [DONE]\n\n"]), media_type="text/event-stream")


def measure(mode, answers, monkeypatch=None, clock=()):
    """Measures a server that sends the answers in turn to one client."""
    answers, bodies = list(answers), []

    async def chat(request):
        bodies.append(await request.json())
        return answers[len(bodies) - 1]

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    if monkeypatch:
        fake_time = SimpleNamespace(perf_counter=iter(clock).__next__)
        monkeypatch.setattr(bench, "time", fake_time)
    with run_server(app) as address:
        measurements = asyncio.run(
            measure_load(address, "tiny", mode, clients=1, requests=len(answers), tokens=3, seed=0)
        )
    return measurements, bodies


def test_the_first_token_is_timed_from_the_request(monkeypatch):
    answers = [answer(TOKEN, TOKEN, visual_tokens_kept=kept) for kept in (9, 9, 6)]
    # The clock at the start, at each of three requests and its first token, and at the end.
    clock = [0, *(0, 2), *(10, 13), *(20, 25), 40]
    measurements, bodies = measure(SERVER, answers, monkeypatch, clock)
    assert measurements == pytest.approx((3 / 40, 3, 3 + 0.98 * 2, 8))
    assert [body["max_tokens"] for body in bodies] == [3] * 3
    images = {body["messages"][0]["content"][1]["image_url"]["url"] for body in bodies}
    assert len(images) == 3 and {body["pruner"] for body in bodies} == {"all"}


def test_an_event_with_only_the_role_is_no_token():
    measurements, _ = measure(VLLM, [answer(ROLE, TOKEN, prompt_tokens=5)])
    assert measurements.median > 0 and math.isnan(measurements.kept)
    with pytest.raises(RuntimeError, match="an answer was cut off"):
        measure(VLLM, [answer(ROLE, prompt_tokens=5)])
    measure(SERVER, [answer(ROLE | TOKEN, visual_tokens_kept=9)])


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (answer(TOKEN), "an answer was cut off"),
        (JSONResponse({"error": "the engine is away"}, 503), "the engine is away"),
    ],
)
def test_an_incomplete_answer_is_an_error(response, message):
    with pytest.raises(RuntimeError, match=message):
        measure(SERVER, [response])
