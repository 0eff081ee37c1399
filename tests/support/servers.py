"""Servers on this machine for tests: any application, a fake engine, and requests to them."""

import asyncio
import base64
import contextlib
import http.client
import io
import json
import threading
import time

import openai
import uvicorn
from interfaces import read_record
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from stepprune_jax.cli.serve import KEEP_ALIVE
from stepprune_jax.serving.app import ChatApp
from stepprune_jax.serving.batching import Metrics
from stepprune_jax.serving.engine import EngineBackend
from stepprune_jax.serving.images import RequestLimits
from stepprune_jax.serving.messages import Defaults, RequestParser

# vLLM ignores unknown fields of a request, so the fake engine checks the names.
REQUEST_FIELDS = {*read_record("vllm")["fields"]["completion_request"].split()}
# Seconds before a test counts a wait as a hang: many times the duration on a busy machine.
PATIENCE = 600.0


@contextlib.contextmanager
def run_server(app, port=0):
    """Serves an application in a thread, and yields its address."""
    options = {"log_level": "error", "timeout_graceful_shutdown": 1}
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, timeout_keep_alive=KEEP_ALIVE, **options
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        (listener,) = server.servers[0].sockets
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def data_url(image):
    """Returns the data URL of a Pillow image, as PNG."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def user_message(text, *images):
    """Returns a user's message. Images are Pillow images or URLs."""
    urls = [image if isinstance(image, str) else data_url(image) for image in images]
    image_parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [{"type": "text", "text": text}, *image_parts]}


class FakeEngine:
    """Speaks vLLM's interface without a model. Token ids are 10, 11, 12, ...; 100 more per answer.

    Attributes:
        mode: "well", or a failure: "refuses", "fails", "breaks", "ends", "slow", "endless". "holds"
            sends no tokens while `is_holding` is true.
        name: name of its model.
        requests: the requests, with the embeddings as bytes.
        clients: addresses of the connections that sent the requests.
        num_running: number of answers that are being sent.
        num_cancelled: number of answers whose client went away.
    """

    def __init__(self):
        self.mode, self.name, self.is_holding = "well", "the engine's", False
        self.requests, self.clients = [], set()
        self.num_running = self.num_cancelled = 0

    def app(self):
        return Starlette(
            routes=[
                Route("/health", self._check_health),
                Route("/v1/models", self._list_models),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )

    async def _check_health(self, request):
        return PlainTextResponse("", 200 if self.mode == "well" else 503)

    async def _list_models(self, request):
        return JSONResponse({"data": [{"id": self.name}]})

    async def _complete(self, request):
        fields = await request.json()
        assert fields.keys() <= REQUEST_FIELDS, fields.keys() - REQUEST_FIELDS
        fields["prompt_embeds"] = base64.b64decode(fields["prompt_embeds"])
        self.requests.append(fields)
        self.clients.add(request.client)
        if fields["model"] != self.name:
            return JSONResponse({"error": {"message": "no such model"}}, 404)
        if self.mode == "refuses":
            return JSONResponse({"error": {"message": "the prompt is too long"}}, 400)
        if self.mode == "fails":
            return JSONResponse({"error": {"message": "EngineCore died"}}, 500)
        return StreamingResponse(self._stream_events(fields))

    async def _stream_events(self, fields):
        max_tokens, num_answers = fields["max_tokens"], fields.get("n", 1)
        self.num_running += 1
        try:
            for index in range(max_tokens):
                is_last = index + 1 == max_tokens
                choices = [
                    {"index": number, "text": "?", "token_ids": [10 + 100 * number + index]}
                    for number in range(num_answers)
                ]
                for choice in choices:
                    choice["finish_reason"] = "length" if is_last else None
                    if "logprobs" in fields:
                        lists = {"tokens": ["a"], "token_logprobs": [-2.0]}
                        lists["top_logprobs"] = [{"a": -2.0, "b": -0.5}]
                        choice["logprobs"] = lists
                while self.mode == "holds" and self.is_holding:
                    await asyncio.sleep(0.01)
                if self.mode == "slow" or (self.mode == "endless" and index):
                    await asyncio.sleep(0.05 if self.mode == "endless" else 5)
                if self.mode == "breaks" and index == 2:
                    yield 'data: {"error": {"message": "EngineCore died"}}\n\n'
                    return
                if self.mode == "ends" and index == 2:
                    return
                for choice in choices:
                    yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, ClientDisconnect):
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1


@contextlib.contextmanager
def serve_with_engine(
    engine,
    model,
    *,
    max_in_flight=256,
    limits=None,
    batching=None,
    origins=(),
    app_options=None,
    **defaults,
):
    """Serves a model with the engine at an address, and yields the server's address."""
    metrics = Metrics()
    defaults = Defaults(positions="compact", **defaults)
    parser = RequestParser(model, "tiny", defaults, limits or RequestLimits(), engine=True)
    backend = EngineBackend(model, engine, metrics, **{"seconds": PATIENCE} | (batching or {}))
    app = ChatApp(parser, backend, metrics, max_in_flight, **app_options or {})
    with run_server(app.app(origins)) as address:
        yield address


def openai_client(address):
    """Returns OpenAI's client of a server."""
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def ask(client, question, images, max_tokens, **fields):
    """Asks a question through OpenAI's client. Its `extra_body` gets the fields of pruning."""
    pruning_fields = ("pruner", "budget", "mean_budget")
    pruning = {name: fields.pop(name) for name in pruning_fields if name in fields}
    return client.chat.completions.create(
        model="tiny",
        messages=[user_message(question, *images)],
        max_tokens=max_tokens,
        extra_body={"return_token_ids": True} | pruning,
        **fields,
    )


def send_chat(address, body):
    """Sends a chat request, and returns the connection before the answer is read."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=PATIENCE)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return connection


def wait_until(condition):
    """Waits until a condition holds."""
    end_time = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end_time, "the condition never held"
        time.sleep(0.01)
