"""A small word tokenizer, built from the words of a data folder."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple


class Template(NamedTuple):
    """Tokens of a family's prompts.

    Attributes:
        special: tokens of the ids from 0, the one for unknown words first.
        start: the one that stands in front of any text; None without one.
        end: the one that ends an answer.
        words: what prompts say besides, such as the roles.
        system: what every prompt begins with.
        added: further tokens, that of an image among them.
    """

    special: tuple[str, ...]
    start: str | None
    end: str
    words: str
    system: str
    added: tuple[str, ...]


def build_tokenizer(texts: Iterable[str], template: Template, most_words: int = 8000) -> Any:
    """Builds a tokenizer with one token for each word, number or sign.

    Case is ignored. The system prompt, the same in every prompt, is a single token: a small model
    should not spend a third of its sequence on it. Unknown words become the template's first token.
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
    # By count, then alphabetically: the same texts in any order give the same ids.
    words = sorted(counts, key=lambda word: (-counts[word], word))[:most_words]
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
    tokenizer.add_tokens([tokenizers.AddedToken(template.system, normalized=False)])
    tokenizer.add_tokens(list(template.added), special_tokens=True)
    return tokenizer
