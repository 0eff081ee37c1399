"""Servers on this machine for tests: any application, a stand-in for an engine, and requests."""

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
from stepprune_jax.serving.engine import Engine
from stepprune_jax.serving.images import RequestLimits
from stepprune_jax.serving.messages import Defaults, RequestParser
from stepprune_jax.serving.metrics import Metrics


@contextlib.contextmanager
def serving(app, port=0):
    """Serves an application in a thread, and yields its address."""
    how = {"log_level": "error", "timeout_graceful_shutdown": 1, "timeout_keep_alive": KEEP_ALIVE}
    config = uvicorn.Config(app, host="127.0.0.1", port=port, **how)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        (listening,) = server.servers[0].sockets
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def data_url(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def user(text, *images):
    """A user's message; images are Pillow images or URLs."""
    urls = [image if isinstance(image, str) else data_url(image) for image in images]
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [{"type": "text", "text": text}, *shown]}


# vLLM ignores unknown fields of a request.
REQUEST_FIELDS = {*read_record("vllm")["fields"]["completion_request"].split()}
# Seconds before a test takes a wait for a hang: many times what a busy machine needs.
PATIENCE = 600.0


class FakeEngine:
    """What a front needs of vLLM, without a model: token ids count up from the row's length.

    Attributes:
        mode: "well", how it misbehaves, or "holds": it waits with its tokens until `held` is false.
        name: what requests call its model.
        seen: the requests, with the embeddings as bytes.
        clients: the connections that they came by.
        running: answers that are being sent.
        dropped: answers whose client went away.
    """

    def __init__(self, mode="well", tokens=4):
        self.mode, self.tokens, self.seen, self.running, self.dropped = mode, tokens, [], 0, 0
        self.name, self.clients, self.held = "the engine's", set(), False

    def app(self):
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )

    async def _health(self, request):
        return PlainTextResponse("", 200 if self.mode == "well" else 503)

    async def _models(self, request):
        return JSONResponse({"data": [{"id": self.name}]})

    async def _complete(self, request):
        fields = await request.json()
        assert fields.keys() <= REQUEST_FIELDS, fields.keys() - REQUEST_FIELDS
        fields["prompt_embeds"] = base64.b64decode(fields["prompt_embeds"])
        self.seen.append(fields)
        self.clients.add(request.client)
        if fields["model"] != self.name:
            return JSONResponse({"error": {"message": "no such model"}}, 404)
        if self.mode == "refuses":
            error = {"message": "the prompt is too long"}
            return JSONResponse({"error": error}, 400)
        if self.mode == "fails":
            return JSONResponse({"error": {"message": "EngineCore died"}}, 500)
        return StreamingResponse(self._events(fields["max_tokens"]))

    async def _events(self, most):
        self.running += 1
        try:
            for number in range(most):
                last = number + 1 == most
                choice = {"text": "?", "token_ids": [10 + number]}
                choice["finish_reason"] = "length" if last else None
                while self.mode == "holds" and self.held:
                    await asyncio.sleep(0.01)
                if self.mode == "slow" or (self.mode == "endless" and number):
                    await asyncio.sleep(0.05 if self.mode == "endless" else 5)
                if self.mode == "breaks" and number == 2:
                    yield 'data: {"error": {"message": "EngineCore died"}}\n\n'
                    return
                if self.mode == "ends" and number == 2:
                    return
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, ClientDisconnect):
            self.dropped += 1
            raise
        finally:
            self.running -= 1


@contextlib.contextmanager
def front_before(engine, model, most=256, limits=None, batching=None, origins=(), **defaults):
    """Serves a model before an engine, and yields the address."""
    metrics = Metrics()
    defaults = Defaults(positions="compact", **defaults)
    reader = RequestParser(model, "tiny", defaults, limits or RequestLimits(), engine=True)
    backend = Engine(model, engine, metrics, **{"seconds": PATIENCE} | (batching or {}))
    with serving(ChatApp(reader, backend, metrics, most).app(origins)) as address:
        yield address


def opened(address):
    """OpenAI's client of a server."""
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def ask(client, question, images, most, **fields):
    """Asks through OpenAI's client; fields that it does not know are passed on."""
    names = ("pruner", "budget", "mean_budget")
    own = {name: fields.pop(name) for name in names if name in fields}
    return client.chat.completions.create(
        model="tiny",
        messages=[user(question, *images)],
        max_tokens=most,
        extra_body={"return_token_ids": True} | own,
        **fields,
    )


def begin_chat(address, body):
    """Sends a chat, and returns the connection, which has not read the answer."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=PATIENCE)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return connection


def until(condition):
    """Waits until something holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
