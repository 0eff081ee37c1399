import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepprune_jax import testing
from stepprune_jax.inference import TextStream, answer_text

TOKENIZER = testing.tiny_tokenizer()


def byte(value):
    return TOKENIZER.convert_tokens_to_ids(f"<0x{value:02X}>")


def pieces(ids, stop=()):
    stream = TextStream(TOKENIZER, stop)
    return [*(stream.add(token) for token in ids), stream.finish()]


# Bytes often, and some ids that the tokenizer does not know.
TOKENS = st.lists(st.one_of(st.integers(3, 258), st.integers(0, len(TOKENIZER) + 20)), max_size=25)


@settings(max_examples=300, deadline=None)
@given(TOKENS)
def test_pieces_concatenate_to_the_whole(ids):
    assert "".join(pieces(ids)) == answer_text(TOKENIZER, ids)


@pytest.mark.parametrize("text", ["  a €5 \U0001f415 dog\n\nred ", ""])
def test_text_survives(text):
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    text_pieces = pieces([*ids, 2])
    assert "".join(text_pieces) == text.strip()
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(text_pieces)


def test_a_character_comes_whole_and_words_come_early():
    euro = [byte(value) for value in "€".encode()]
    red, dog = TOKENIZER.convert_tokens_to_ids(["▁red", "▁dog"])
    assert pieces([red, *euro, dog, 2]) == ["red", "", "", "", "€ dog", "", ""]


def test_bytes_that_are_no_text_do_not_change_what_was_said():
    # A byte run is decoded as a whole: the letter A would be unknown after the second byte.
    ids = [byte(0x41), byte(0xE2), TOKENIZER.convert_tokens_to_ids("▁red")]
    assert pieces(ids)[:2] == ["", ""]
    assert "".join(pieces(ids)) == answer_text(TOKENIZER, ids)
    # The word is there as ordinary text, the bytes as unknown characters.
    assert answer_text(TOKENIZER, ids).endswith("red")


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.lists(st.sampled_from(["\n", "r", "re", "red", " red", "g d", "€", "a\n"])))
def test_nothing_is_said_from_a_stop_on(ids, stop):
    decoded, stream = TOKENIZER.decode(ids, skip_special_tokens=True), TextStream(TOKENIZER, stop)
    written = ""
    for number, token in enumerate(ids):
        written += stream.add(token)
        if stream.stopped:
            decoded = TOKENIZER.decode(ids[: number + 1], skip_special_tokens=True)
            assert any(text in decoded for text in stop)
            break
    written += stream.finish()
    assert not any(text in written for text in stop)
    assert (
        written
        == decoded[: min((decoded.find(x) for x in stop if x in decoded), default=None)].strip()
    )


def test_what_may_begin_a_stop_is_held_back():
    red, dog = TOKENIZER.convert_tokens_to_ids(["▁red", "▁dog"])
    assert pieces([red, dog, red], ["d dog d"]) == ["re", "", "d dog re", "d"]
    assert pieces([red, dog, red, red], ["d dog r", "dog red"]) == ["re", "", "", "", ""]
    assert pieces([red, byte(10), dog], ["\n"]) == ["red", "", "", ""]


def test_white_space_at_the_end_is_not_said():
    red, blank = TOKENIZER.convert_tokens_to_ids(["▁red", "▁"])
    assert "".join(pieces([blank, red, blank, blank, byte(10)])) == "red"
    assert "".join(pieces([blank, red, blank, blank, red])) == "red   red"
