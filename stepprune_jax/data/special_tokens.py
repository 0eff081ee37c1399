"""Encodes special tokens in a user's text as plain text.

A tokenizer finds its special tokens, such as `<|im_end|>`, anywhere in a prompt. A prompt has the
special tokens of the template, which have to act, and the texts of users, who could close their own
turn with such a token and open a turn of the system.
"""

import re
import secrets
import types
from typing import Any

from stepprune_jax.data.prompts import IMAGE_MARK

# Breaks the special tokens of quoted text. Unicode reserves this code point for such uses.
_BREAK = "\U0010ffff"


class QuotingTokenizer:
    """A tokenizer for prompts with quoted texts of users.

    A call has the arguments of the wrapped tokenizer, and returns its ids for a prompt without
    quoted special tokens. All other attributes are the attributes of the wrapped tokenizer. ::

        quoting = QuotingTokenizer(tokenizer)
        prompt = backbone.conversation([quoting.quote(question)])
        ids = quoting(prompt).input_ids
    """

    def __init__(self, tokenizer: Any):
        """Copies a fast tokenizer of `transformers`, which must not change from now on."""
        import tokenizers

        backend = tokenizer.backend_tokenizer
        special = {
            number: token
            for number, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._tokenizer = tokenizer
        texts = sorted(token.content for token in special.values() if token.content != IMAGE_MARK)
        any_special = "|".join(map(re.escape, texts))
        # A lookahead, because special tokens may overlap.
        self._first = re.compile(f"(?=(?:{any_special}))(.)", re.DOTALL) if texts else None
        # In the copy, special tokens are text. It has other names for the special tokens of the
        # template, which no user can guess, with the same rules.
        self._copy = tokenizers.Tokenizer.from_str(backend.to_str())
        self._copy.encode_special_tokens = True
        self._copy.no_padding()
        self._copy.no_truncation()
        salt = secrets.token_hex(16)
        self._names = {token.content: f"<{salt}{number}>" for number, token in special.items()}
        self._copy.add_tokens(
            [
                tokenizers.AddedToken(
                    self._names[token.content],
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=False,
                )
                for token in special.values()
            ]
        )
        self._ids = {
            self._copy.token_to_id(self._names[token.content]): number
            for number, token in special.items()
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def quote(self, text: str) -> str:
        """Marks the special tokens of a text, other than the mark of an image, as plain text."""
        return text if self._first is None else self._first.sub(rf"\1{_BREAK}", text)

    def __call__(self, text: str, **options: Any) -> Any:
        """Encodes a text whose parts may be quoted; options are for the tokenizer.

        Returns:
            An object with `input_ids`.
        """
        if _BREAK not in text:
            return self._tokenizer(text, **options)
        for token, name in self._names.items():
            text = text.replace(token, name)
        with_start = options.get("add_special_tokens", True)
        encoded = self._copy.encode(text.replace(_BREAK, ""), add_special_tokens=with_start)
        return types.SimpleNamespace(input_ids=[self._ids.get(x, x) for x in encoded.ids])


def as_sent(message: str) -> str:
    """Restores a quoted text in a message."""
    return message.replace(_BREAK, "").replace(repr(_BREAK)[1:-1], "")
