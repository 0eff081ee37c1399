"""What answers a request, with an engine or without: the same events, token by token."""

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

from stepprune_jax.serving.batching import Batcher
from stepprune_jax.serving.messages import Chat


class Started(NamedTuple):
    """The first event of an answer.

    Attributes:
        prompt_tokens: length of the row that enters the language model.
        visual_tokens: visual tokens of the images.
        kept: number of these that remain.
    """

    prompt_tokens: int
    visual_tokens: int
    kept: int


class Tokens(NamedTuple):
    """Some tokens of an answer.

    Attributes:
        ids: their ids.
        finish: why these are the last ones, "stop" or "length"; None if they are not.
    """

    ids: tuple[int, ...]
    finish: str | None = None


class Backend(Protocol):
    """What answers; `engine.Engine` or `local.Local`.

    Attributes:
        batcher: its worker.
    """

    batcher: Batcher

    def answer(self, chat: Chat) -> AsyncIterator[Started | Tokens]:
        """Yields the events of an answer; closing the iterator ends the work on it.

        Raises:
            RequestError: the request cannot be answered.
        """

    async def check(self) -> None:
        """Raises a RequestError unless requests can be answered."""

    async def close(self) -> None:
        """Ends what it holds, except the worker."""


def padded(chats: Sequence[Chat]) -> list[Chat]:
    """Repeats the first request until their number is a power of two, to bound the programs."""
    size = 1 << (len(chats) - 1).bit_length()
    return [*chats, *[chats[0]] * (size - len(chats))]
