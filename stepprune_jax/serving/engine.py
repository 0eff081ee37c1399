"""The language model in another server: rows of embeddings are sent to an engine such as vLLM.

The engine is not modified. It takes `prompt_embeds` at its `/v1/completions`: the embeddings of the
text, and the kept tokens after the projector in place of each image. So it need not know of
pruning, and rows of any length, and of any number of kept tokens, share its batches.
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
from stepprune_jax.inference.request import join_requests
from stepprune_jax.policy.buckets import row_bucket
from stepprune_jax.serving.batching import Batcher, Job, Started, Tokens, padded
from stepprune_jax.serving.errors import RequestError
from stepprune_jax.serving.messages import ChatRequest
from stepprune_jax.serving.metrics import Metrics
from stepprune_jax.serving.tensors import tensor_file

_CONNECT_SECONDS = 5.0
_REFUSALS = {400: 400, 413: 400, 422: 400, 429: 429}  # status of the engine: status of this server


class ReadyPrompt(NamedTuple):
    """A prompt that is ready for the language model.

    Attributes:
        embeddings: [s, e] its tokens, without padding.
        started: their numbers.
    """

    embeddings: Float[np.ndarray, "s e"]
    started: Started


def embed(model: VLM, chats: Sequence[ChatRequest]) -> list[ReadyPrompt]:
    """Runs tower, choice and projector for requests with one pruner.

    Rows do not depend on each other. Shapes are those of buckets, and tower and choice have their
    own programs, so that a new length of the text compiles neither.

    Args:
        model: the model.
        chats: the requests.

    Returns:
        A row for each request.
    """
    pruner, options = chats[0].pruner, chats[0].options
    joined = join_requests([chat.request for chat in padded(chats)])
    prompts, images = joined.prompts(), joined.images
    if images is not None:
        count = len(images.grid)
        rows = np.arange(row_bucket(count))
        rows = np.where(rows < count, rows, 0)
        pixels = jax.tree.map(lambda part: part[rows], images.pixels)
        images = Images(*(part[rows] for part in images[:3]), pixels)
        taps = pruner.taps(model.config)
        images = pipeline.encode(model, images, taps, options.execution)
    batch = pipeline.prepare(model, pruner, prompts, images, options)
    hidden, length = pipeline.embed(model, batch)
    counts = zip(length.tolist(), batch.visual_tokens.tolist(), batch.kept.tolist(), strict=True)
    rows = zip(hidden, map(Started._make, counts), strict=True)
    return [ReadyPrompt(row[: started.prompt_tokens], started) for row, started in rows][
        : len(chats)
    ]


class Engine:
    """Answers with an engine."""

    samples = False  # the engine draws tokens

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
        """Starts the worker; the engine need not be there yet.

        Args:
            model: the model, which needs its tower, its projector and its embeddings.
            address: the engine's, such as http://127.0.0.1:8000.
            metrics: where batches are counted.
            seconds: longest time to wait for the engine's next token.
            batch_size: most requests that tower and policy run together.
            batch_seconds: longest time that one waits for others.
        """
        self._model, self._address, self._name = model, address.rstrip("/"), None
        self.batch_size = batch_size
        timeout = httpx2.Timeout(seconds, connect=_CONNECT_SECONDS, pool=None)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=32)
        # No proxy of the environment: the engine is one's own.
        self._client = httpx2.AsyncClient(
            base_url=self._address, timeout=timeout, limits=limits, trust_env=False
        )
        # The number of images bounds the programs.
        self.batcher = Batcher(
            self._run,
            lambda chat: (id(chat.pruner), chat.num_images),
            batch_size,
            batch_seconds,
            metrics,
        )

    def warm(self, chats: Sequence[ChatRequest], shapes: set[Hashable]) -> int:
        """Compiles the programs of a batch; returns the visual tokens of the first request."""
        return embed(self._model, chats)[0].started.kept

    def _run(self, jobs: Sequence[Job]) -> None:
        """Reports its row to each job."""
        for job, row in zip(jobs, embed(self._model, [job.chat for job in jobs]), strict=True):
            job.put(row)

    async def close(self) -> None:
        """Ends the connections."""
        await self._client.aclose()

    async def check(self) -> None:
        """Raises a RequestError unless the engine answers."""
        async with self._errors():
            await self._get("/health")

    async def _get(self, path: str) -> httpx2.Response:
        response = await self._client.get(path, timeout=_CONNECT_SECONDS)
        if response.status_code != 200:
            raise _refusal(response.status_code, response.content)
        return response

    async def answer(self, chat: ChatRequest) -> AsyncIterator[Started | Tokens]:
        """Yields the events of an answer; closing the iterator ends the engine's work on it.

        Raises:
            RequestError: the engine refuses the request, is not there, is lost, or is too slow.
        """
        async with contextlib.aclosing(self.batcher.events(chat)) as events:
            row = await anext(events)
        yield row.started
        async with self._errors():
            if self._name is None:
                self._name = (await self._get("/v1/models")).json()["data"][0]["id"]
            body = await asyncio.to_thread(self._body, chat, row, self._name)
            async with self._client.stream(
                "POST",
                "/v1/completions",
                content=body,
                headers={"content-type": "application/json"},
            ) as response:
                if response.status_code != 200:
                    self._name = None  # another model may be served by now
                    raise _refusal(response.status_code, await response.aread())
                last = None  # is held back: a connection whose stream has ended is used again
                async for line in response.aiter_lines():
                    if last is None and line.startswith("data: {"):
                        tokens = _tokens(line.removeprefix("data: "))
                        if tokens.finish is None:
                            yield tokens
                        else:
                            last = tokens
                if last is None:
                    raise RequestError(503, "the engine ended its answer early")
        yield last

    def _body(self, chat: ChatRequest, row: ReadyPrompt, name: str) -> bytes:
        """Returns the request to the engine, which fills what it lacks from the model's folder."""
        fields = {
            "model": name,
            "prompt_embeds": base64.b64encode(tensor_file(row.embeddings)).decode(),
            "max_tokens": chat.options.max_tokens,
            "temperature": float(chat.sampling.temperature),
            "top_p": float(chat.sampling.top_p),
            "top_k": 0,
            "repetition_penalty": self._model.repetition_penalty,
            "stream": True,
            "return_token_ids": True,
        }
        return json.dumps({**fields, **chat.passed}).encode()

    @contextlib.asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        """Turns what may happen to a connection into errors of the request."""
        try:
            yield
        except httpx2.TimeoutException as error:
            raise RequestError(503, f"the engine at {self._address} is too slow") from error
        except httpx2.TransportError as error:
            self._name = None  # another one may be started in its place
            message = f"the engine at {self._address} is not there: {error or type(error).__name__}"
            raise RequestError(503, message) from error
        except (ValueError, LookupError, TypeError) as error:
            message = f"the engine at {self._address} answers in another format: {error!r}"
            raise RequestError(503, message) from error


def _tokens(event: str) -> Tokens:
    """Reads an event of the engine's stream."""
    fields = json.loads(event)
    if "error" in fields:
        raise RequestError(503, f"the engine failed: {_message(event)}")
    choice = fields["choices"][0]
    return Tokens(tuple(choice.get("token_ids") or ()), choice.get("finish_reason"))


def _refusal(status: int, content: bytes) -> RequestError:
    """Returns the error of a request that the engine has refused."""
    message = f"the engine answers {status}: {_message(content)}"
    return RequestError(_REFUSALS.get(status, 503), message)


def _message(content: str | bytes) -> str:
    """Returns what the engine says of an error, in whatever way."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        content = json.loads(content)["error"]["message"]
    return str(content)[:500]
