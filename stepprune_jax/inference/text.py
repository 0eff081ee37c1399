"""From generated ids to text: the layer above the generators of ids."""

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

from stepprune_jax.models.config import Tokenizer

Answers = TypeVar("Answers")

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# A decoder writes this character for bytes that are not a character, or not yet.
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def answer_text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Decodes an answer, without special tokens and surrounding white space."""
    return _decode(tokenizer, token_ids).strip()


def _decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Decodes ids without special tokens.

    Takes no `TOKENIZER_LOCK`, because decoding changes no settings of a tokenizer. A server
    therefore decodes without waiting for a thread that encodes a long prompt.
    """
    # Cleaning up would rewrite earlier text depending on what follows.
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

    A token is decoded together with the few tokens that wait, and with the tokens before them as
    context, so its cost does not depend on the length of the answer. The context is needed because
    decoders remove a space at the start of a text.

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
        self._context: list[int] = []  # the last ids whose text is final
        self._waiting: list[int] = []  # later ids, whose text may still change
        self._text = ""  # final text that no piece contains yet
        self._has_text = False  # whether a piece was not empty

    def add(self, token: int) -> str:
        """Adds a token; tokens after a stop text are ignored.

        Args:
            token: id of the token.

        Returns:
            The next piece of text; often empty.
        """
        if self.stopped:
            return ""
        self._waiting.append(token)
        if self._stop:  # a stop text may be complete while its bytes still wait
            text = self._text + self._decode_waiting()
            self.stopped = any(stop in text for stop in self._stop)
            if self.stopped:
                return self.finish()
        name = self._tokenizer.convert_ids_to_tokens(token)
        is_byte = isinstance(name, str) and _BYTE.fullmatch(name)
        # Tokens without text, such as special ones, do not end a run of bytes.
        if not is_byte and _decode(self._tokenizer, [token]):
            text = self._decode_waiting()
            if not text.endswith(_UNKNOWN):
                self._text += text
                self._context, self._waiting = self._waiting, []
        num_waiting = max((_overlap(self._text, stop) for stop in self._stop), default=0)
        return self._take_piece(len(self._text) - num_waiting)

    def finish(self) -> str:
        """Returns the last piece of text, after the last token."""
        self._text += self._decode_waiting()
        self._waiting = []
        stop_starts = [self._text.find(stop) for stop in self._stop if stop in self._text]
        return self._take_piece(min(stop_starts, default=len(self._text)))

    def _decode_waiting(self) -> str:
        """Decodes the waiting ids as the continuation of the context."""
        context_length = len(_decode(self._tokenizer, self._context))
        return _decode(self._tokenizer, self._context + self._waiting)[context_length:]

    def _take_piece(self, length: int) -> str:
        """Removes a piece from the start of `_text`, and returns the piece.

        White space at the end of the piece stays in `_text`. White space at the start of the answer
        is removed.

        Args:
            length: number of characters that the piece may have.
        """
        length = len(self._text[:length].rstrip())
        piece, self._text = self._text[:length], self._text[length:]
        if not self._has_text:
            piece = piece.lstrip()
        self._has_text = self._has_text or bool(piece)
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
