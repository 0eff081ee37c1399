"""Conversations as ids and labels: by hand, against the counting scheme, and with odd texts."""

import dataclasses
import functools
import json
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepprune_jax import testing
from stepprune_jax.data.encoding import IGNORE
from stepprune_jax.data.prompts import IMAGE_TOKEN, tokenize_with_images
from stepprune_jax.models.llava import Llava
from stepprune_jax.models.llava_next.backbone import LlavaNextMistral
from stepprune_jax.testing import llava_encoder


def supervised(encoded):
    return [label for label in encoded.labels if label != IGNORE]


def test_assistant_words_and_their_ends_are_supervised(tokenizer):
    encoded = llava_encoder(tokenizer).encode(["What is this?", "red dog", "two?", "no"], 1)
    names = tokenizer.convert_ids_to_tokens(supervised(encoded))
    assert names == ["▁red", "▁dog", "</s>", "▁no", "</s>"]
    for token, label in zip(encoded.ids, encoded.labels, strict=True):
        assert label in (token, IGNORE)
    assert encoded.labels[encoded.ids.index(IMAGE_TOKEN)] == IGNORE
    said = tokenizer("What is this?\ntwo?", add_special_tokens=False).input_ids
    assert encoded.text == said


def test_answers_to_mistrals_prompts_are_supervised(tokenizer):
    encoder = llava_encoder(tokenizer)
    encoder = dataclasses.replace(encoder, conversation=LlavaNextMistral.conversation)
    encoded = encoder.encode(["What is this?", "red dog", "two?", "no"], 1)
    assert tokenizer.decode(supervised(encoded)) == "red dog </s> no </s>"


def test_ids_that_the_model_has_no_embeddings_for_are_refused(tokenizer):
    encoder = dataclasses.replace(llava_encoder(tokenizer), vocab_size=9)
    with pytest.raises(ValueError, match=r"gives id \d+, expected ids below 9, the model's vocab"):
        encoder.encode(["What is this?", "red dog"], 1)


def counted(tokenizer, turns, images, legacy):
    """Labels by LLaVA's counting: each round and each instruction is tokenised on its own."""
    prompt = Llava.conversation([Llava.place_images(turns[0], images), *turns[1:]])
    labels = tokenize_with_images(tokenizer, prompt)
    total, at = len(labels), 1
    labels[0] = IGNORE
    for number, said in enumerate(prompt.split("</s>")[:-1]):
        instruction = said.split(" ASSISTANT: ")[0] + " ASSISTANT: "
        # Without the start token, and without the blank piece that joins the answer's first word.
        masked = len(tokenize_with_images(tokenizer, instruction)) - 2
        size = len(tokenize_with_images(tokenizer, said))
        if number and not legacy:  # behind </s> the user's name has no blank piece
            masked, size = masked - 1, size - 1
        labels[at : at + masked] = [IGNORE] * masked
        at += size
    assert at == total
    return labels


@functools.cache
def first_blank_only():
    """The tiny tokenizer as LLaVA-1.5 has it: a blank before the whole text, and a word "USER"."""
    import tokenizers
    import transformers

    state = json.loads(testing.tiny_tokenizer(image_token=False).backend_tokenizer.to_str())
    state["normalizer"] = None
    model = state["model"]
    for left, right in (("U", "S"), ("US", "ER")):
        model["vocab"].setdefault(left + right, len(model["vocab"]))
        model["merges"].append([left, right])
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
def test_labels_are_those_of_the_counting_scheme(tokenizer, rounds, images):
    turns = [turn for pair in rounds for turn in pair]
    for legacy, used in ((True, tokenizer), (False, first_blank_only())):
        encoded = llava_encoder(used).encode(turns, images)
        assert encoded.labels == counted(used, turns, images, legacy)


@pytest.mark.parametrize(
    ("answer", "learnt"),
    [
        ("so I say ASSISTANT: no", "so I say ASSISTANT: no</s>"),
        ("red</s>dog", "red</s> dog</s>"),
        ("USER: red", "USER: red</s>"),
    ],
)
def test_answers_that_the_counting_scheme_gives_up_are_learnt_whole(tokenizer, answer, learnt):
    labels = supervised(llava_encoder(tokenizer).encode(["What?", "no", "ASSISTANT: a", answer], 1))
    assert tokenizer.decode(labels) == f"no</s> {learnt}"


SAID = st.text(st.sampled_from("redog no?.\né漢</s>USER:"), min_size=1, max_size=12).filter(
    str.strip
)


@settings(max_examples=60)
@given(turns=st.lists(SAID, min_size=2, max_size=6), images=st.integers(0, 2))
def test_ids_are_those_of_the_whole_prompt_and_labels_begin_where_generation_does(
    tokenizer, turns, images
):
    turns = turns[: len(turns) // 2 * 2]
    encoded = llava_encoder(tokenizer).encode(turns, images)
    whole = [Llava.place_images(turns[0], images), *turns[1:]]
    assert encoded.ids == tokenize_with_images(tokenizer, Llava.conversation(whole), images)
    # Before each answer stand the ids that `generate` would be asked to go on from.
    starts = [
        n
        for n, label in enumerate(encoded.labels)
        if label != IGNORE and encoded.labels[n - 1] == IGNORE
    ]
    for number, start in enumerate(starts):
        asked = tokenize_with_images(tokenizer, Llava.conversation(whole[: 2 * number + 1]), images)
        assert encoded.ids[:start] == asked
    assert len(starts) == len(turns) // 2
    assert len(encoded.labels) == len(encoded.ids) and encoded.labels[-1] != IGNORE


def test_a_tokenizer_whose_pieces_cross_the_boundary_supervises_the_piece():
    import tokenizers
    import transformers

    # Words are split at blanks after colons only: ":" and what follows are one piece.
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("T: ", "merged_with_next")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    encoded = llava_encoder(tokenizer).encode(["a", "b"], 0)
    assert encoded.ids == [0, 0] and encoded.labels == [IGNORE, 0]


def test_tokenizers_without_places_are_refused():
    slow = types.SimpleNamespace(is_fast=False)
    with pytest.raises(ValueError, match="expected a fast one"):
        llava_encoder(slow).encode(["a", "b"], 0)
