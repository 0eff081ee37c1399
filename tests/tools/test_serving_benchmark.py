"""The measurement of `tools.bench.serving`: prepared answers, and a clock that the test sets."""

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
from tools.bench.serving import MODES, load

VLLM, FRONT = MODES[:2]
ROLE, TOKEN = {"role": "assistant", "content": ""}, {"content": "red"}


def answer(*deltas, **usage):
    """The stream of an answer with its usage."""
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    events += [{"choices": [], "usage": usage}] if usage else []
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return Response("".join([*lines, "data: [DONE]\n\n"]), media_type="text/event-stream")


def measure(way, answers, monkeypatch=None, clock=()):
    """Loads a server that gives the answers one after the other, with one client."""
    answers, bodies = list(answers), []

    async def chat(request):
        bodies.append(await request.json())
        return answers[len(bodies) - 1]

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    if monkeypatch:
        set_clock = SimpleNamespace(perf_counter=iter(clock).__next__)
        monkeypatch.setattr(bench, "time", set_clock)
    with run_server(app) as address:
        figures = asyncio.run(load(address, "tiny", way, 1, len(answers), 3, 0))
    return figures, bodies


def test_a_load_is_measured_from_the_question_to_the_first_token(monkeypatch):
    answers = [answer(TOKEN, TOKEN, visual_tokens_kept=kept) for kept in (9, 9, 6)]
    # The load begins; each of three questions is asked and gets its first token; the load ends.
    clock = [0, *(0, 2), *(10, 13), *(20, 25), 40]
    figures, bodies = measure(FRONT, answers, monkeypatch, clock)
    assert figures == pytest.approx((3 / 40, 3, 3 + 0.98 * 2, 8))
    assert [body["max_tokens"] for body in bodies] == [3] * 3
    images = {body["messages"][0]["content"][1]["image_url"]["url"] for body in bodies}
    assert len(images) == 3 and {body["pruner"] for body in bodies} == {"all"}


def test_the_role_that_vllm_sends_first_is_no_token():
    figures, _ = measure(VLLM, [answer(ROLE, TOKEN, prompt_tokens=5)])
    assert figures.median > 0 and math.isnan(figures.kept)
    with pytest.raises(RuntimeError, match="an answer was cut off"):
        measure(VLLM, [answer(ROLE, prompt_tokens=5)])
    measure(FRONT, [answer(ROLE | TOKEN, visual_tokens_kept=9)])


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (answer(TOKEN), "an answer was cut off"),
        (JSONResponse({"error": "the engine is away"}, 503), "the engine is away"),
    ],
)
def test_an_answer_that_is_not_complete_ends_the_load(response, message):
    with pytest.raises(RuntimeError, match=message):
        measure(FRONT, [response])
