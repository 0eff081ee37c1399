import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepprune_jax.benchmarks.vqa_answers import (
    CONTRACTIONS,
    normalise,
    official,
    one_line,
    plain_words,
    soft_accuracy,
    without_commas,
    without_punctuation,
)


@pytest.mark.parametrize(
    "text, all_steps, without_first",
    [
        ("1,000-2", "1000 2", "10002"),
        ("02/14/2012", "02 14 2012", "02 14 2012"),
        ("3 - 2", "3 2", "3 2"),
        ("McDonald's", "mcdonald 's", "mcdonald's"),
        ("$5.99", "$5.99", "$5.99"),
        ("3.5.", "3.5", "3.5"),
        ("3.", "3", "3"),
        ("www.shop.com", "wwwshopcom", "wwwshopcom"),
        ("None", "0", "0"),
        ("the a an", "", ""),
        ("x" + "." * 40, "x" + "." * 8, "x" + "." * 8),
        ("Ten\tdogs\n", "10 dogs", "10 dogs"),
        ("Yes, the DOG", "yes dog", "yes dog"),
        # The comma has no blank beside it: it becomes one, unless the first step took it away.
        ("red,blue", "redblue", "red blue"),
        ("dont", "don't", "don't"),
        ("It's", "it 's", "it's"),
        ("50% & #2: a*b", "50% & #2: a*b", "50% & #2: a*b"),
        ("», é。", "» é。", "» é。"),
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


def test_first_step_by_hand():
    assert without_commas(" A, b? 's ") == "a b  's"


def test_words_by_hand():
    words = "none zero one two three four five six seven eight nine ten eleven"
    assert plain_words(words) == "0 0 1 2 3 4 5 6 7 8 9 10 eleven"
    assert plain_words("  An   apple\u00a0the\u2003pie ") == "apple pie"


@pytest.mark.parametrize(
    "key, word",
    [
        ("aint", "ain't"),
        ("oclock", "o'clock"),
        ("twas", "'twas"),
        ("couldntve", None),
        ("couldn'tve", "couldn't've"),
        ("couldnt've", "couldn't've"),
        ("Im", "I'm"),
        ("yall'll", "y'all'll"),
        ("y'alld've", "y'all'd've"),
        ("'ow'sat", "'ow's'at"),
        ("somebody'd", "somebodyd"),
        ("somebodyd", None),
        ("let's", "let's"),
    ],
)
def test_contractions_by_hand(key, word):
    assert CONTRACTIONS.get(key) == word


def test_words_with_a_capital_i_are_never_mended():
    # Their keys keep the capital, and words are lower-cased first.
    assert plain_words("Im Ive") == "im ive"


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
