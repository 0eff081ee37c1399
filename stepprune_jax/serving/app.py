"""OpenAI's chat interface over HTTP: routes, streams and error responses.

Work for a client that disconnects is canceled.
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
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from stepprune_jax.inference.text import TextStream, answer_text
from stepprune_jax.serving.batching import AnswerStart, AnswerTokens, Metrics, TokenLogprobs
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
    401: {"connection": "close", "www-authenticate": "Bearer"},
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
        *,
        api_key: str | None = None,
        logs_requests: bool = False,
    ):
        """Connects the parts of a server.

        Args:
            parser: parses requests.
            backend: answers requests. The application closes the backend when the server ends.
            metrics: the metrics that the server publishes at /metrics.
            max_in_flight: largest number of requests that are read or answered at a time. Further
                requests are refused with status 429.
            api_key: key that requests below /v1 need; None needs no key.
            logs_requests: whether to log a line for each request.
        """
        self._api_key, self._logs_requests = api_key, logs_requests
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
        if self._api_key is not None:  # After `cross_origin`: a browser asks first without a key.
            key_check = Middleware(_ApiKeyCheck, api_key=self._api_key, metrics=self._metrics)
            middleware.append(key_check)
        return Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers={404: _refuse_path, 405: _refuse_method},
            lifespan=self._lifespan,
        )

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
        start_time, status, record = time.perf_counter(), _CLIENT_GONE, _RequestRecord()
        self._num_in_flight += 1
        try:
            status = await self._answer(scope, receive, send, start_time, record)
        except RequestError as error:
            status, record.error = error.status, str(error)
            await _error_response(error)(scope, receive, send)
        except ClientDisconnect:
            pass  # `status` is _CLIENT_GONE.
        except asyncio.CancelledError:
            # uvicorn cancels the requests that remain some seconds after the server was stopped. It
            # would print a traceback for an error that leaves this method.
            error = RequestError(503, "the server is stopping")
            status, record.error = error.status, str(error)
            if record.reply is not None and record.reply.is_streaming:
                event = _format_event(_error_fields(error))
                await send({"type": "http.response.body", "body": event})
            else:
                await _error_response(error)(scope, receive, send)
        except Exception:
            status = 500
            await _error_response(_log_failure())(scope, receive, send)
        finally:
            self._num_in_flight -= 1
            self._metrics.requests.labels(status).inc()
            seconds = time.perf_counter() - start_time
            self._metrics.request_seconds.observe(seconds)
            if self._logs_requests:
                _logger.info("%s", record.format(status, seconds))

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        start_time: float,
        record: "_RequestRecord",
    ) -> int:
        """Answers a chat request.

        Args:
            scope: ASGI scope of the request.
            receive: receives ASGI messages from the client.
            send: sends ASGI messages to the client.
            start_time: start of the request by `time.perf_counter`.
            record: gets the reply and the time of its first token.

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
            if chat.num_images:
                self._metrics.kept_tokens.observe(start.kept)
            record.first_token_seconds = time.perf_counter() - start_time
            self._metrics.first_token_seconds.observe(record.first_token_seconds)
            record.reply = reply = _Reply(chat, self._parser, start)
            if not chat.is_streamed:
                completion = reply.complete(first_tokens, events)
                fields = await _cancel_on_disconnect(receive, completion)
                await JSONResponse(fields)(scope, receive, send)
                return 200
            chunks = reply.stream(first_tokens, events)
            await StreamingResponse(chunks, media_type="text/event-stream")(scope, receive, send)
            return reply.status


class _RequestRecord:
    """Facts of one request for the log. Filled by `ChatApp` while the request is answered.

    Attributes:
        first_token_seconds: seconds until the first token; None before the first token.
        reply: the reply; None before the first token.
        error: message of the error with which the request ended; "" without an error.
    """

    def __init__(self):
        self.error = ""
        self.first_token_seconds: float | None = None
        self.reply: _Reply | None = None

    def format(self, status: int, seconds: float) -> str:
        """Returns the line of the log.

        Args:
            status: HTTP status; 499 for a client that disconnected.
            seconds: seconds from the request to the end of its answer.
        """
        parts = [f"chat {status} in {seconds:.3f} s"]
        if self.reply is not None:
            usage = self.reply.count_usage()
            parts += [
                f"first token after {self.first_token_seconds:.3f} s",
                f"kept {usage['visual_tokens_kept']} of {usage['visual_tokens']} visual tokens",
                f"{usage['prompt_tokens']} prompt tokens",
                f"{usage['completion_tokens']} answer tokens",
            ]
        return ", ".join(parts) + (f": {self.error}" if self.error else "")


class _Choice:
    """Decodes the tokens of one of the answers to a request.

    Attributes:
        ids: all token ids until now.
        text: all text until now.
        logprobs: log-probabilities of all tokens, in OpenAI's format.
        finish: why the answer has ended; None before its end.
    """

    def __init__(self, tokenizer: Any, chat: ChatRequest):
        """Creates an answer without tokens.

        Args:
            tokenizer: the tokenizer of the model.
            chat: the request.
        """
        self.ids: list[int] = []
        self.text, self.finish = "", None
        self.logprobs: list[dict[str, Any]] = []
        self._tokenizer = tokenizer
        self._text_stream = TextStream(tokenizer, chat.stop_texts)
        # A response without stream or stop texts needs no partial text, so all tokens are decoded
        # once at the end.
        self._is_incremental = bool(chat.is_streamed or chat.stop_texts)

    def add(self, tokens: AnswerTokens) -> str:
        """Adds tokens, and returns the text that is complete with these tokens.

        If the answer reaches one of the request's stop texts, `finish` becomes "stop".
        """
        # A token is decoded on the event loop. This takes 10 to 20 microseconds, at any length of
        # the answer: less than to pass the token to another thread and back.
        self.ids += tokens.ids
        self.logprobs += map(_format_logprobs, tokens.logprobs)
        self.finish = tokens.finish
        text = "".join(map(self._text_stream.add, tokens.ids)) if self._is_incremental else ""
        if self._text_stream.stopped:
            self.finish = "stop"
        elif self.finish is not None and self._is_incremental:
            text += self._text_stream.finish()
        elif self.finish is not None:
            text = answer_text(self._tokenizer, self.ids)
        self.text += text
        return text


class _Reply:
    """Formats the answers to one request as OpenAI does, while their tokens arrive.

    Attributes:
        status: HTTP status of a streamed answer, for metrics: `_CLIENT_GONE` until the stream ends.
        is_streaming: whether the response of a streamed answer has begun.
    """

    def __init__(self, chat: ChatRequest, parser: RequestParser, start: AnswerStart):
        """Creates a reply without tokens.

        Args:
            chat: the request.
            parser: the parser of the request, which has the model's name and its tokenizer.
            start: the first event of the answer, which has the token counts of the prompt.
        """
        self._chat, self._start = chat, start
        tokenizer = parser.model.tokenizer
        self._choices = [_Choice(tokenizer, chat) for _ in range(chat.num_choices)]
        reply_id, creation_time = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._fields = {"id": reply_id, "created": creation_time, "model": parser.name}
        # Kept tokens are sent once: in the response, or in the first chunk of a stream.
        self._kept_field = {}
        if chat.has_kept_tokens:
            backbone = parser.model.backbone
            cells = [backbone.token_cells(image.grid, image.indices) for image in start.images]
            self._kept_field["kept_tokens"] = [
                {"grid": list(image.grid), "cells": cells_of_image.tolist()}
                for image, cells_of_image in zip(start.images, cells, strict=True)
            ]
        self.status, self.is_streaming = _CLIENT_GONE, False

    async def complete(
        self, first_tokens: AnswerTokens, events: AsyncIterator[AnswerTokens]
    ) -> dict[str, Any]:
        """Waits for the end of all answers and returns the response to a request without a stream.

        Args:
            first_tokens: the first tokens of an answer, which were taken from `events`.
            events: further tokens of the answers.

        Returns:
            The fields of the JSON response.
        """
        async for _ in self._decode(first_tokens, events):
            pass
        choices = []
        for number, choice in enumerate(self._choices):
            message = {"role": "assistant", "content": choice.text}
            choices.append(
                self._format_choice(number, {"message": message}, choice.ids, choice.logprobs)
            )
        fields = {**self._fields, "object": "chat.completion", "choices": choices}
        return {**fields, "usage": self.count_usage(), **self._kept_field}

    async def stream(
        self, first_tokens: AnswerTokens, events: AsyncIterator[AnswerTokens]
    ) -> AsyncIterator[bytes]:
        """Yields the server-sent events of the answers. An error becomes the last event.

        Args:
            first_tokens: the first tokens of an answer, which were taken from `events`.
            events: further tokens of the answers.
        """
        self.is_streaming = True
        chunk_fields = {**self._fields, "object": "chat.completion.chunk"}
        kept_field = self._kept_field
        has_role = [False] * len(self._choices)  # Only the first chunk of an answer has the role.
        try:
            async for text, tokens in self._decode(first_tokens, events):
                role_field = {} if has_role[tokens.choice] else {"role": "assistant"}
                has_role[tokens.choice] = True
                delta = {**role_field, "content": text}
                logprobs = list(map(_format_logprobs, tokens.logprobs))
                choice = self._format_choice(tokens.choice, {"delta": delta}, tokens.ids, logprobs)
                yield _format_event({**chunk_fields, "choices": [choice], **kept_field})
                kept_field = {}
        except Exception as error:
            request_error = error if isinstance(error, RequestError) else _log_failure()
            self.status = request_error.status
            yield _format_event(_error_fields(request_error))
            return
        if self._chat.has_usage:
            yield _format_event({**chunk_fields, "choices": [], "usage": self.count_usage()})
        yield b"data: [DONE]\n\n"
        self.status = 200

    async def _decode(
        self, tokens: AnswerTokens, events: AsyncIterator[AnswerTokens]
    ) -> AsyncIterator[tuple[str, AnswerTokens]]:
        """Decodes the tokens of the answers to text, until all answers end.

        Args:
            tokens: the first tokens of an answer, which were taken from `events`.
            events: further tokens of the answers.

        Yields:
            The text that is complete with new tokens, and these tokens.
        """
        while True:
            choice = self._choices[tokens.choice]
            if choice.finish is None:  # The engine may continue an answer after a stop text.
                yield choice.add(tokens), tokens
            if all(choice.finish is not None for choice in self._choices):
                return
            tokens = await anext(events)

    def _format_choice(
        self,
        number: int,
        content: dict[str, Any],
        ids: Sequence[int],
        logprobs: list[dict[str, Any]],
    ) -> dict[str, Any]:
        """Returns an element of "choices" of a response or of a streamed chunk.

        Args:
            number: number of the answer, from 0.
            content: the field "message" of a response, or the field "delta" of a chunk.
            ids: token ids of the content, included if the request asks for token ids.
            logprobs: log-probabilities of these tokens, included if the request asks for them.
        """
        fields = {"index": number, **content, "finish_reason": self._choices[number].finish}
        if self._chat.num_top_logprobs is not None:
            fields["logprobs"] = {"content": logprobs}
        if self._chat.has_token_ids:
            fields["token_ids"] = list(ids)
        return fields

    def count_usage(self) -> dict[str, int]:
        """Returns the field "usage" of a response: token counts of prompt, images and answers."""
        num_answer_tokens = sum(len(choice.ids) for choice in self._choices)
        return {
            "prompt_tokens": self._start.prompt_tokens,
            "completion_tokens": num_answer_tokens,
            "total_tokens": self._start.prompt_tokens + num_answer_tokens,
            "visual_tokens": self._start.visual_tokens,
            "visual_tokens_kept": self._start.kept,
        }


class _ApiKeyCheck:
    """Middleware that refuses requests below /v1 without the server's API key.

    Health and metrics need no key: balancers and Prometheus read them.
    """

    def __init__(self, app: ASGIApp, api_key: str, metrics: Metrics):
        """Wraps an application.

        Args:
            app: the application.
            api_key: the key.
            metrics: counts refused requests.
        """
        self._app, self._api_key, self._metrics = app, api_key.encode(), metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on if it has the key."""
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            has_key = secrets.compare_digest(key.strip().encode(), self._api_key)
            if scheme.lower() != "bearer" or not has_key:
                message = "the API key is missing or wrong, expected Authorization: Bearer KEY"
                self._metrics.requests.labels(401).inc()
                await _error_response(RequestError(401, message))(scope, receive, send)
                return
        await self._app(scope, receive, send)


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
        await asyncio.gather(*tasks, return_exceptions=True)  # Waits until both are canceled.


def _format_logprobs(position: TokenLogprobs) -> dict[str, Any]:
    """Returns the log-probabilities at one position of an answer in OpenAI's format."""

    def format_token(token: str, logprob: float) -> dict[str, Any]:
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    top = [format_token(token, logprob) for token, logprob in position.top]
    return {**format_token(position.token, position.logprob), "top_logprobs": top}


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


def _refuse_path(request: Request, _: Exception) -> Response:
    """Returns the error response to a path that the server does not have."""
    paths = "/v1/chat/completions, /v1/models, /health and /metrics"
    return _error_response(RequestError(404, f"no {request.url.path}, the server has {paths}"))


def _refuse_method(request: Request, _: Exception) -> Response:
    """Returns the error response to a method that a path does not have."""
    expected = "POST" if request.url.path == "/v1/chat/completions" else "GET"
    message = f"the method of {request.url.path} is {request.method}, expected {expected}"
    response = _error_response(RequestError(405, message))
    response.headers["allow"] = expected
    return response


def _error_response(error: RequestError) -> Response:
    """Returns the HTTP response for an error."""
    return JSONResponse(_error_fields(error), error.status, _ERROR_HEADERS.get(error.status))
