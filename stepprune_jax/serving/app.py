"""OpenAI's chat interface over HTTP: routes, streams and error responses.

Work for a client that disconnects is cancelled.
"""

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
from stepprune_jax.serving.batching import AnswerStart, AnswerTokens, Metrics
from stepprune_jax.serving.engine import EngineBackend
from stepprune_jax.serving.fields import RequestError, quote
from stepprune_jax.serving.local import LocalBackend
from stepprune_jax.serving.messages import ChatRequest, RequestParser

T = TypeVar("T")
_logger = logging.getLogger(__name__)
# Threads that decode images and tokenize texts. The worker's thread computes in parallel.
_PARSER_THREADS = 2
# Longest time for a body to arrive: slow clients must not hold the places of other requests.
_BODY_SECONDS = 60
# Status of a request whose client went away. Only metrics show it.
_CLIENT_GONE = 499
_ERROR_TYPES = {429: "rate_limit_error", 503: "service_unavailable"}
# Response headers by status. The server closes the connection of a body that it does not read.
_ERROR_HEADERS = {
    408: {"connection": "close"},
    413: {"connection": "close"},
    415: {"connection": "close", "accept-encoding": "identity"},
    429: {"retry-after": "1"},
}


class ChatApp:
    """The application. The instance is itself the ASGI route of chats, and counts them."""

    def __init__(
        self,
        parser: RequestParser,
        backend: EngineBackend | LocalBackend,
        metrics: Metrics,
        max_in_flight: int,
    ):
        """Connects the parts of a server.

        Args:
            parser: parses requests.
            backend: answers requests. The application closes it at the end.
            metrics: the metrics that the server publishes.
            max_in_flight: largest number of requests that are read or answered at a time. Further
                requests are refused with status 429.
        """
        self._parser, self._backend, self._metrics = parser, backend, metrics
        self._max_in_flight, self._in_flight, self._created = max_in_flight, 0, int(time.time())
        metrics.in_flight.set_function(lambda: self._in_flight)
        metrics.queue.set_function(lambda: backend.batcher.queue_length)
        self._threads = concurrent.futures.ThreadPoolExecutor(_PARSER_THREADS, "stepprune-parser")

    def app(self, origins: Sequence[str] = ()) -> Starlette:
        """Returns the ASGI application.

        Args:
            origins: origins of web pages that may send requests; "*" allows all origins.
        """
        routes = [
            Route("/v1/chat/completions", self, methods=["POST"]),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._show_model),
            Route("/health", self._check_health),
            Route("/metrics", self._show_metrics),
        ]
        cross_origin = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
        middleware = [cross_origin] if origins else []
        return Starlette(routes=routes, middleware=middleware, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Closes the threads and the backend when the server ends."""
        yield
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._backend.batcher.close)
        await self._backend.close()

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._describe_model()]})

    async def _show_model(self, request: Request) -> Response:
        try:
            self._parser.check_model_name(request.path_params["name"])
        except RequestError as error:
            return _error_response(error)
        return JSONResponse(self._describe_model())

    def _describe_model(self) -> dict[str, Any]:
        """Describes the model in OpenAI's format."""
        fields = {"id": self._parser.name, "object": "model", "created": self._created}
        return {**fields, "owned_by": "stepprune_jax"}

    async def _check_health(self, request: Request) -> Response:
        try:
            await self._backend.check()
        except RequestError as error:
            return _error_response(error)
        return PlainTextResponse("ok\n")

    async def _show_metrics(self, request: Request) -> Response:
        text = generate_latest(self._metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a chat request, or sends its error, and counts the request."""
        start_time, status = time.perf_counter(), _CLIENT_GONE
        self._in_flight += 1
        try:
            status = await self._answer(scope, receive, send, start_time)
        except RequestError as error:
            status = error.status
            await _error_response(error)(scope, receive, send)
        except ClientDisconnect:
            pass
        except Exception:
            status = 500
            await _error_response(_log_failure())(scope, receive, send)
        finally:
            self._in_flight -= 1
            self._metrics.requests.labels(status).inc()
            self._metrics.request_seconds.observe(time.perf_counter() - start_time)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, start_time: float) -> int:
        """Answers a chat request and returns its final status."""
        if self._in_flight > self._max_in_flight:
            message = f"the server is busy with {self._max_in_flight} requests: try again later"
            raise RequestError(429, message)
        body = await _read_body(Request(scope, receive), self._parser.limits.bytes)
        loop = asyncio.get_running_loop()
        chat = await loop.run_in_executor(self._threads, self._parser.parse, body)
        del body
        async with contextlib.aclosing(self._backend.answer(chat)) as events:
            # An error before the first token still has its own HTTP status.
            start = await _cancel_on_disconnect(receive, anext(events))
            first_tokens = await _cancel_on_disconnect(receive, anext(events))
            self._metrics.visual_tokens.inc(start.visual_tokens)
            self._metrics.visual_tokens_kept.inc(start.kept)
            self._metrics.first_token_seconds.observe(time.perf_counter() - start_time)
            reply = _Reply(chat, self._parser, start)
            if not chat.is_streamed:
                content = reply.complete(first_tokens, events)
                content = await _cancel_on_disconnect(receive, content)
                await JSONResponse(content)(scope, receive, send)
                return 200
            chunks = reply.stream(first_tokens, events)
            await StreamingResponse(chunks, media_type="text/event-stream")(scope, receive, send)
            return reply.status


class _Reply:
    """Formats an answer as OpenAI does, while its tokens arrive.

    Attributes:
        status: final HTTP status of a streamed answer.
    """

    def __init__(self, chat: ChatRequest, parser: RequestParser, start: AnswerStart):
        self._chat, self._start = chat, start
        self._tokenizer, self._ids = parser.model.tokenizer, []
        reply_id, created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._fields = {"id": reply_id, "created": created, "model": parser.name}
        self.status = _CLIENT_GONE  # Replaced when the stream ends.

    async def complete(
        self, first_tokens: AnswerTokens, events: AsyncIterator[AnswerTokens]
    ) -> dict[str, Any]:
        """Returns the response to a request without a stream, once the answer is complete."""
        pieces = [piece async for piece in self._decode(first_tokens, events)]
        message = {"role": "assistant", "content": "".join(text for text, _ in pieces)}
        choice = self._choice({"message": message}, pieces[-1][1].finish, self._ids)
        fields = {**self._fields, "object": "chat.completion", "choices": [choice]}
        return {**fields, "usage": self._usage()}

    async def stream(
        self, first_tokens: AnswerTokens, events: AsyncIterator[AnswerTokens]
    ) -> AsyncIterator[bytes]:
        """Yields the server-sent events of an answer. An error becomes the last event."""
        fields, role = {**self._fields, "object": "chat.completion.chunk"}, {"role": "assistant"}
        try:
            async for text, tokens in self._decode(first_tokens, events):
                delta = {**role, "content": text}
                choice = self._choice({"delta": delta}, tokens.finish, tokens.ids)
                yield _format_event({**fields, "choices": [choice]})
                role = {}
        except Exception as error:
            error = error if isinstance(error, RequestError) else _log_failure()
            self.status = error.status
            yield _format_event(_error_fields(error))
            return
        if self._chat.has_usage:
            yield _format_event({**fields, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"
        self.status = 200

    async def _decode(
        self, tokens: AnswerTokens, events: AsyncIterator[AnswerTokens]
    ) -> AsyncIterator[tuple[str, AnswerTokens]]:
        """Yields new tokens with the text that they complete, until the answer ends."""
        stream = TextStream(self._tokenizer, self._chat.stop_texts)
        # A response without stream or stop texts needs no partial text. Decoding all tokens once
        # at the end is much faster.
        is_incremental = self._chat.is_streamed or self._chat.stop_texts
        while True:
            self._ids += tokens.ids
            text = "".join(map(stream.add, tokens.ids)) if is_incremental else ""
            if stream.stopped:
                tokens = tokens._replace(finish="stop")
            elif tokens.finish is not None:
                is_complete = not is_incremental
                text += answer_text(self._tokenizer, self._ids) if is_complete else stream.finish()
            yield text, tokens
            if tokens.finish is not None:
                return
            tokens = await anext(events)

    def _choice(
        self, content: dict[str, Any], finish: str | None, ids: Sequence[int]
    ) -> dict[str, Any]:
        """Returns the only choice of a response or of a chunk."""
        token_ids = {"token_ids": list(ids)} if self._chat.has_token_ids else {}
        return {"index": 0, **content, "finish_reason": finish, **token_ids}

    def _usage(self) -> dict[str, int]:
        """Returns the token counts of the request."""
        (prompt_tokens, visual_tokens, kept), answer_tokens = self._start, len(self._ids)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": answer_tokens,
            "total_tokens": prompt_tokens + answer_tokens,
            "visual_tokens": visual_tokens,
            "visual_tokens_kept": kept,
        }


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Reads an uncompressed body.

    Raises:
        RequestError: the body is compressed, larger than `max_bytes`, or arrives too slowly.
    """
    headers, body = request.headers, bytearray()
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        message = f"content-encoding is {quote(encoding)}, expected an uncompressed body"
        raise RequestError(415, message)
    too_large = RequestError(413, f"the body has more than {max_bytes} bytes")
    if int(headers.get("content-length", 0)) > max_bytes:  # uvicorn has checked the format.
        raise too_large
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError as error:
        raise RequestError(408, f"the body took more than {_BODY_SECONDS} seconds") from error
    return bytes(body)


async def _cancel_on_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Awaits work and returns its result; cancels the work if the client disconnects.

    Raises:
        ClientDisconnect: the client disconnected.
    """

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _format_event(fields: dict[str, Any]) -> bytes:
    """Returns a server-sent event."""
    return f"data: {json.dumps(fields)}\n\n".encode()


def _log_failure() -> RequestError:
    """Logs an unexpected exception, and returns the error for the client."""
    _logger.exception("a request failed")
    return RequestError(500, "the server failed; its log has the reason")


def _error_fields(error: RequestError) -> dict[str, Any]:
    """Returns an error in OpenAI's format."""
    default_type = "server_error" if error.status >= 500 else "invalid_request_error"
    error_type = _ERROR_TYPES.get(error.status, default_type)
    fields = {"message": error.message, "type": error_type}
    return {"error": {**fields, "param": error.field, "code": error.status}}


def _error_response(error: RequestError) -> Response:
    """Returns the HTTP response for an error."""
    return JSONResponse(_error_fields(error), error.status, _ERROR_HEADERS.get(error.status))
