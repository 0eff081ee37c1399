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
    """Decodes an answer token by token into pieces of text.

    The concatenation of all pieces is `answer_text` of all tokens. A piece never contains text that
    a later token could change. These kinds of text wait for later tokens: white space at the end,
    because the text of an answer is stripped; incomplete characters; a run of byte tokens, because
    one invalid byte makes the decoder replace the entire run; and a possible beginning of a stop
    text.

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
        self._num_final = 0  # ids before the current run of byte tokens
        self._returned = ""  # concatenation of the pieces so far

    def add(self, token: int) -> str:
        """Adds a token; tokens after a stop text are ignored.

        Args:
            token: id of the token.

        Returns:
            The next piece of text; often empty.
        """
        if self.stopped:
            return ""
        self._ids.append(token)
        if self._stop:  # a stop text may be complete while its bytes still wait
            decoded = _decode(self._tokenizer, self._ids)
            self.stopped = any(text in decoded for text in self._stop)
            if self.stopped:
                return self.finish()
        name = self._tokenizer.convert_ids_to_tokens(token)
        is_byte = isinstance(name, str) and _BYTE.fullmatch(name)
        # Tokens without text, such as special ones, do not end a run of bytes.
        if not is_byte and _decode(self._tokenizer, [token]):
            self._num_final = len(self._ids)
        text = _decode(self._tokenizer, self._ids[: self._num_final]).rstrip(_UNKNOWN)
        num_waiting = max((_overlap(text, stop) for stop in self._stop), default=0)
        return self._next_piece(text[: len(text) - num_waiting].strip())

    def finish(self) -> str:
        """Returns the last piece of text, after the last token."""
        text = _decode(self._tokenizer, self._ids)
        stop_starts = [text.find(stop) for stop in self._stop if stop in text]
        return self._next_piece(text[: min(stop_starts, default=None)].strip())

    def _next_piece(self, text: str) -> str:
        """Returns the part of `text` that earlier calls have not returned.

        Returns "" if `text` does not begin with the returned text, as at white space that was
        stripped from its end.
        """
        if not text.startswith(self._returned):
            return ""
        piece = text[len(self._returned) :]
        self._returned = text
        return piece


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest incomplete beginning of `stop` at the end of `text`."""
    max_length = min(len(text), len(stop) - 1)
    return next((length for length in range(max_length, 0, -1) if text.endswith(stop[:length])), 0)


def stream_text(
    tokenizer: Tokenizer, tokens: Generator[tuple[int, int], None, Answers]
) -> Generator[str, None, Answers]:
    """Decodes the tokens of one answer as they arrive.

    Args:
        tokenizer: a `transformers` tokenizer.
        tokens: generator of (row, id) of each token of a single row, such as `Generator.stream`. An
            id of -1 is ignored.

    Yields:
        One piece of text per token, often empty, and a last piece after all tokens; see
        `TextStream`.

    Returns:
        The value that `tokens` returns.
    """
    text_stream = TextStream(tokenizer)
    while True:
        try:
            _, token = next(tokens)
        except StopIteration as end:
            yield text_stream.finish()
            return end.value
        if token >= 0:
            yield text_stream.add(token)
