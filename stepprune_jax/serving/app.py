"""OpenAI's chat interface over HTTP: routes, streams, refusals, and what becomes of a lost client."""

import asyncio
import concurrent.futures
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from stepprune_jax.inference.text import TextStream
from stepprune_jax.models.config import Tokenizer
from stepprune_jax.serving.answers import Backend, Started, Tokens
from stepprune_jax.serving.messages import Chat, Reader, RequestError
from stepprune_jax.serving.metrics import Metrics

T = TypeVar("T")
_logger = logging.getLogger(__name__)
_READERS = 2  # threads that decode images and tokenise
_GONE = 499  # the status, in metrics alone, of a request whose client went away
_BODY_SECONDS = 60
_INVALID = "invalid_request_error"
_KINDS = {404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable"}


def build(
    reader: Reader,
    backend: Backend,
    tokenizer: Tokenizer,
    name: str,
    metrics: Metrics,
    *,
    most: int,
    most_bytes: int,
) -> Starlette:
    """Builds the application.

    Args:
        reader: reads requests.
        backend: answers them; closed with the application.
        tokenizer: the model's.
        name: the model's name.
        metrics: the figures to show.
        most: requests that are read or answered at a time; further ones are refused.
        most_bytes: bytes of a request's body.

    Returns:
        An ASGI application.
    """
    chat = _ChatRoute(reader, backend, tokenizer, name, metrics, most, most_bytes)
    created = int(time.time())

    async def models(request: Request) -> Response:
        about = {"id": name, "object": "model", "created": created, "owned_by": "stepprune_jax"}
        return JSONResponse({"object": "list", "data": [about]})

    async def health(request: Request) -> Response:
        try:
            await backend.check()
        except RequestError as error:
            return _refusal(error)
        return PlainTextResponse("ok\n")

    async def figures(request: Request) -> Response:
        gauges = {"in_flight": chat.in_flight, "queue": backend.batcher.waiting}
        return PlainTextResponse(metrics.text(gauges), media_type="text/plain; version=0.0.4")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        chat.close()
        await asyncio.to_thread(backend.batcher.close)
        await backend.close()

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
        Route("/metrics", figures),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


class _Reply:
    """An answer in OpenAI's format, while it grows."""

    def __init__(self, chat: Chat, tokenizer: Tokenizer, name: str, started: Started):
        self._chat, self._started, self._text = chat, started, TextStream(tokenizer)
        self._about = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
        }
        self.ids: list[int] = []
        self.status = _GONE  # of a stream, until it has ended

    def add(self, tokens: Tokens) -> str:
        """Takes tokens, and returns the text that has become final."""
        self.ids += tokens.ids
        piece = "".join(map(self._text.add, tokens.ids))
        return piece + self._text.finish() if tokens.finish else piece

    def usage(self) -> dict[str, int]:
        """Returns the counts of tokens."""
        prompt, visual, kept = self._started
        return {
            "prompt_tokens": prompt,
            "completion_tokens": len(self.ids),
            "total_tokens": prompt + len(self.ids),
            "visual_tokens": visual,
            "visual_tokens_kept": kept,
        }

    def chunk(self, delta: dict[str, str] | None, tokens: Tokens | None = None) -> bytes:
        """Returns an event of a stream; the last one, without a delta, has the usage."""
        fields = {**self._about, "object": "chat.completion.chunk", "choices": []}
        if delta is None:
            return _event({**fields, "usage": self.usage()})
        choice = {"index": 0, "delta": delta, "finish_reason": tokens and tokens.finish}
        if self._chat.ids and tokens:
            choice["token_ids"] = list(tokens.ids)
        return _event({**fields, "choices": [choice]})

    def whole(self, text: str, finish: str) -> dict[str, Any]:
        """Returns the answer at once."""
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        if self._chat.ids:
            choice["token_ids"] = self.ids
        fields = {**self._about, "object": "chat.completion", "choices": [choice]}
        return {**fields, "usage": self.usage()}


class _ChatRoute:
    """The route that answers; an application of its own, so that every request is counted out."""

    def __init__(
        self,
        reader: Reader,
        backend: Backend,
        tokenizer: Tokenizer,
        name: str,
        metrics: Metrics,
        most: int,
        most_bytes: int,
    ):
        self._reader, self._backend, self._metrics = reader, backend, metrics
        self._tokenizer, self._name = tokenizer, name
        self._most, self._most_bytes, self.in_flight = most, most_bytes, 0
        self._threads = concurrent.futures.ThreadPoolExecutor(_READERS, "stepprune-reader")

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        begin, status = time.perf_counter(), _GONE
        self.in_flight += 1
        try:
            status = await self._answer(scope, receive, send, begin)
        except RequestError as error:
            status = error.status
            await _refusal(error)(scope, receive, send)
        except ClientDisconnect:
            pass
        except Exception:
            _logger.exception("a request failed")
            status = 500
            error = RequestError(status, "the server failed; its log says how")
            await _refusal(error)(scope, receive, send)
        finally:
            self.in_flight -= 1
            self._metrics.add("requests_total", label=f'{{status="{status}"}}')
            self._metrics.observe("request_seconds", time.perf_counter() - begin)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, begin: float) -> int:
        """Answers a request, and returns its status in the end."""
        if self.in_flight > self._most:
            message = f"{self._most} requests are being answered, as many as may be; try again"
            raise RequestError(429, message)
        body = await self._body(Request(scope, receive))
        loop = asyncio.get_running_loop()
        chat = await loop.run_in_executor(self._threads, self._reader.read, body)
        del body
        async with contextlib.aclosing(self._backend.answer(chat)) as events:
            started, first = await _unless_gone(receive, self._first(events, begin))
            reply = _Reply(chat, self._tokenizer, self._name, started)
            if not chat.stream:
                content = await _unless_gone(receive, _whole(reply, first, events))
                await JSONResponse(content)(scope, receive, send)
                return 200
            how = {"media_type": "text/event-stream", "headers": {"cache-control": "no-cache"}}
            pieces = _stream(chat, reply, first, events)
            await StreamingResponse(pieces, **how)(scope, receive, send)
            return reply.status

    async def _body(self, request: Request) -> bytes:
        """Reads the body, up to its limit in bytes and in time."""
        declared = request.headers.get("content-length", "0")
        parts, size = [], int(declared) if declared.isdecimal() else 0
        most = self._most_bytes
        large = RequestError(413, f"the body has more than {most} bytes")
        if size > most:
            raise large
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                size = 0
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > most:
                        raise large
        except TimeoutError as error:
            message = f"the body took more than {_BODY_SECONDS} seconds"
            raise RequestError(408, message) from error
        return b"".join(parts)

    async def _first(self, events: AsyncIterator[Any], begin: float) -> tuple[Started, Tokens]:
        """Waits for the first token: what fails until then has a status of its own."""
        started, first = await anext(events), await anext(events)
        self._metrics.add("visual_tokens_total", started.visual_tokens)
        self._metrics.add("visual_tokens_kept_total", started.kept)
        self._metrics.observe("first_token_seconds", time.perf_counter() - begin)
        return started, first


async def _whole(reply: _Reply, first: Tokens, events: AsyncIterator[Tokens]) -> dict[str, Any]:
    """Returns an answer once it is complete."""
    text, tokens = reply.add(first), first
    while tokens.finish is None:
        tokens = await anext(events)
        text += reply.add(tokens)
    return reply.whole(text, tokens.finish)


async def _stream(
    chat: Chat, reply: _Reply, first: Tokens, events: AsyncIterator[Tokens]
) -> AsyncIterator[bytes]:
    """Yields an answer piece by piece; what fails now can only end the stream with an error."""
    yield reply.chunk({"role": "assistant", "content": ""})
    tokens = first
    try:
        while True:
            yield reply.chunk({"content": reply.add(tokens)}, tokens)
            if tokens.finish is not None:
                break
            tokens = await anext(events)
    except RequestError as error:
        reply.status = error.status
        yield _event(_error(error))
        return
    except Exception:
        _logger.exception("a request failed")
        reply.status = 500
        yield _event(_error(RequestError(500, "the server failed; its log says how")))
        return
    if chat.usage:
        yield reply.chunk(None)
    yield b"data: [DONE]\n\n"
    reply.status = 200


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits work, which is cancelled if the client goes away."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _event(fields: dict[str, Any]) -> bytes:
    """Returns an event of a stream."""
    return f"data: {json.dumps(fields)}\n\n".encode()


def _error(error: RequestError) -> dict[str, Any]:
    """Returns an error in OpenAI's format."""
    kind = _KINDS.get(error.status, "server_error" if error.status >= 500 else _INVALID)
    about = {"message": error.message, "type": kind, "param": error.field, "code": error.status}
    return {"error": about}


def _refusal(error: RequestError) -> Response:
    """Returns the response to a request that is refused."""
    # The rest of a body that is too large, or too slow, is not waited for.
    headers = {
        413: {"connection": "close"},
        408: {"connection": "close"},
        429: {"retry-after": "1"},
    }
    return JSONResponse(_error(error), error.status, headers.get(error.status))
