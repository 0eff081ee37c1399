"""Finds words that a tokenizer does not know."""

from collections.abc import Iterable
from typing import Any

from stepprune_jax.data.prompts import TOKENIZER_LOCK

# No vocabulary has a word with this character, because Unicode assigns no character to it.
_PROBE = "\ue000"
_MAX_WORDS = 10  # words in a warning


def find_unknown_words(tokenizer: Any, texts: Iterable[str]) -> list[str]:
    """Returns the words that a tokenizer maps to its unknown token, in the order of the texts.

    Tokenizers that spell unknown words in bytes or characters have no such words, and their texts
    are not read.

    Args:
        tokenizer: a fast `transformers` tokenizer.
        texts: texts, such as questions.
    """
    unknown_id = tokenizer.unk_token_id

    def encode(words: list[str]) -> Any:
        with TOKENIZER_LOCK:
            return tokenizer(words, add_special_tokens=False, return_offsets_mapping=True)

    if unknown_id is None or unknown_id not in encode([_PROBE]).input_ids[0]:
        return []
    words = list(dict.fromkeys(word for text in texts for word in text.split()))
    if not words:
        return []
    encoded = encode(words)
    unknown_words = [
        word[start:end]
        for word, ids, offsets in zip(words, encoded.input_ids, encoded.offset_mapping, strict=True)
        for token_id, (start, end) in zip(ids, offsets, strict=True)
        if token_id == unknown_id
    ]
    return list(dict.fromkeys(unknown_words))


def describe_unknown_words(tokenizer: Any, texts: Iterable[str]) -> str:
    """Returns a warning that names unknown words of texts; "" without such words."""
    words = find_unknown_words(tokenizer, texts)
    if not words:
        return ""
    more = f" and {len(words) - _MAX_WORDS} more" if len(words) > _MAX_WORDS else ""
    return (
        f"the model's vocabulary lacks {', '.join(map(repr, words[:_MAX_WORDS]))}{more}: it reads "
        f"{tokenizer.unk_token} instead, and may answer worse"
    )
