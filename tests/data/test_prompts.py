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
from stepprune_jax.models.llava import Llava

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)


def test_a_prompt_with_one_question_equals_the_reference():
    prompt = Llava.conversation([Llava.place_images("Is it windy?", 1)])
    assert prompt == f"{SYSTEM} USER: <image>\nIs it windy? ASSISTANT:"
    assert Llava.conversation(["Hello."]) == f"{SYSTEM} USER: Hello. ASSISTANT:"
    assert Llava.conversation(["Hello."], "Be brief.") == "Be brief. USER: Hello. ASSISTANT:"


def test_a_prompt_with_answers_equals_the_reference():
    turns = ["<image>\nA?", "Yes.", "B?"]
    expected = f"{SYSTEM} USER: <image>\nA? ASSISTANT: Yes.</s>USER: B? ASSISTANT:"
    assert Llava.conversation(turns) == expected == Llava.conversation([*turns, None])
    assert Llava.conversation(["A?", ""]) == f"{SYSTEM} USER: A? ASSISTANT:"
    assert Llava.conversation(["A?", "No."]).endswith("ASSISTANT: No.</s>")


def test_image_marks_move_to_the_front_unless_there_are_several():
    assert Llava.place_images("What?", 0) == "What?"
    assert Llava.place_images("What?", 2) == "<image>\n<image>\nWhat?"
    assert Llava.place_images("What is this? <image>", 1) == "<image>\nWhat is this?"
    assert Llava.place_images("<image>\nWhat?", 1) == "<image>\nWhat?"
    interleaved = "First <image> and second <image>?"
    assert Llava.place_images(interleaved, 2) == interleaved


@pytest.mark.parametrize(("marks", "images"), [(1, 0), (1, 2)])
def test_a_wrong_number_of_image_marks_is_refused(tokenizer, marks, images):
    message = "<image>\n" * marks + "What?"
    expected = rf"the prompt has {marks} <image>, but {images} image\(s\)"
    with pytest.raises(ValueError, match=expected):
        Llava.place_images(message, images)
    with pytest.raises(ValueError, match=expected):
        tokenize_with_images(tokenizer, Llava.conversation([message]), images)


def test_tokens_around_the_image_equal_the_reference(tokenizer):
    ids = tokenize_with_images(
        tokenizer, Llava.conversation([Llava.place_images("What is this?", 1)]), 1
    )
    position = ids.index(IMAGE_TOKEN)
    assert ids.count(IMAGE_TOKEN) == 1
    first_piece = tokenizer.convert_ids_to_tokens(ids[:position])
    second_piece = tokenizer.convert_ids_to_tokens(ids[position + 1 :])
    # The first piece ends with a blank. The second starts with a blank and the newline byte.
    assert first_piece[:3] == ["<s>", "▁A", "▁chat"]
    assert first_piece[-4:] == ["▁US", "ER", ":", "▁"]
    assert second_piece[:4] == ["▁", "<0x0A>", "W", "h"]
    assert second_piece[-4:] == ["▁ASS", "IST", "ANT", ":"]
    assert ids[position + 2] == 13 and ids[0] == 1 and 1 not in ids[1:]


def test_images_may_be_at_the_ends_and_next_to_each_other(tokenizer):
    blank = tokenizer.convert_tokens_to_ids("▁")
    assert tokenize_with_images(tokenizer, "<image>", 1) == [1, IMAGE_TOKEN]
    assert tokenize_with_images(tokenizer, "<image><image>\n", 2) == [
        *(1, IMAGE_TOKEN, IMAGE_TOKEN, blank, 13)
    ]
    assert tokenize_with_images(tokenizer, "no", 0) == tokenizer("no").input_ids


def test_a_tokenizer_without_start_tokens_keeps_all_text_ids():
    def plain(text, **_):
        ids = [ord(letter) for letter in text]
        return types.SimpleNamespace(input_ids=ids, special_tokens_mask=[0] * len(ids))

    assert tokenize_with_images(plain, "a<image>bc") == [97, IMAGE_TOKEN, 98, 99]


def test_a_tokenizer_without_punctuation_keeps_its_start_token():
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
    kept, image_numbers = np.array(counts[: ids.count(IMAGE_TOKEN)], int), iter(range(len(ids)))
    image_of_id = [next(image_numbers) if token == IMAGE_TOKEN else -1 for token in ids]
    embeddings = [i for i in image_of_id for _ in range(1 if i < 0 else kept[i])][:limit]
    remaining = truncated_images(np.array(ids, int), kept, limit)
    assert remaining.tolist() == [embeddings.count(i) for i in range(len(kept))]


def test_batches_are_padded_on_the_right():
    ids, length = pad_batch([[1, 2, 3], [1, IMAGE_TOKEN]], fill=9, multiple=4)
    np.testing.assert_array_equal(ids, [[1, 2, 3, 9], [1, IMAGE_TOKEN, 9, 9]])
    np.testing.assert_array_equal(length, [3, 2])
    assert ids.dtype == length.dtype == np.int32
    assert pad_batch([[1], []], width=2)[0].tolist() == [[1, 0], [0, 0]]


class CountingTokenizer:
    """A tokenizer that counts concurrent calls. A call takes at least 10 ms."""

    def __init__(self, tokenizer):
        self.tokenizer, self.num_calls, self.max_calls = tokenizer, 0, 0

    def _counted(self, function, arguments, options):
        self.num_calls += 1
        self.max_calls = max(self.max_calls, self.num_calls)
        time.sleep(0.01)
        result = function(*arguments, **options)
        self.num_calls -= 1
        return result

    def __call__(self, *arguments, **options):
        return self._counted(self.tokenizer, arguments, options)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


def test_only_one_thread_at_a_time_tokenizes(tokenizer):
    counting = CountingTokenizer(tokenizer)
    encoder = ConversationEncoder(counting, Llava.place_images, Llava.conversation)
    calls = [
        lambda: tokenize_with_images(counting, "Is it windy?"),
        lambda: question_ids(counting, ["Is it windy?"]),
        lambda: encoder.encode(["Is it windy?", "Yes."], 1),
    ]
    threads = [threading.Thread(target=call) for call in calls * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counting.max_calls == 1
