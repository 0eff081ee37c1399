"""OpenAI's chat interface over HTTP: routes, streams, refusals, and clients that go away."""

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from stepprune_jax.inference.text import TextStream, answer_text
from stepprune_jax.serving.batching import Started, Tokens
from stepprune_jax.serving.engine import Engine
from stepprune_jax.serving.errors import RequestError, shown
from stepprune_jax.serving.local import Local
from stepprune_jax.serving.messages import ChatRequest, RequestParser
from stepprune_jax.serving.metrics import Metrics

T = TypeVar("T")
_logger = logging.getLogger(__name__)
_READERS = 2  # threads that decode images and tokenise
_BODY_SECONDS = 60
_GONE = 499  # the status, in metrics alone, of a request whose client went away
_KINDS = {429: "rate_limit_error", 503: "service_unavailable"}
# A body that is refused before its end is not read further.
_HEADERS = {
    408: {"connection": "close"},
    413: {"connection": "close"},
    415: {"connection": "close", "accept-encoding": "identity"},
    429: {"retry-after": "1"},
}


class ChatApp:
    """The application; its instances are the route of chats, so that each is counted out again."""

    def __init__(self, reader: RequestParser, backend: Engine | Local, metrics: Metrics, most: int):
        """Takes the parts of a server.

        Args:
            reader: reads requests.
            backend: answers them; it is closed with the application.
            metrics: the figures to show.
            most: requests that are read or answered at a time; further ones are refused.
        """
        self._reader, self._backend, self._metrics = reader, backend, metrics
        self._most, self._in_flight, self._created = most, 0, int(time.time())
        metrics.in_flight.set_function(lambda: self._in_flight)
        metrics.queue.set_function(lambda: backend.batcher.waiting)
        self._threads = concurrent.futures.ThreadPoolExecutor(_READERS, "stepprune-reader")

    def app(self, origins: Sequence[str] = ()) -> Starlette:
        """Returns the ASGI application, which pages from some origins may ask, too ("*": all)."""
        routes = [
            Route("/v1/chat/completions", self, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/health", self._health),
            Route("/metrics", self._figures),
        ]
        cross_origin = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
        layers = [cross_origin] if origins else []
        return Starlette(routes=routes, middleware=layers, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._backend.batcher.close)
        await self._backend.close()

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._about()]})

    async def _model(self, request: Request) -> Response:
        try:
            self._reader.check_name(request.path_params["name"])
        except RequestError as error:
            return _refusal(error)
        return JSONResponse(self._about())

    def _about(self) -> dict[str, Any]:
        """Describes the model in OpenAI's format."""
        about = {"id": self._reader.name, "object": "model", "created": self._created}
        return {**about, "owned_by": "stepprune_jax"}

    async def _health(self, request: Request) -> Response:
        try:
            await self._backend.check()
        except RequestError as error:
            return _refusal(error)
        return PlainTextResponse("ok\n")

    async def _figures(self, request: Request) -> Response:
        figures = generate_latest(self._metrics.registry)
        return Response(figures, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a chat."""
        begin, status = time.perf_counter(), _GONE
        self._in_flight += 1
        try:
            status = await self._answer(scope, receive, send, begin)
        except RequestError as error:
            status = error.status
            await _refusal(error)(scope, receive, send)
        except ClientDisconnect:
            pass
        except Exception:
            status = 500
            await _refusal(_failure())(scope, receive, send)
        finally:
            self._in_flight -= 1
            self._metrics.requests.labels(status).inc()
            self._metrics.request_seconds.observe(time.perf_counter() - begin)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, begin: float) -> int:
        """Answers a chat, and returns its status in the end."""
        if self._in_flight > self._most:
            raise RequestError(429, f"{self._most} requests are being answered: try again later")
        body = await _read_body(Request(scope, receive), self._reader.limits.bytes)
        loop = asyncio.get_running_loop()
        chat = await loop.run_in_executor(self._threads, self._reader.read, body)
        del body
        async with contextlib.aclosing(self._backend.answer(chat)) as events:
            # What fails before the first token has a status of its own.
            started = await _unless_gone(receive, anext(events))
            first = await _unless_gone(receive, anext(events))
            self._metrics.visual_tokens.inc(started.visual_tokens)
            self._metrics.visual_tokens_kept.inc(started.kept)
            self._metrics.first_token_seconds.observe(time.perf_counter() - begin)
            reply = _Reply(chat, self._reader, started)
            if not chat.stream:
                content = await _unless_gone(receive, reply.whole(first, events))
                await JSONResponse(content)(scope, receive, send)
                return 200
            pieces = reply.stream(first, events)
            await StreamingResponse(pieces, media_type="text/event-stream")(scope, receive, send)
            return reply.status


class _Reply:
    """An answer in OpenAI's format, while it grows."""

    def __init__(self, chat: ChatRequest, reader: RequestParser, started: Started):
        self._chat, self._started = chat, started
        self._tokenizer, self._ids = reader.model.tokenizer, []
        name, created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._about = {"id": name, "created": created, "model": reader.name}
        self.status = _GONE  # a stream is gone until it has ended

    async def whole(self, first: Tokens, events: AsyncIterator[Tokens]) -> dict[str, Any]:
        """Returns an answer once it is complete."""
        parts = [part async for part in self._read(first, events)]
        said = {"role": "assistant", "content": "".join(piece for piece, _ in parts)}
        choice = self._choice({"message": said}, parts[-1][1].finish, self._ids)
        fields = {**self._about, "object": "chat.completion", "choices": [choice]}
        return {**fields, "usage": self._usage()}

    async def stream(self, first: Tokens, events: AsyncIterator[Tokens]) -> AsyncIterator[bytes]:
        """Yields an answer piece by piece; what fails now can only end it with an error."""
        fields, role = {**self._about, "object": "chat.completion.chunk"}, {"role": "assistant"}
        try:
            async for piece, tokens in self._read(first, events):
                delta = {**role, "content": piece}
                choice = self._choice({"delta": delta}, tokens.finish, tokens.ids)
                yield _event({**fields, "choices": [choice]})
                role = {}
        except Exception as error:
            error = error if isinstance(error, RequestError) else _failure()
            self.status = error.status
            yield _event(_error(error))
            return
        if self._chat.usage:
            yield _event({**fields, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"
        self.status = 200

    async def _read(
        self, tokens: Tokens, events: AsyncIterator[Tokens]
    ) -> AsyncIterator[tuple[str, Tokens]]:
        """Yields tokens and the text that they make final, up to the answer's end."""
        text = TextStream(self._tokenizer, self._chat.stop)
        # Otherwise nobody needs a part of the text: to decode it again and again takes long.
        grows = self._chat.stream or self._chat.stop
        while True:
            self._ids += tokens.ids
            piece = "".join(map(text.add, tokens.ids)) if grows else ""
            if text.stopped:
                tokens = tokens._replace(finish="stop")
            elif tokens.finish is not None:
                piece += text.finish() if grows else answer_text(self._tokenizer, self._ids)
            yield piece, tokens
            if tokens.finish is not None:
                return
            tokens = await anext(events)

    def _choice(
        self, content: dict[str, Any], finish: str | None, ids: Sequence[int]
    ) -> dict[str, Any]:
        known = {"token_ids": list(ids)} if self._chat.with_ids else {}
        return {"index": 0, **content, "finish_reason": finish, **known}

    def _usage(self) -> dict[str, int]:
        (prompt, visual, kept), count = self._started, len(self._ids)
        total = {"prompt_tokens": prompt, "completion_tokens": count}
        total["total_tokens"] = prompt + count
        return {**total, "visual_tokens": visual, "visual_tokens_kept": kept}


async def _read_body(request: Request, size_limit: int) -> bytes:
    """Reads an uncompressed body, up to a limit in bytes and in time."""
    headers, body = request.headers, bytearray()
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise RequestError(415, f"the body is sent as {shown(coding)}, expected no compression")
    large = RequestError(413, f"the body has more than {size_limit} bytes")
    if int(headers.get("content-length", 0)) > size_limit:  # a number, as the server has checked
        raise large
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > size_limit:
                    raise large
    except TimeoutError as error:
        raise RequestError(408, f"the body took more than {_BODY_SECONDS} seconds") from error
    return bytes(body)


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Awaits work, which is cancelled if the client goes away."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _event(fields: dict[str, Any]) -> bytes:
    """Returns an event of a stream."""
    return f"data: {json.dumps(fields)}\n\n".encode()


def _failure() -> RequestError:
    """Logs what was not foreseen, and returns what the client learns of it."""
    _logger.exception("a request failed")
    return RequestError(500, "the server failed; its log says how")


def _error(error: RequestError) -> dict[str, Any]:
    """Returns an error in OpenAI's format."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    about = {"message": error.message, "type": _KINDS.get(error.status, kind)}
    return {"error": {**about, "param": error.field, "code": error.status}}


def _refusal(error: RequestError) -> Response:
    """Returns the response to a request that is refused."""
    return JSONResponse(_error(error), error.status, _HEADERS.get(error.status))
