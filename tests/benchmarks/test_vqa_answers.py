import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepprune_jax.benchmarks.vqa_answers import (
    normalise,
    normalise_official,
    one_line,
    remove_punctuation,
    simplify_words,
    soft_accuracy,
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
        # Marks without an adjacent blank become blanks, unless the first step removes them.
        ("red,blue?x", "redbluex", "red blue x"),
        ("It's", "it 's", "it's"),
        ("50% & #2: a*b", "50% & #2: a*b", "50% & #2: a*b"),
    ],
)
def test_normalised_answers_equal_those_written_by_hand(text, all_steps, without_first):
    assert normalise(text) == all_steps
    assert normalise_official(one_line(text)) == without_first


def test_a_mark_next_to_a_blank_anywhere_is_deleted_everywhere():
    assert remove_punctuation("a-b") == "a b"
    assert remove_punctuation("a-b - c") == "ab  c"
    assert remove_punctuation("a-b/c d/ e") == "a bc d e"
    # Only blanks of the original text count, not blanks that replaced another mark.
    assert remove_punctuation("a/-b") == "a  b"


@pytest.mark.parametrize("mark", ';/[]"{}()=+\\_-><@`,?!')
def test_each_mark_is_deleted_or_becomes_a_blank(mark):
    assert remove_punctuation(f"x{mark}y") == "x y"
    assert remove_punctuation(f"x {mark}y") == "x y"
    assert remove_punctuation(f"x{mark} y") == "x y"
    assert remove_punctuation(f"x{mark}y1,2") == "xy12"


def test_number_words_become_digits_and_articles_are_dropped():
    words = "none zero one two three four five six seven eight nine ten eleven"
    assert simplify_words(words) == "0 0 1 2 3 4 5 6 7 8 9 10 eleven"
    assert simplify_words("  An   apple\u00a0the\u2003pie ") == "apple pie"
    # Keys such as "Im" have a capital, and words are lower-cased before the lookup.
    assert simplify_words("Im Ive") == "im ive"


def test_contractions_get_their_apostrophes():
    keys = "aint twas couldntve couldn'tve couldnt've yall'll y'alld've 'ow'sat let's"
    words = "ain't 'twas couldntve couldn't've couldn't've y'all'll y'all'd've 'ow's'at let's"
    assert simplify_words(keys) == words
    # Key and value are swapped in the original.
    assert simplify_words("somebody'd somebodyd") == "somebodyd somebodyd"


@pytest.mark.parametrize("people", range(11))
def test_the_soft_accuracy_depends_on_the_number_of_agreeing_people(people):
    expected = [0, 0.3, 0.6, 0.9, *[1] * 7][people]
    answers = ["yes"] * people + [f"no {n}" for n in range(10 - people)]
    assert soft_accuracy("yes", answers) == pytest.approx(expected, abs=1e-12)


@given(st.text(), st.lists(st.text(), min_size=10, max_size=10))
@example("\ud800", ["\ud800"] * 10)
def test_any_text_can_be_normalised(text, answers):
    assert 0 <= soft_accuracy(normalise(text), [normalise(a) for a in answers]) <= 1
    assert "\n" not in normalise(text) and not set(normalise(text).split()) & {"a", "an", "the"}
