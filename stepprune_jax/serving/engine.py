"""Answers with the language model of another server, an engine such as vLLM.

The engine is not modified. It receives each row as `prompt_embeds` at its `/v1/completions`: text
embeddings, and the projected kept tokens in place of each image. An engine therefore needs no
knowledge of pruning, and its batches mix rows of any length and any number of kept tokens.
"""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Hashable, Sequence
from typing import NamedTuple

import httpx2
import jax
import numpy as np
from jaxtyping import Float

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.inference import pipeline
from stepprune_jax.inference.base import Images
from stepprune_jax.inference.plan import plan_batch
from stepprune_jax.inference.request import join_requests
from stepprune_jax.policy.buckets import pad_rows
from stepprune_jax.serving.batching import (
    AnswerStart,
    AnswerTokens,
    Batcher,
    Job,
    Metrics,
    pad_requests,
)
from stepprune_jax.serving.fields import RequestError
from stepprune_jax.serving.messages import ChatRequest
from stepprune_jax.serving.tensors import tensor_file

_CONNECT_SECONDS = 5.0
# Status of the engine -> status for the client. The server answers 503 for any other status.
_CLIENT_STATUS = {400: 400, 413: 400, 422: 400, 429: 429}
_MAX_ERROR_LENGTH = 500  # Characters of an engine's error that a client sees.


class PromptRow(NamedTuple):
    """A row that is ready for the language model. Made by `embed_prompts`.

    Attributes:
        embeddings: [s, e] token embeddings, without padding.
        start: token counts of the row.
    """

    embeddings: Float[np.ndarray, "s e"]
    start: AnswerStart


def embed_prompts(model: VLM, chats: Sequence[ChatRequest]) -> list[PromptRow]:
    """Returns the row of each request after vision tower, pruning and projector.

    Rows do not depend on each other. Shapes are padded to buckets. Tower and selection are separate
    programs, so a new text length compiles neither of them.

    Args:
        model: the model.
        chats: requests with the same pruner and the same number of images.
    """
    pruner, options = chats[0].pruner, chats[0].options
    request = join_requests([chat.request for chat in pad_requests(chats)])
    prompts, images = request.prompts(), request.images
    if images is not None:
        num_images = len(images.grid)
        indices = pad_rows(num_images, 1)
        pixels = jax.tree.map(lambda leaf: leaf[indices], images.pixels)
        images = Images(*(field[indices] for field in images[:3]), pixels)
        images = pipeline.encode(model, images, pruner.taps(model.config), options.execution)
    batch = plan_batch(model, pruner, prompts, images, options)
    batch = pipeline.complete_plan(model, batch)
    hidden, length = pipeline.embed(model, batch)
    counts = zip(
        length.tolist(), batch.visual_tokens.tolist(), batch.num_kept.tolist(), strict=True
    )
    rows = zip(hidden, map(AnswerStart._make, counts), strict=True)
    padded_rows = [PromptRow(row[: start.prompt_tokens], start) for row, start in rows]
    return padded_rows[: len(chats)]


class EngineBackend:
    """Prunes in this process and generates answers with an engine."""

    samples = False  # The engine samples, so a temperature does not change the programs here.

    def __init__(
        self,
        model: VLM,
        address: str,
        metrics: Metrics,
        *,
        seconds: float = 60.0,
        batch_size: int = 8,
        batch_seconds: float = 0.005,
    ):
        """Starts the worker thread. The engine may start later.

        Args:
            model: the model with its tower, its projector and its embeddings.
            address: address of the engine, such as http://127.0.0.1:8000.
            metrics: counts the batches.
            seconds: longest time to wait for the engine's next token.
            batch_size: largest number of requests that tower and policy run together.
            batch_seconds: longest time that a request waits for its batch to fill.
        """
        self._model, self._address = model, address.rstrip("/")
        self._engine_model: str | None = None  # The engine's name of its model, once requested.
        self.batch_size = batch_size
        timeout = httpx2.Timeout(seconds, connect=_CONNECT_SECONDS, pool=None)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=32)
        # Proxies of the environment are for the internet, and the engine is a local server.
        self._client = httpx2.AsyncClient(
            base_url=self._address, timeout=timeout, limits=limits, trust_env=False
        )
        # One number of images per batch bounds the number of programs.
        self.batcher = Batcher(
            self._run,
            lambda chat: (id(chat.pruner), chat.num_images),
            max_batch=batch_size,
            max_wait=batch_seconds,
            metrics=metrics,
        )

    def warm(self, chats: Sequence[ChatRequest], shapes: set[Hashable]) -> int:
        """Compiles the programs of a batch; returns how many tokens the first request keeps."""
        return embed_prompts(self._model, chats)[0].start.kept

    def _run(self, jobs: Sequence[Job]) -> None:
        """Computes the row of each job and reports it."""
        rows = embed_prompts(self._model, [job.chat for job in jobs])
        for job, row in zip(jobs, rows, strict=True):
            job.put(row)

    async def close(self) -> None:
        """Closes the connections to the engine."""
        await self._client.aclose()

    async def check(self) -> None:
        """Raises a RequestError unless the engine is healthy."""
        async with self._connection_errors():
            await self._get("/health")

    async def _get(self, path: str) -> httpx2.Response:
        """Returns the response to a short request.

        Raises:
            RequestError: the status is not 200.
        """
        response = await self._client.get(path, timeout=_CONNECT_SECONDS)
        if response.status_code != 200:
            raise _engine_error(response.status_code, response.content)
        return response

    async def answer(self, chat: ChatRequest) -> AsyncIterator[AnswerStart | AnswerTokens]:
        """Yields the events of an answer. Closing the iterator cancels the engine's work.

        Raises:
            RequestError: the engine refuses the request, is unreachable, fails, or is too slow.
        """
        async with contextlib.aclosing(self.batcher.events(chat)) as events:
            row = await anext(events)
        yield row.start
        async with self._connection_errors():
            if self._engine_model is None:
                models = (await self._get("/v1/models")).json()
                self._engine_model = models["data"][0]["id"]
            body = await asyncio.to_thread(self._completion_body, chat, row, self._engine_model)
            async with self._client.stream(
                "POST",
                "/v1/completions",
                content=body,
                headers={"content-type": "application/json"},
            ) as response:
                if response.status_code != 200:
                    self._engine_model = None  # The engine may serve another model by now.
                    raise _engine_error(response.status_code, await response.aread())
                # Yielded after the stream has ended, so that the connection can be used again.
                last_tokens = None
                async for line in response.aiter_lines():
                    if last_tokens is None and line.startswith("data: {"):
                        tokens = _parse_event(line.removeprefix("data: "))
                        if tokens.finish is None:
                            yield tokens
                        else:
                            last_tokens = tokens
                if last_tokens is None:
                    raise RequestError(503, "the engine ended its answer early")
        yield last_tokens

    def _completion_body(self, chat: ChatRequest, row: PromptRow, engine_model: str) -> bytes:
        """Returns the request to the engine.

        An engine takes absent fields from the model's folder, so every field that affects the
        answer is set.
        """
        fields = {
            "model": engine_model,
            "prompt_embeds": base64.b64encode(tensor_file(row.embeddings)).decode(),
            "max_tokens": chat.options.max_tokens,
            "temperature": float(chat.sampling.temperature),
            "top_p": float(chat.sampling.top_p),
            "top_k": 0,
            "repetition_penalty": self._model.repetition_penalty,
            "stream": True,
            "return_token_ids": True,
        }
        return json.dumps({**fields, **chat.engine_fields}).encode()

    @contextlib.asynccontextmanager
    async def _connection_errors(self) -> AsyncIterator[None]:
        """Raises failures of the connection and unexpected responses as RequestErrors."""
        try:
            yield
        except httpx2.TimeoutException as error:
            raise RequestError(503, f"the engine at {self._address} is too slow") from error
        except httpx2.TransportError as error:
            self._engine_model = None  # Another engine may be started at this address.
            reason = error or type(error).__name__
            message = f"the engine at {self._address} is not reachable: {reason}"
            raise RequestError(503, message) from error
        except (ValueError, LookupError, TypeError) as error:
            message = f"the engine at {self._address} sent an unexpected response: {error!r}"
            raise RequestError(503, message) from error


def _parse_event(event: str) -> AnswerTokens:
    """Parses an event of the engine's stream."""
    fields = json.loads(event)
    if "error" in fields:
        raise RequestError(503, f"the engine failed: {_error_message(event)}")
    choice = fields["choices"][0]
    return AnswerTokens(tuple(choice.get("token_ids") or ()), choice.get("finish_reason"))


def _engine_error(status: int, content: bytes) -> RequestError:
    """Returns the error for the client of a request that the engine refused."""
    message = f"the engine answers {status}: {_error_message(content)}"
    return RequestError(_CLIENT_STATUS.get(status, 503), message)


def _error_message(content: str | bytes) -> str:
    """Returns the message of the engine's error, or all its content in an unknown format."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        content = json.loads(content)["error"]["message"]
    return str(content)[:_MAX_ERROR_LENGTH]
