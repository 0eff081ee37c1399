"""Builds a small word tokenizer from the texts of a data folder."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple


class Template(NamedTuple):
    """Tokens of a model family's prompts.

    Attributes:
        special: tokens with the first ids. The first one replaces unknown words.
        start: token in front of every text; None for a family without such a token.
        end: token that ends an answer.
        words: words of prompts that the data does not have, such as the roles.
        system: the beginning of every prompt; None for prompts without a system prompt.
        added: further tokens, including the token of an image.
    """

    special: tuple[str, ...]
    start: str | None
    end: str
    words: str
    system: str | None
    added: tuple[str, ...]


def build_tokenizer(texts: Iterable[str], template: Template, max_words: int = 8000) -> Any:
    """Builds a tokenizer with one token for each word, digit or sign, which ignores case.

    A system prompt is a single token. Otherwise it would be a third of a small model's sequence.

    Args:
        texts: texts whose words are the vocabulary.
        template: tokens of the prompts.
        max_words: largest number of words; rarer words become the unknown token.
    """
    import tokenizers
    import transformers

    split = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.WhitespaceSplit(),
            tokenizers.pre_tokenizers.Punctuation(),
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    lower = tokenizers.normalizers.Lowercase()
    counts: Counter[str] = Counter()
    for text in (*texts, template.words):
        counts.update(word for word, _ in split.pre_tokenize_str(lower.normalize_str(text)))
    # Sorted by count and then alphabetically, so that ids do not depend on the order of texts.
    words = sorted(counts, key=lambda word: (-counts[word], word))[:max_words]
    vocabulary = {word: number for number, word in enumerate((*template.special, *words))}
    unknown, start = template.special[0], template.start
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=unknown))
    backend.normalizer, backend.pre_tokenizer = lower, split
    if start is not None:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{start} $A",
            pair=f"{start} $A $B",
            special_tokens=[(start, vocabulary[start])],
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=start, eos_token=template.end, unk_token=unknown
    )
    if template.system is not None:
        tokenizer.add_tokens([tokenizers.AddedToken(template.system, normalized=False)])
    tokenizer.add_tokens(list(template.added), special_tokens=True)
    return tokenizer
