"""Words that a tokenizer maps to `<unk>` are named."""

import types

import pytest

from stepprune_jax.checkpoints.folder import load_tokenizer
from stepprune_jax.data.unknown_words import describe_unknown_words, find_unknown_words
from stepprune_jax.training import ModelSettings


@pytest.fixture(scope="module")
def tokenizer():
    """Returns the tokenizer of the small model, whose vocabulary is words about shapes."""
    return load_tokenizer(ModelSettings(folder="shapes").inspect().folder)


def test_unknown_words_are_named_once_without_punctuation(tokenizer):
    texts = ["What color is the rectangle?", "Is the rectangle big, or the zebra?"]
    words = find_unknown_words(tokenizer, texts)
    assert words[0] == "rectangle" and words[-1] == "zebra" and len(words) == len({*words})
    assert "the" not in words and "?" not in words
    assert find_unknown_words(tokenizer, ["What color is the square?"]) == []
    assert find_unknown_words(tokenizer, []) == []


def test_the_warning_names_the_first_words_and_the_unknown_token(tokenizer):
    assert describe_unknown_words(tokenizer, ["What color is the square?"]) == ""
    texts = [f"zebra{letter}" for letter in "abcdefghijkl"]
    warning = describe_unknown_words(tokenizer, texts)
    assert "'zebraa', " in warning and "'zebrak'" not in warning
    assert " and 2 more: it reads <unk> instead" in warning


def test_a_tokenizer_without_an_unknown_token_reads_no_text():
    tokenizer = types.SimpleNamespace(unk_token_id=None)
    assert find_unknown_words(tokenizer, iter(["zebra"])) == []
