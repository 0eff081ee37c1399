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
# Longest time for an HTTP body to arrive. The number of requests in flight is limited, so slow
# clients must not block other clients.
_BODY_SECONDS = 60
# Status of a request whose client disconnected. Only metrics show this status.
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
    """The application. The instance is itself the ASGI endpoint of chat completions."""

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
            backend: answers requests. The application closes the backend when the server ends.
            metrics: the metrics that the server publishes at /metrics.
            max_in_flight: largest number of requests that are read or answered at a time. Further
                requests are refused with status 429.
        """
        self._parser, self._backend, self._metrics = parser, backend, metrics
        self._max_in_flight, self._num_in_flight = max_in_flight, 0
        self._creation_time = int(time.time())
        metrics.in_flight.set_function(lambda: self._num_in_flight)
        metrics.queue.set_function(lambda: backend.batcher.queue_length)
        self._threads = concurrent.futures.ThreadPoolExecutor(_PARSER_THREADS, "stepprune-parser")

    def app(self, origins: Sequence[str] = ()) -> Starlette:
        """Returns the ASGI application.

        Args:
            origins: origins of web pages that may send requests, such as "http://localhost:3000";
                "*" allows all origins.
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
        return {
            "id": self._parser.name,
            "object": "model",
            "created": self._creation_time,
            "owned_by": "stepprune_jax",
        }

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
        """Handles a chat request: sends its answer or an error, and records its metrics."""
        start_time, status = time.perf_counter(), _CLIENT_GONE
        self._num_in_flight += 1
        try:
            status = await self._answer(scope, receive, send, start_time)
        except RequestError as error:
            status = error.status
            await _error_response(error)(scope, receive, send)
        except ClientDisconnect:
            pass  # `status` is _CLIENT_GONE.
        except Exception:
            status = 500
            await _error_response(_log_failure())(scope, receive, send)
        finally:
            self._num_in_flight -= 1
            self._metrics.requests.labels(status).inc()
            self._metrics.request_seconds.observe(time.perf_counter() - start_time)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, start_time: float) -> int:
        """Answers a chat request.

        Args:
            scope: ASGI scope of the request.
            receive: receives ASGI messages from the client.
            send: sends ASGI messages to the client.
            start_time: start of the request by `time.perf_counter`.

        Returns:
            The HTTP status of the request, for metrics.

        Raises:
            RequestError: the request is invalid or refused, or has failed before its first token.
            ClientDisconnect: the client disconnected.
        """
        if self._num_in_flight > self._max_in_flight:
            message = f"the server is busy with {self._max_in_flight} requests: try again later"
            raise RequestError(429, message)
        body = await _read_body(Request(scope, receive), self._parser.limits.bytes)
        loop = asyncio.get_running_loop()
        chat = await loop.run_in_executor(self._threads, self._parser.parse, body)
        del body  # Frees the memory of the encoded images while the answer is generated.
        async with contextlib.aclosing(self._backend.answer(chat)) as events:
            # The response starts after the first token, so an earlier error has an HTTP status.
            start = await _cancel_on_disconnect(receive, anext(events))
            first_tokens = await _cancel_on_disconnect(receive, anext(events))
            self._metrics.visual_tokens.inc(start.visual_tokens)
            self._metrics.visual_tokens_kept.inc(start.kept)
            self._metrics.first_token_seconds.observe(time.perf_counter() - start_time)
            reply = _Reply(chat, self._parser, start)
            if not chat.is_streamed:
                completion = reply.complete(first_tokens, events)
                fields = await _cancel_on_disconnect(receive, completion)
                await JSONResponse(fields)(scope, receive, send)
                return 200
            chunks = reply.stream(first_tokens, events)
            await StreamingResponse(chunks, media_type="text/event-stream")(scope, receive, send)
            return reply.status


class _Reply:
    """Formats one answer as OpenAI does, while its tokens arrive.

    Attributes:
        status: HTTP status of a streamed answer, for metrics: `_CLIENT_GONE` until the stream ends.
    """

    def __init__(self, chat: ChatRequest, parser: RequestParser, start: AnswerStart):
        """Creates a reply without tokens.

        Args:
            chat: the request.
            parser: the parser of the request, which has the model's name and its tokenizer.
            start: the first event of the answer, which has the token counts of the prompt.
        """
        self._chat, self._start = chat, start
        self._tokenizer, self._answer_ids = parser.model.tokenizer, []
        reply_id, creation_time = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._fields = {"id": reply_id, "created": creation_time, "model": parser.name}
        self.status = _CLIENT_GONE

    async def complete(
        self, first_tokens: AnswerTokens, events: AsyncIterator[AnswerTokens]
    ) -> dict[str, Any]:
        """Waits for the end of an answer and returns the response to a request without a stream.

        Args:
            first_tokens: the first tokens of the answer, which were taken from `events`.
            events: further tokens of the answer.

        Returns:
            The fields of the JSON response.
        """
        texts, finish_reason = [], None
        async for text, tokens in self._decode(first_tokens, events):
            texts.append(text)
            finish_reason = tokens.finish
        message = {"role": "assistant", "content": "".join(texts)}
        choice = self._format_choice({"message": message}, finish_reason, self._answer_ids)
        fields = {**self._fields, "object": "chat.completion", "choices": [choice]}
        return {**fields, "usage": self._count_usage()}

    async def stream(
        self, first_tokens: AnswerTokens, events: AsyncIterator[AnswerTokens]
    ) -> AsyncIterator[bytes]:
        """Yields the server-sent events of an answer. An error becomes the last event.

        Args:
            first_tokens: the first tokens of the answer, which were taken from `events`.
            events: further tokens of the answer.
        """
        chunk_fields = {**self._fields, "object": "chat.completion.chunk"}
        role_field = {"role": "assistant"}  # Only the first chunk has the role.
        try:
            async for text, tokens in self._decode(first_tokens, events):
                delta = {**role_field, "content": text}
                choice = self._format_choice({"delta": delta}, tokens.finish, tokens.ids)
                yield _format_event({**chunk_fields, "choices": [choice]})
                role_field = {}
        except Exception as error:
            request_error = error if isinstance(error, RequestError) else _log_failure()
            self.status = request_error.status
            yield _format_event(_error_fields(request_error))
            return
        if self._chat.has_usage:
            yield _format_event({**chunk_fields, "choices": [], "usage": self._count_usage()})
        yield b"data: [DONE]\n\n"
        self.status = 200

    async def _decode(
        self, tokens: AnswerTokens, events: AsyncIterator[AnswerTokens]
    ) -> AsyncIterator[tuple[str, AnswerTokens]]:
        """Decodes the tokens of an answer to text, until the answer ends.

        Args:
            tokens: the first tokens of the answer, which were taken from `events`.
            events: further tokens of the answer.

        Yields:
            New tokens, and the text that is complete with these tokens. If the answer reaches one
            of the request's stop texts, the last tokens have the finish reason "stop".
        """
        # A token is decoded on the event loop. This takes 10 to 20 microseconds, at any length of
        # the answer: less than to pass the token to another thread and back.
        text_stream = TextStream(self._tokenizer, self._chat.stop_texts)
        # A response without stream or stop texts needs no partial text, so all tokens are decoded
        # once at the end.
        is_incremental = self._chat.is_streamed or self._chat.stop_texts
        while True:
            self._answer_ids += tokens.ids
            text = "".join(map(text_stream.add, tokens.ids)) if is_incremental else ""
            if text_stream.stopped:
                tokens = tokens._replace(finish="stop")
            elif tokens.finish is not None and is_incremental:
                text += text_stream.finish()
            elif tokens.finish is not None:
                text = answer_text(self._tokenizer, self._answer_ids)
            yield text, tokens
            if tokens.finish is not None:
                return
            tokens = await anext(events)

    def _format_choice(
        self, content: dict[str, Any], finish_reason: str | None, ids: Sequence[int]
    ) -> dict[str, Any]:
        """Returns an element of "choices", the only one of a response or of a streamed chunk.

        Args:
            content: the field "message" of a response, or the field "delta" of a chunk.
            finish_reason: why the answer ends with these tokens; None if it does not end.
            ids: token ids of the content, included if the request asks for token ids.
        """
        token_ids = {"token_ids": list(ids)} if self._chat.has_token_ids else {}
        return {"index": 0, **content, "finish_reason": finish_reason, **token_ids}

    def _count_usage(self) -> dict[str, int]:
        """Returns the field "usage" of a response: token counts of prompt, images and answer."""
        num_answer_tokens = len(self._answer_ids)
        return {
            "prompt_tokens": self._start.prompt_tokens,
            "completion_tokens": num_answer_tokens,
            "total_tokens": self._start.prompt_tokens + num_answer_tokens,
            "visual_tokens": self._start.visual_tokens,
            "visual_tokens_kept": self._start.kept,
        }


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Reads the body of a request.

    Args:
        request: the HTTP request.
        max_bytes: largest size of the body.

    Returns:
        The bytes of the body.

    Raises:
        RequestError: the body is compressed, larger than `max_bytes`, or arrives too slowly.
    """
    headers, body = request.headers, bytearray()
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        message = f"content-encoding is {quote(encoding)}, expected an uncompressed body"
        raise RequestError(415, message)
    size_error = RequestError(413, f"the body has more than {max_bytes} bytes")
    if int(headers.get("content-length", 0)) > max_bytes:  # uvicorn has checked the format.
        raise size_error
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:  # The header may be absent.
                    raise size_error
    except TimeoutError as error:
        raise RequestError(408, f"the body took more than {_BODY_SECONDS} seconds") from error
    return bytes(body)


async def _cancel_on_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Awaits work, and cancels the work if the client disconnects first.

    Args:
        receive: receives ASGI messages from the client, whose body has been read.
        work: the awaitable.

    Returns:
        The result of the work.

    Raises:
        ClientDisconnect: the client disconnected.
    """

    async def wait_for_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(wait_for_disconnect())
    tasks = work_task, disconnect_task
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise ClientDisconnect
        return work_task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # Waits until both are cancelled.


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
