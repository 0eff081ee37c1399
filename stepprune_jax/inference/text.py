"""From generated ids to text: the layer above the generators of ids."""

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

from stepprune_jax.data.prompts import TOKENIZER_LOCK
from stepprune_jax.models.config import Tokenizer

Answers = TypeVar("Answers")

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# A decoder writes this character for bytes that are not a character, or not yet.
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def answer_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Decodes an answer, without special tokens and surrounding white space."""
    return _decode(tokenizer, token_ids).strip()


def _decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Decodes ids without special tokens."""
    # Cleaning up would rewrite earlier text depending on what follows.
    with TOKENIZER_LOCK:
        return tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class TextStream:
    """Turns tokens into pieces of text that concatenate to `answer_text` of all of them.

    Text that a later token could still change is held back: white space at the end, because the
    text of an answer is stripped; incomplete characters; a run of byte tokens, because one bad byte
    makes all of them unknown; and a possible beginning of a stop text.

    Attributes:
        stopped: whether a stop text has ended the answer. The answer does not include the stop
            text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        """Starts an empty stream.

        Args:
            tokenizer: a `transformers` tokenizer.
            stop: stop texts, which end the answer.
        """
        self._tokenizer, self._stop, self.stopped = tokenizer, stop, False
        self._ids: list[int] = []
        self._settled = 0
        self._written = ""

    def add(self, token: int) -> str:
        """Adds a token; tokens after a stop text are ignored.

        Args:
            token: the id.

        Returns:
            The text that has become final; often empty.
        """
        if self.stopped:
            return ""
        self._ids.append(token)
        if self._stop:  # a stop text may be complete before its bytes are final
            decoded = _decode(self._tokenizer, self._ids)
            self.stopped = any(text in decoded for text in self._stop)
            if self.stopped:
                return self.finish()
        name = self._tokenizer.convert_ids_to_tokens(token)
        is_byte = isinstance(name, str) and _BYTE.fullmatch(name)
        # Tokens without text, such as special ones, do not end a run of bytes.
        if not is_byte and _decode(self._tokenizer, [token]):
            self._settled = len(self._ids)
        text = _decode(self._tokenizer, self._ids[: self._settled]).rstrip(_UNKNOWN)
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        return self._advance(text[: len(text) - num_held].strip())

    def finish(self) -> str:
        """Returns the text that was held back, after the last token."""
        text = _decode(self._tokenizer, self._ids)
        ends = [text.find(stop) for stop in self._stop if stop in text]
        return self._advance(text[: min(ends, default=None)].strip())

    def _advance(self, text: str) -> str:
        """Returns the part of `text` after the text that earlier calls returned."""
        if not text.startswith(self._written):
            return ""
        piece = text[len(self._written) :]
        self._written = text
        return piece


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of a text are the beginning of a stop text."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)


def stream_text(
    tokenizer: Tokenizer, tokens: Generator[tuple[int, int], None, Answers]
) -> Generator[str, None, Answers]:
    """Turns the ids of one answer into pieces of text.

    Args:
        tokenizer: a `transformers` tokenizer.
        tokens: (row, id) of each token of a single row, as from `Generator.stream`.

    Yields:
        One piece per token: the text that has become final, often empty. After the last token one
        more piece, the text that was held back.

    Returns:
        The value of `tokens`.
    """
    text = TextStream(tokenizer)
    while True:
        try:
            _, token = next(tokens)
        except StopIteration as end:
            yield text.finish()
            return end.value
        if token >= 0:
            yield text.add(token)
