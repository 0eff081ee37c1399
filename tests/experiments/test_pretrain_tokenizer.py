"""The word tokenizer of small models."""

import pytest

from experiments.pretrain.small_llava import TEMPLATE
from experiments.pretrain.vocabulary import build_tokenizer
from stepprune_jax.data.prompts import IMAGE_TOKEN, tokenize_with_images
from stepprune_jax.models.llava import Llava

TEXTS = ("What color is the circle?", "red", "Is the red square left of the blue cross?", "12", "a")


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(TEXTS, TEMPLATE)


def test_texts_survive_tokenization_up_to_case(tokenizer):
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id == 1
        assert tokenizer.decode(ids[1:]).replace(" ", "") == text.lower().replace(" ", "")
        assert 0 not in ids
    assert tokenizer("RED").input_ids == tokenizer("red").input_ids
    assert len(tokenizer("12").input_ids) == 3


def test_the_system_prompt_is_one_token(tokenizer):
    system = Llava.conversation([None]).partition(" USER:")[0]
    assert len(tokenizer(system).input_ids) == 2
    prompt = Llava.conversation(["<image>\nWhat color is the circle?", "red"])
    ids = tokenize_with_images(tokenizer, prompt, 1)
    # <s> system user : IMAGE six words and a sign, assistant : red </s>
    assert len(ids) == 4 + 1 + 6 + 2 + 2 and ids.index(IMAGE_TOKEN) == 4
    assert ids[-1] == tokenizer.eos_token_id == 2 and 0 not in ids


def test_ids_do_not_depend_on_the_order_of_texts():
    first, second = build_tokenizer(TEXTS, TEMPLATE), build_tokenizer(TEXTS[::-1], TEMPLATE)
    assert first.get_vocab() == second.get_vocab()
    assert len(build_tokenizer(TEXTS, TEMPLATE, max_words=3)) == 3 + 3 + 2
