"""Answers with the language model of another server, an engine such as vLLM.

This process runs the vision tower and prunes. The unmodified engine receives each prompt as
`prompt_embeds` at its `/v1/completions`: text embeddings, with the projected kept tokens in place
of each image. The engine therefore needs no knowledge of pruning, and its batches mix prompts of
any length and any number of kept tokens.
"""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Hashable, Sequence
from typing import Any, NamedTuple

import httpx2
import numpy as np
from jaxtyping import Float

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.inference import pipeline
from stepprune_jax.inference.plan import plan_batch
from stepprune_jax.inference.request import join_requests
from stepprune_jax.models.sequence import Kept
from stepprune_jax.parallel.placement import to_host
from stepprune_jax.policy.buckets import pad_rows
from stepprune_jax.serving.batching import (
    AnswerStart,
    AnswerTokens,
    Batcher,
    Job,
    Metrics,
    TokenLogprobs,
    list_kept,
    pad_requests,
    shape_key,
)
from stepprune_jax.serving.fields import RequestError
from stepprune_jax.serving.messages import ChatRequest
from stepprune_jax.serving.tensors import tensor_file

_CONNECT_SECONDS = 5.0
# Status of the engine -> status for the client. The server answers 503 for any other status.
_CLIENT_STATUS = {400: 400, 413: 400, 422: 400, 429: 429}
_MAX_ERROR_LENGTH = 500  # Characters of an engine's error that a client sees.


class PromptRow(NamedTuple):
    """A prompt as the language model's input. Made by `embed_prompts`.

    Attributes:
        embeddings: [s, e] embeddings of text tokens and kept visual tokens, without padding. `s` is
            the number of tokens, `e` the width of the language model.
        start: token counts of the prompt.
    """

    embeddings: Float[np.ndarray, "s e"]
    start: AnswerStart


def embed_prompts(model: VLM, chats: Sequence[ChatRequest]) -> list[PromptRow]:
    """Runs vision tower, pruner and projector, and returns the prompt row of each request.

    The rows of a batch do not depend on each other. Shapes are padded to few sizes. Tower and
    selection are separate programs, so a new text length compiles neither of them.

    Args:
        model: the model with its tower, its projector and its token embeddings.
        chats: requests with the same pruner and equal `shape_key`s.

    Returns:
        One row per request, in the order of `chats`.
    """
    pruner, options = chats[0].pruner, chats[0].options
    request = join_requests(model.backbone, [chat.request for chat in pad_requests(chats)])
    prompts, images = request.prompts(), request.images
    if images is not None:
        # Repeats images up to a padded number, which bounds the number of tower programs.
        indices = pad_rows(len(images.grid), 1)
        images = pipeline.encode(
            model, images.take(indices), pruner.taps(model.config), options.execution
        )
    batch = plan_batch(model, pruner, prompts, images, options)
    inputs = pipeline.prepare_prefill(model, batch)  # Selects the tokens.
    built = pipeline.build_rows(model, inputs)
    order = inputs.tokens.order if isinstance(inputs.tokens, Kept) else None
    order = None if order is None else order[inputs.layout.pair]  # [pairs, t] to [rows, images, t]
    embeddings, lengths, *kept = to_host(
        (built.hidden, built.length, built.index, built.image, order)
    )
    starts = map(
        AnswerStart,
        lengths.tolist(),
        inputs.visual_tokens.tolist(),
        inputs.num_kept.tolist(),
        list_kept(request, *kept),
    )
    rows = [
        PromptRow(padded_row[: start.prompt_tokens], start)
        for padded_row, start in zip(embeddings, starts, strict=True)
    ]
    return rows[: len(chats)]  # The last requests of the batch are padding.


class EngineBackend:
    """Prunes in this process and generates answers with an engine.

    Attributes:
        batcher: runs tower and pruner for batches of requests.
        batch_size: largest number of requests in a batch.
        samples: whether a temperature changes the programs of this process. The engine samples the
            tokens, so it does not.
    """

    samples = False

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
            model: the model with its tower, its projector and its token embeddings.
            address: address of the engine, such as http://127.0.0.1:8000.
            metrics: records the batches.
            seconds: longest time in seconds to wait for the engine's next token.
            batch_size: largest number of requests in a batch of tower and pruner.
            batch_seconds: longest time in seconds that a request waits for its batch to fill.
        """
        self._model, self._address = model, address.rstrip("/")
        self._engine_model: str | None = None  # Name of the engine's model; None until requested.
        self.batch_size = batch_size
        timeout = httpx2.Timeout(seconds, connect=_CONNECT_SECONDS, pool=None)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=32)
        # Ignores the environment's proxies, which are for the internet: the engine is local.
        self._client = httpx2.AsyncClient(
            base_url=self._address, timeout=timeout, limits=limits, trust_env=False
        )
        self.batcher = Batcher(
            self._run,
            lambda chat: (id(chat.pruner), shape_key(model, chat.request)),
            max_batch=batch_size,
            max_wait=batch_seconds,
            metrics=metrics,
        )

    def warm(self, chats: Sequence[ChatRequest], shapes: set[Hashable]) -> int:
        """Compiles the programs of a batch by running the batch.

        Args:
            chats: requests with the same pruner and equal `shape_key`s.
            shapes: unused; `LocalBackend` needs it.

        Returns:
            The number of visual tokens that the first request keeps.
        """
        return embed_prompts(self._model, chats)[0].start.kept

    def _run(self, jobs: Sequence[Job]) -> None:
        """Computes the prompt row of each job and reports the row as the job's event."""
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

    async def answer(self, chat: ChatRequest) -> AsyncGenerator[Any]:
        """Yields the events of an answer. Closing the iterator cancels the engine's work.

        Args:
            chat: the request.

        Yields:
            The token counts of the prompt, and then the tokens of the answer.

        Raises:
            RequestError: the engine refuses the request, is unreachable, fails, or is too slow.
        """
        async with contextlib.aclosing(self.batcher.events(chat)) as events:
            row = await anext(events)
        yield row.start
        async with self._connection_errors():
            if self._engine_model is None:
                models = (await self._get("/v1/models")).json()
                self._engine_model = str(models["data"][0]["id"])
            body = await asyncio.to_thread(self._completion_body, chat, row, self._engine_model)
            headers, path = {"content-type": "application/json"}, "/v1/completions"
            stream = self._client.stream("POST", path, content=body, headers=headers)
            async with stream as response:
                if response.status_code != 200:
                    self._engine_model = None  # The engine may have been restarted with another.
                    raise _engine_error(response.status_code, await response.aread())
                # The last tokens are yielded after the complete stream has been read. Otherwise,
                # the connection could not be reused.
                last_tokens, num_unfinished = None, chat.num_choices
                async for line in response.aiter_lines():
                    if last_tokens is None and line.startswith("data: {"):
                        tokens = _parse_event(line.removeprefix("data: "), chat.num_top_logprobs)
                        num_unfinished -= tokens.finish is not None
                        if num_unfinished:
                            yield tokens
                        else:
                            last_tokens = tokens
                if last_tokens is None:
                    raise RequestError(503, "the engine ended its answer early")
        yield last_tokens

    def _completion_body(self, chat: ChatRequest, row: PromptRow, engine_model: str) -> bytes:
        """Returns the JSON body of the request to the engine.

        An engine takes absent fields from the model's folder, so every field that affects the
        answer is set.

        Args:
            chat: the request of the client.
            row: the prompt.
            engine_model: name of the engine's model.
        """
        fields = {
            "model": engine_model,
            "prompt_embeds": base64.b64encode(tensor_file(row.embeddings)).decode(),
            "max_tokens": chat.options.max_tokens,
            "temperature": chat.sampling.temperature,
            "top_p": chat.sampling.top_p,
            "top_k": 0,
            "repetition_penalty": self._model.repetition_penalty,
            "stream": True,
            "return_token_ids": True,
        }
        return json.dumps({**fields, **chat.engine_fields}).encode()

    @contextlib.asynccontextmanager
    async def _connection_errors(self) -> AsyncIterator[None]:
        """Converts connection failures and unexpected responses to RequestErrors for the client."""
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


def _parse_event(event: str, num_top_logprobs: int | None = None) -> AnswerTokens:
    """Parses a server-sent event of the engine.

    Args:
        event: the event's JSON data.
        num_top_logprobs: number of most probable tokens to report at each position; None if the
            request does not ask for log-probabilities.

    Raises:
        RequestError: the event reports an error.
        ValueError, LookupError, TypeError: the event has an unexpected format.
    """
    fields = json.loads(event)
    if "error" in fields:
        raise RequestError(503, f"the engine failed: {_error_message(event)}")
    choice = fields["choices"][0]
    logprobs = ()
    if num_top_logprobs is not None and choice.get("logprobs"):
        logprobs = _parse_logprobs(choice["logprobs"], num_top_logprobs)
    ids, finish_reason = tuple(choice.get("token_ids") or ()), choice.get("finish_reason")
    return AnswerTokens(ids, finish_reason, choice.get("index", 0), logprobs)


def _parse_logprobs(fields: dict[str, Any], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Parses the log-probabilities of an event, in the format of OpenAI's completions.

    Args:
        fields: lists with one element per position: "tokens", "token_logprobs", and "top_logprobs",
            an object of log-probabilities by token that also has the sampled token.
        num_top: number of most probable tokens to return at each position.
    """
    positions = zip(fields["tokens"], fields["token_logprobs"], fields["top_logprobs"], strict=True)
    return tuple(
        TokenLogprobs(
            token,
            logprob,
            tuple(sorted((top or {}).items(), key=lambda item: -item[1])[:num_top]),
        )
        for token, logprob, top in positions
    )


def _engine_error(status: int, content: bytes) -> RequestError:
    """Converts an error response of the engine to the error for the client."""
    message = f"the engine answers {status}: {_error_message(content)}"
    return RequestError(_CLIENT_STATUS.get(status, 503), message)


def _error_message(content: str | bytes) -> str:
    """Extracts the message of an engine's error; returns content of an unknown format unchanged."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        content = json.loads(content)["error"]["message"]
    return str(content)[:_MAX_ERROR_LENGTH]
