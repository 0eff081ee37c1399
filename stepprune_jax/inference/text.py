"""Text of tokens as they are generated."""

import re
from collections.abc import Sequence

from stepprune_jax.data.prompts import TOKENIZER_LOCK
from stepprune_jax.models.config import Tokenizer

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# Written by a decoder for bytes that are not (yet) a character.
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

    Text that a later token could still change is held back: white space at the end, which may turn
    out to be the end of the answer; incomplete characters; a run of byte tokens, which is decoded
    as a whole (one bad byte makes all of them unknown); and what may be the beginning of a text
    that ends the answer.

    Attributes:
        stopped: whether the answer has been ended by a text, which is no part of it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        """Starts an empty stream.

        Args:
            tokenizer: a `transformers` tokenizer.
            stop: texts that end the answer.
        """
        self._tokenizer, self._stop, self.stopped = tokenizer, stop, False
        self._ids: list[int] = []
        self._settled = 0
        self._written = ""

    def add(self, token: int) -> str:
        """Reads a token; those behind the end are skipped.

        Args:
            token: its id.

        Returns:
            The text that has become final; often empty.
        """
        if self.stopped:
            return ""
        self._ids.append(token)
        if self._stop:  # also in bytes that are not settled: the model would go on for nothing
            whole = _decode(self._tokenizer, self._ids)
            self.stopped = any(text in whole for text in self._stop)
            if self.stopped:
                return self.finish()
        name = self._tokenizer.convert_ids_to_tokens(token)
        is_byte = isinstance(name, str) and _BYTE.fullmatch(name)
        # Tokens without text, such as special ones, do not end a run of bytes.
        if not is_byte and _decode(self._tokenizer, [token]):
            self._settled = len(self._ids)
        text = _decode(self._tokenizer, self._ids[: self._settled]).rstrip(_UNKNOWN)
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        return self._advance(text[: len(text) - held].strip())

    def finish(self) -> str:
        """Returns the rest of the text, once no token follows."""
        text = _decode(self._tokenizer, self._ids)
        ends = [text.find(stop) for stop in self._stop if stop in text]
        return self._advance(text[: min(ends, default=None)].strip())

    def _advance(self, text: str) -> str:
        """Returns the part of `text` that has not been written yet."""
        if not text.startswith(self._written):
            return ""
        piece = text[len(self._written) :]
        self._written = text
        return piece


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of a text may begin a longer one."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
