"""Text of tokens as they are generated."""

import re
from collections.abc import Sequence

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
    return tokenizer.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


class TextStream:
    """Turns tokens into pieces of text that concatenate to `answer_text` of all of them.

    Text that a later token could still change is held back: white space at the end, which may turn
    out to be the end of the answer; incomplete characters; and a run of byte tokens, which is
    decoded as a whole (one bad byte makes all of them unknown).
    """

    def __init__(self, tokenizer: Tokenizer):
        """Starts an empty stream; `tokenizer` is a `transformers` tokenizer."""
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._settled = 0
        self._written = ""

    def add(self, token: int) -> str:
        """Reads a token.

        Args:
            token: its id.

        Returns:
            The text that has become final; often empty.
        """
        self._ids.append(token)
        name = self._tokenizer.convert_ids_to_tokens(token)
        is_byte = isinstance(name, str) and _BYTE.fullmatch(name)
        # Tokens without text, such as special ones, do not end a run of bytes.
        if not is_byte and _decode(self._tokenizer, [token]):
            self._settled = len(self._ids)
        text = answer_text(self._tokenizer, self._ids[: self._settled])
        return self._advance(text.rstrip(_UNKNOWN).rstrip())

    def finish(self) -> str:
        """Returns the rest of the text, once no token follows."""
        return self._advance(answer_text(self._tokenizer, self._ids))

    def _advance(self, text: str) -> str:
        """Returns the part of `text` that has not been written yet."""
        if not text.startswith(self._written):
            return ""
        piece = text[len(self._written) :]
        self._written = text
        return piece
