"""Encoding of conversations: known labels, LLaVA's labels by counting, and unusual texts."""

import dataclasses
import functools
import json
import types

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from stepprune_jax import testing
from stepprune_jax.data.encoding import IGNORE
from stepprune_jax.data.prompts import IMAGE_TOKEN, tokenize_with_images
from stepprune_jax.models.llava import Llava
from stepprune_jax.models.llava_next.backbone import LlavaNextMistral
from stepprune_jax.testing import llava_encoder


def supervised_ids(encoded):
    return [label for label in encoded.labels if label != IGNORE]


def test_answers_and_their_end_tokens_are_supervised(tokenizer):
    encoded = llava_encoder(tokenizer).encode(["What is this?", "red dog", "two?", "no"], 1)
    names = tokenizer.convert_ids_to_tokens(supervised_ids(encoded))
    assert names == ["▁red", "▁dog", "</s>", "▁no", "</s>"]
    for token, label in zip(encoded.ids, encoded.labels, strict=True):
        assert label in (token, IGNORE)
    assert encoded.labels[encoded.ids.index(IMAGE_TOKEN)] == IGNORE
    text_ids = tokenizer("What is this?\ntwo?", add_special_tokens=False).input_ids
    assert encoded.text == text_ids


def test_answers_to_mistrals_prompts_are_supervised(tokenizer):
    encoder = llava_encoder(tokenizer)
    encoder = dataclasses.replace(encoder, conversation=LlavaNextMistral.conversation)
    encoded = encoder.encode(["What is this?", "red dog", "two?", "no"], 1)
    assert tokenizer.decode(supervised_ids(encoded)) == "red dog </s> no </s>"


def test_ids_without_an_embedding_are_refused(tokenizer):
    encoder = dataclasses.replace(llava_encoder(tokenizer), vocab_size=9)
    with pytest.raises(ValueError, match=r"gives id \d+, expected ids below 9, the model's vocab"):
        encoder.encode(["What is this?", "red dog"], 1)


def labels_by_counting(tokenizer, turns, images, legacy):
    """Returns labels as LLaVA computes them, by tokenizing each round and each instruction."""
    prompt = Llava.conversation([Llava.place_images(turns[0], images), *turns[1:]])
    labels = tokenize_with_images(tokenizer, prompt)
    total, position = len(labels), 1
    labels[0] = IGNORE
    for number, text in enumerate(prompt.split("</s>")[:-1]):
        instruction = text.split(" ASSISTANT: ")[0] + " ASSISTANT: "
        # Without the start token, and without the blank that becomes part of the answer's first
        # word.
        num_masked = len(tokenize_with_images(tokenizer, instruction)) - 2
        num_ids = len(tokenize_with_images(tokenizer, text))
        if number and not legacy:  # no blank follows </s>
            num_masked, num_ids = num_masked - 1, num_ids - 1
        labels[position : position + num_masked] = [IGNORE] * num_masked
        position += num_ids
    assert position == total
    return labels


@functools.cache
def first_blank_tokenizer():
    """Returns a tiny tokenizer like LLaVA-1.5's, with a blank before a text and a token "USER"."""

    state = json.loads(testing.tiny_tokenizer(image_token=False).backend_tokenizer.to_str())
    state["normalizer"] = None
    model = state["model"]
    for first, second in (("U", "S"), ("US", "ER")):
        model["vocab"].setdefault(first + second, len(model["vocab"]))
        model["merges"].append([first, second])
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


WORDS = st.lists(st.sampled_from(["red", "dog", "no", "two", "x?", "é", "12."]), min_size=1).map(
    " ".join
)


@settings(max_examples=25)
@given(rounds=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), images=st.integers(0, 1))
def test_labels_equal_llavas_labels_by_counting(tokenizer, rounds, images):
    turns = [turn for pair in rounds for turn in pair]
    for legacy, llama_tokenizer in ((True, tokenizer), (False, first_blank_tokenizer())):
        encoded = llava_encoder(llama_tokenizer).encode(turns, images)
        assert encoded.labels == labels_by_counting(llama_tokenizer, turns, images, legacy)


@pytest.mark.parametrize(
    ("answer", "supervised_text"),
    [
        ("so I say ASSISTANT: no", "so I say ASSISTANT: no</s>"),
        ("red</s>dog", "red</s> dog</s>"),
        ("USER: red", "USER: red</s>"),
    ],
)
def test_answers_that_llavas_counting_ignores_are_supervised(tokenizer, answer, supervised_text):
    """Counting fails for answers that contain a role name or an end token."""
    encoded = llava_encoder(tokenizer).encode(["What?", "no", "ASSISTANT: a", answer], 1)
    assert tokenizer.decode(supervised_ids(encoded)) == f"no</s> {supervised_text}"


TURN = st.text(st.sampled_from("redog no?.\né漢</s>USER:"), min_size=1, max_size=12).filter(
    str.strip
)


@settings(max_examples=60)
@given(turns=st.lists(TURN, min_size=2, max_size=6), images=st.integers(0, 2))
def test_ids_equal_the_prompt_and_labels_start_where_generation_does(tokenizer, turns, images):
    turns = turns[: len(turns) // 2 * 2]
    encoded = llava_encoder(tokenizer).encode(turns, images)
    marked_turns = [Llava.place_images(turns[0], images), *turns[1:]]
    prompt = Llava.conversation(marked_turns)
    assert encoded.ids == tokenize_with_images(tokenizer, prompt, images)
    # The ids before each answer are the prompt that `generate` would get.
    is_ignored = [label == IGNORE for label in encoded.labels]
    starts = [n for n, ignored in enumerate(is_ignored) if not ignored and is_ignored[n - 1]]
    for number, start in enumerate(starts):
        prompt = Llava.conversation(marked_turns[: 2 * number + 1])
        assert encoded.ids[:start] == tokenize_with_images(tokenizer, prompt, images)
    assert len(starts) == len(turns) // 2
    assert len(encoded.labels) == len(encoded.ids) and encoded.labels[-1] != IGNORE


def test_a_token_that_overlaps_an_answer_is_supervised():

    # The end of the role name and the answer are one token.
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("T: ", "merged_with_next")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    encoded = llava_encoder(tokenizer).encode(["a", "b"], 0)
    assert encoded.ids == [0, 0] and encoded.labels == [IGNORE, 0]


@pytest.mark.parametrize("trims", [False, True])
def test_blanks_of_an_answer_are_supervised_even_if_a_tokenizer_trims_offsets(trims):
    """A byte-level tokenizer that trims offsets reports empty spans for tokens of blanks."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trims)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([], tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet))
    encoder = llava_encoder(transformers.PreTrainedTokenizerFast(tokenizer_object=backend))
    for answer in ("red\n\ndog", "two\n  é", "no\n"):
        encoded = encoder.encode(["What\nis this?", answer], 1)
        assert encoder.tokenizer.decode(supervised_ids(encoded)).strip(" ") == f"{answer}</s>"


def test_tokenizers_without_offsets_are_refused():
    slow = types.SimpleNamespace(is_fast=False)
    with pytest.raises(ValueError, match="expected a fast one"):
        llava_encoder(slow).encode(["a", "b"], 0)
