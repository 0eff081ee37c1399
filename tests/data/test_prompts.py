import threading
import time
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepprune_jax.data.encoding import ConversationEncoder
from stepprune_jax.data.prompts import (
    IMAGE_TOKEN,
    pad_batch,
    question_ids,
    tokenize_with_images,
    truncated_images,
)
from stepprune_jax.inference.text import answer_text
from stepprune_jax.models.llava import Llava

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)


def test_one_open_exchange_reads_as_the_reference():
    prompt = Llava.conversation([Llava.place_images("Is it windy?", 1)])
    assert prompt == f"{SYSTEM} USER: <image>\nIs it windy? ASSISTANT:"
    assert Llava.conversation(["Hello."]) == f"{SYSTEM} USER: Hello. ASSISTANT:"
    assert Llava.conversation(["Hello."], "Be brief.") == "Be brief. USER: Hello. ASSISTANT:"


def test_finished_turns_end_as_the_reference_ends_them():
    turns = ["<image>\nA?", "Yes.", "B?"]
    expected = f"{SYSTEM} USER: <image>\nA? ASSISTANT: Yes.</s>USER: B? ASSISTANT:"
    assert Llava.conversation(turns) == expected == Llava.conversation([*turns, None])
    assert Llava.conversation(["A?", ""]) == f"{SYSTEM} USER: A? ASSISTANT:"
    assert Llava.conversation(["A?", "No."]).endswith("ASSISTANT: No.</s>")


def test_image_marks_go_in_front():
    assert Llava.place_images("What?", 0) == "What?"
    assert Llava.place_images("What?", 2) == "<image>\n<image>\nWhat?"
    assert Llava.place_images("What is this? <image>", 1) == "<image>\nWhat is this?"
    assert Llava.place_images("<image>\nWhat?", 1) == "<image>\nWhat?"
    interleaved = "First <image> and second <image>?"
    assert Llava.place_images(interleaved, 2) == interleaved


@pytest.mark.parametrize(("marks", "images"), [(1, 0), (1, 2)])
def test_marks_and_images_that_disagree_are_refused(tokenizer, marks, images):
    message = "<image>\n" * marks + "What?"
    expected = rf"the prompt has {marks} <image>, but {images} image\(s\)"
    with pytest.raises(ValueError, match=expected):
        Llava.place_images(message, images)
    with pytest.raises(ValueError, match=expected):
        tokenize_with_images(tokenizer, Llava.conversation([message]), images)


def test_pieces_around_the_image_are_those_of_the_reference(tokenizer):
    ids = tokenize_with_images(
        tokenizer, Llava.conversation([Llava.place_images("What is this?", 1)]), 1
    )
    at = ids.index(IMAGE_TOKEN)
    assert ids.count(IMAGE_TOKEN) == 1
    before = tokenizer.convert_ids_to_tokens(ids[:at])
    after = tokenizer.convert_ids_to_tokens(ids[at + 1 :])
    # A lone blank ends the first piece; the next one starts with a blank and the newline byte.
    assert before[:3] == ["<s>", "▁A", "▁chat"] and before[-4:] == ["▁US", "ER", ":", "▁"]
    assert after[:4] == ["▁", "<0x0A>", "W", "h"] and after[-4:] == ["▁ASS", "IST", "ANT", ":"]
    assert ids[at + 2] == 13 and ids[0] == 1 and 1 not in ids[1:]


def test_images_at_the_ends_and_side_by_side(tokenizer):
    blank = tokenizer.convert_tokens_to_ids("▁")
    assert tokenize_with_images(tokenizer, "<image>", 1) == [1, IMAGE_TOKEN]
    assert tokenize_with_images(tokenizer, "<image><image>\n", 2) == [
        *(1, IMAGE_TOKEN, IMAGE_TOKEN, blank, 13)
    ]
    assert tokenize_with_images(tokenizer, "no", 0) == tokenizer("no").input_ids


def test_a_tokenizer_without_a_start_token_loses_nothing():
    def plain(text, **_):
        ids = [ord(letter) for letter in text]
        return types.SimpleNamespace(input_ids=ids, special_tokens_mask=[0] * len(ids))

    assert tokenize_with_images(plain, "a<image>bc") == [97, IMAGE_TOKEN, 98, 99]


def test_a_tokenizer_of_a_few_letters_keeps_its_start_token():
    def without_marks(text, add_special_tokens=True, **_):
        ids = [ord(letter) for letter in text if letter.isalpha()]
        start = [1] * add_special_tokens
        mask = [1] * len(start) + [0] * len(ids)
        return types.SimpleNamespace(input_ids=start + ids, special_tokens_mask=mask)

    assert tokenize_with_images(without_marks, "a<image>b") == [1, 97, IMAGE_TOKEN, 98]


@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.just(IMAGE_TOKEN), st.integers(0, 9)), max_size=12),
    st.lists(st.integers(0, 5), min_size=12, max_size=12),
    st.integers(0, 40),
)
def test_truncation_keeps_the_first_embeddings(ids, counts, limit):
    kept, images = np.array(counts[: ids.count(IMAGE_TOKEN)], int), iter(range(len(ids)))
    image = [next(images) if token == IMAGE_TOKEN else -1 for token in ids]
    expanded = [i for i in image for _ in range(1 if i < 0 else kept[i])][:limit]
    left = truncated_images(np.array(ids, int), kept, limit)
    assert left.tolist() == [expanded.count(i) for i in range(len(kept))]


def test_batches_are_padded_at_the_right_end():
    ids, length = pad_batch([[1, 2, 3], [1, IMAGE_TOKEN]], fill=9, multiple=4)
    np.testing.assert_array_equal(ids, [[1, 2, 3, 9], [1, IMAGE_TOKEN, 9, 9]])
    np.testing.assert_array_equal(length, [3, 2])
    assert ids.dtype == length.dtype == np.int32
    assert pad_batch([[1], []], width=2)[0].tolist() == [[1, 0], [0, 0]]


class CountingTokenizer:
    """A tokenizer that counts the threads inside its calls; a call takes 10 ms."""

    def __init__(self, tokenizer):
        self.tokenizer, self.threads, self.most_threads = tokenizer, 0, 0

    def _counted(self, function, arguments, options):
        self.threads += 1
        self.most_threads = max(self.most_threads, self.threads)
        time.sleep(0.01)
        result = function(*arguments, **options)
        self.threads -= 1
        return result

    def __call__(self, *arguments, **options):
        return self._counted(self.tokenizer, arguments, options)

    def decode(self, *arguments, **options):
        return self._counted(self.tokenizer.decode, arguments, options)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


def test_threads_call_a_tokenizer_one_after_the_other(tokenizer):
    counting = CountingTokenizer(tokenizer)
    encoder = ConversationEncoder(counting, Llava.place_images, Llava.conversation)
    calls = [
        lambda: tokenize_with_images(counting, "Is it windy?"),
        lambda: question_ids(counting, ["Is it windy?"]),
        lambda: encoder.encode(["Is it windy?", "Yes."], 1),
        lambda: answer_text(counting, [5, 6]),
    ]
    threads = [threading.Thread(target=call) for call in calls * 2]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert counting.most_threads == 1
