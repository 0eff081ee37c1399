"""Normalisation of answers and soft accuracy, as used by VQAv2 and TextVQA.

Both follow the evaluation program of Goyal et al., "Making the V in VQA Matter" (CVPR 2017). Its
bugs are reproduced, because they affect published numbers.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from stepprune_jax.user_input import UserError

NUM_PEOPLE = 10  # people who answered each question

# Contractions that are looked up without their apostrophe.
_PLAIN = """
ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's how'd
how'll how's I'm I've isn't it'd it'll ma'am mightn't might've mustn't must've needn't not've
o'clock oughtn't shan't should've shouldn't somebody'll somebody's someone'd someone'll someone's
something'd something'll that's there'd there're there's they'd they'll they're they've 'twas
wasn't we've weren't what'll what're what's what've when's where'd where's where've who'd who'll
who's who've why'll why're why's won't would've wouldn't y'all you'd you'll you're you've
"""

# Contractions with two apostrophes, which are looked up without one of them.
_DOUBLE = """
couldn't've hadn't've he'd've I'd've it'd've mightn't've she'd've shouldn't've somebody'd've
someone'd've something'd've there'd've they'd've we'd've who'd've wouldn't've you'd've
"""

# Entries of the original table that follow no rule.
_IRREGULAR = {
    "yall'll": "y'all'll",
    "y'allll": "y'all'll",
    "yall'd've": "y'all'd've",
    "y'alld've": "y'all'd've",
    "y'all'dve": "y'all'd've",
    "ow's'at": "'ow's'at",
    "'ows'at": "'ow's'at",
    "'ow'sat": "'ow's'at",
    "somebody'd": "somebodyd",  # key and value are swapped in the original
    "let's": "let's",
    "she's": "she's",
}


def _contractions() -> dict[str, str]:
    """Returns the 120 contractions by their forms without an apostrophe.

    A contraction with two apostrophes has two such forms.
    """
    contraction_of = {word.replace("'", ""): word for word in _PLAIN.split()}
    for word in _DOUBLE.split():
        for position, character in enumerate(word):
            if character == "'":
                contraction_of[word[:position] + word[position + 1 :]] = word
    return contraction_of | _IRREGULAR


CONTRACTIONS = _contractions()

_NUMBERS = """
zero one two three four five six seven eight nine ten
"""
_DIGITS = {"none": "0"} | {word: str(n) for n, word in enumerate(_NUMBERS.split())}
_ARTICLES = frozenset(("a", "an", "the"))

_MARKS = ';/[]"{}()=+\\_-><@`,?!'
_DIGIT_COMMA = re.compile(r"\d,\d")
_STOP = re.compile(r"\.(?!\d)")
# The original passes the flag re.UNICODE, which is 32, as the `count` of `sub`.
_STOP_LIMIT = int(re.UNICODE)


def remove_commas(text: str) -> str:
    """Lower-cases and strips a text, deletes commas and question marks, and separates ``'s``.

    This is the first step of TextVQA's scorer and of LLaVA's VQAv2 submission. VQAv2's scorer does
    not have this step.
    """
    text = text.lower().replace(",", "").replace("?", "")
    return text.replace("'s", " 's").strip()


def one_line(text: str) -> str:
    """Replaces each newline and tab of a text by a blank, and strips the text."""
    return text.replace("\n", " ").replace("\t", " ").strip()


def remove_punctuation(text: str) -> str:
    """Removes punctuation as VQAv2's scorer does.

    For each of 21 marks, the original text decides. If the mark is next to a blank somewhere, or if
    the text has a comma between two digits, all occurrences of the mark are deleted. Otherwise each
    occurrence is replaced by a blank. Then the first 32 full stops that do not precede a digit are
    deleted.
    """
    has_digit_comma = _DIGIT_COMMA.search(text) is not None
    cleaned = text
    for mark in _MARKS:
        if mark in text:
            is_next_to_blank = f"{mark} " in text or f" {mark}" in text
            cleaned = cleaned.replace(mark, "" if has_digit_comma or is_next_to_blank else " ")
    return _STOP.sub("", cleaned, count=_STOP_LIMIT)


def simplify_words(text: str) -> str:
    """Lower-cases a text, converts number words to digits, drops articles and fixes contractions.

    The words of the result are joined by single blanks.
    """
    words = (_DIGITS.get(word, word) for word in text.lower().split())
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


# Many questions have equal answers, so results are cached.
@lru_cache(maxsize=1 << 16)
def normalise_official(text: str) -> str:
    """Normalises an answer without newlines as VQAv2's scorer does if the ten people disagree."""
    return simplify_words(remove_punctuation(text))


def normalise(text: str) -> str:
    """Normalises an answer as TextVQA's scorer and LLaVA's VQAv2 submission do."""
    return normalise_official(one_line(remove_commas(text)))


def check_ten_answers(place: str, answers: Sequence[str]) -> list[str]:
    """Returns the human answers to a question, and raises a UserError unless they are ten texts."""
    if len(answers) != NUM_PEOPLE or not all(isinstance(answer, str) for answer in answers):
        raise UserError(f"{place}: expected {NUM_PEOPLE} answers in words, got {answers!r:.80}")
    return list(answers)


def soft_accuracy(prediction: str, answers: Sequence[str]) -> float:
    """Computes the agreement of a prediction with the answers of ten people, from 0 to 1.

    The accuracy against nine people is min(1, n / 3), where n of their answers equal the
    prediction. The result is the mean of this accuracy over the ten ways to leave out one person:
    0, 0.3, 0.6 or 0.9 for 0, 1, 2 or 3 equal answers of the ten people, and 1 for more.

    Args:
        prediction: the normalized prediction.
        answers: the normalized answers of ten people.
    """
    num_equal = sum(answer == prediction for answer in answers)
    num_different = len(answers) - num_equal
    # Leaving out an equal answer leaves `num_equal - 1` equal answers among the nine.
    total = num_equal * min(1, (num_equal - 1) / 3) + num_different * min(1, num_equal / 3)
    return total / len(answers)
