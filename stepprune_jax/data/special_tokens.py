"""Encodes special tokens in a user's text as plain text.

A tokenizer finds its special tokens, such as `<|im_end|>`, anywhere in a prompt. The special tokens
of the chat template must act as such. A special token that a user typed must not, because a user
could otherwise end the user's turn and begin a system turn.
"""

import re
import secrets
import types
from typing import Any

from stepprune_jax.data.prompts import IMAGE_MARK

# Inserted into the special tokens of quoted text, so that no token matches. Unicode assigns no
# character to this code point.
_BREAK = "\U0010ffff"


class QuotingTokenizer:
    """A tokenizer that encodes the special tokens of quoted texts as plain text.

    A call takes the arguments of the wrapped tokenizer, and returns the same ids for a prompt
    without quoted special tokens. All other attributes come from the wrapped tokenizer. ::

        quoting = QuotingTokenizer(tokenizer)
        prompt = backbone.conversation([quoting.quote(question)])
        ids = quoting(prompt).input_ids
    """

    def __init__(self, tokenizer: Any):
        """Wraps a tokenizer.

        Args:
            tokenizer: a fast tokenizer of `transformers`, which must not be changed afterwards.
        """
        import tokenizers

        backend = tokenizer.backend_tokenizer
        special_tokens = {
            token_id: token
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._tokenizer = tokenizer
        contents = sorted({token.content for token in special_tokens.values()} - {IMAGE_MARK})
        alternatives = "|".join(map(re.escape, contents))
        # Matches the first character of a special token. The lookahead also finds tokens that
        # overlap.
        self._first_character = (
            re.compile(f"(?=(?:{alternatives}))(.)", re.DOTALL) if contents else None
        )
        # A copy of the tokenizer encodes special tokens as text. Each special token also has an
        # alias in the copy: an ordinary token with the same rules and a random name that no user
        # can guess. To encode a prompt, special tokens of the template are replaced by their
        # aliases, and the ids of aliases are replaced by the ids of the special tokens.
        self._copy = tokenizers.Tokenizer.from_str(backend.to_str())
        self._copy.encode_special_tokens = True
        self._copy.no_padding()
        self._copy.no_truncation()
        salt = secrets.token_hex(16)
        self._aliases = {
            token.content: f"<{salt}{token_id}>" for token_id, token in special_tokens.items()
        }
        self._copy.add_tokens(
            [
                tokenizers.AddedToken(
                    self._aliases[token.content],
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=False,
                )
                for token in special_tokens.values()
            ]
        )
        self._id_of_alias = {
            self._copy.token_to_id(self._aliases[token.content]): token_id
            for token_id, token in special_tokens.items()
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def quote(self, text: str) -> str:
        """Returns a text with `_BREAK` inside each special token except `IMAGE_MARK`."""
        if self._first_character is None:
            return text
        return self._first_character.sub(rf"\1{_BREAK}", text)

    def __call__(self, text: str, **options: Any) -> Any:
        """Encodes a prompt with quoted parts.

        Args:
            text: the prompt. Parts written by users went through `quote`.
            **options: options of the wrapped tokenizer. For a prompt with a quoted special token,
                only `add_special_tokens` has an effect.

        Returns:
            An object with the attribute `input_ids`.
        """
        if _BREAK not in text:
            return self._tokenizer(text, **options)
        for special_token, alias in self._aliases.items():
            text = text.replace(special_token, alias)
        # `encode_batch` lets other threads run meanwhile; `encode` would hold Python's global lock.
        (encoded,) = self._copy.encode_batch(
            [text.replace(_BREAK, "")], add_special_tokens=options.get("add_special_tokens", True)
        )
        ids = [self._id_of_alias.get(token_id, token_id) for token_id in encoded.ids]
        return types.SimpleNamespace(input_ids=ids)


def as_sent(message: str) -> str:
    """Returns an error message without the characters that `QuotingTokenizer.quote` inserted."""
    return message.replace(_BREAK, "").replace(repr(_BREAK)[1:-1], "")
