import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepprune_jax.benchmarks.vqa_answers import (
    normalise,
    official,
    one_line,
    plain_words,
    soft_accuracy,
    without_punctuation,
)


@pytest.mark.parametrize(
    "text, all_steps, without_first",
    [
        ("1,000-2", "1000 2", "10002"),
        ("3 - 2", "3 2", "3 2"),
        ("McDonald's", "mcdonald 's", "mcdonald's"),
        ("3.5.", "3.5", "3.5"),
        ("www.shop.com", "wwwshopcom", "wwwshopcom"),
        ("None", "0", "0"),
        ("the a an", "", ""),
        ("x" + "." * 40, "x" + "." * 8, "x" + "." * 8),
        ("Ten\tdogs\n", "10 dogs", "10 dogs"),
        # Marks that have no blank beside them become one, unless the first step took them away.
        ("red,blue?x", "redbluex", "red blue x"),
        ("It's", "it 's", "it's"),
        ("50% & #2: a*b", "50% & #2: a*b", "50% & #2: a*b"),
    ],
)
def test_normaliser_by_hand(text, all_steps, without_first):
    assert normalise(text) == all_steps
    assert official(one_line(text)) == without_first


def test_a_mark_that_touches_a_blank_anywhere_is_deleted_everywhere():
    assert without_punctuation("a-b") == "a b"
    assert without_punctuation("a-b - c") == "ab  c"
    assert without_punctuation("a-b/c d/ e") == "a bc d e"
    # The blanks that count are those on entry, not those that another mark left behind.
    assert without_punctuation("a/-b") == "a  b"


@pytest.mark.parametrize("mark", ';/[]"{}()=+\\_-><@`,?!')
def test_each_mark_becomes_a_blank_or_nothing(mark):
    assert without_punctuation(f"x{mark}y") == "x y"
    assert without_punctuation(f"x {mark}y") == "x y"
    assert without_punctuation(f"x{mark} y") == "x y"
    assert without_punctuation(f"x{mark}y1,2") == "xy12"


def test_words_by_hand():
    words = "none zero one two three four five six seven eight nine ten eleven"
    assert plain_words(words) == "0 0 1 2 3 4 5 6 7 8 9 10 eleven"
    assert plain_words("  An   apple\u00a0the\u2003pie ") == "apple pie"
    # The keys of such words keep the capital, and words are lower-cased first.
    assert plain_words("Im Ive") == "im ive"


def test_contractions_by_hand():
    keys = "aint twas couldntve couldn'tve couldnt've yall'll y'alld've 'ow'sat let's"
    words = "ain't 'twas couldntve couldn't've couldn't've y'all'll y'all'd've 'ow's'at let's"
    assert plain_words(keys) == words
    # The wrong way round in the original.
    assert plain_words("somebody'd somebodyd") == "somebodyd somebodyd"


@pytest.mark.parametrize("people", range(11))
def test_soft_accuracy_by_hand(people):
    expected = [0, 0.3, 0.6, 0.9, *[1] * 7][people]
    answers = ["yes"] * people + [f"no {n}" for n in range(10 - people)]
    assert soft_accuracy("yes", answers) == pytest.approx(expected, abs=1e-12)


@given(st.text(), st.lists(st.text(), min_size=10, max_size=10))
@example("\ud800", ["\ud800"] * 10)
def test_any_text_is_an_answer(text, answers):
    assert 0 <= soft_accuracy(normalise(text), [normalise(a) for a in answers]) <= 1
    assert "\n" not in normalise(text) and not set(normalise(text).split()) & {"a", "an", "the"}
