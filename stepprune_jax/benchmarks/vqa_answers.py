"""The answer normaliser and the soft accuracy that VQAv2 and TextVQA share.

Both follow the evaluation program of Goyal et al., "Making the V in VQA Matter" (CVPR 2017), with
its oddities, which affect published numbers.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from stepprune_jax.user_input import UserError

NUM_PEOPLE = 10  # people who answered each question

# Words whose key is the word without its apostrophe.
_PLAIN = """
ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's how'd
how'll how's I'm I've isn't it'd it'll ma'am mightn't might've mustn't must've needn't not've
o'clock oughtn't shan't should've shouldn't somebody'll somebody's someone'd someone'll someone's
something'd something'll that's there'd there're there's they'd they'll they're they've 'twas
wasn't we've weren't what'll what're what's what've when's where'd where's where've who'd who'll
who's who've why'll why're why's won't would've wouldn't y'all you'd you'll you're you've
"""

# Words with two apostrophes. Each word has two keys, which lack one of the apostrophes.
_DOUBLE = """
couldn't've hadn't've he'd've I'd've it'd've mightn't've she'd've shouldn't've somebody'd've
someone'd've something'd've there'd've they'd've we'd've who'd've wouldn't've you'd've
"""

_IRREGULAR = {
    "yall'll": "y'all'll",
    "y'allll": "y'all'll",
    "yall'd've": "y'all'd've",
    "y'alld've": "y'all'd've",
    "y'all'dve": "y'all'd've",
    "ow's'at": "'ow's'at",
    "'ows'at": "'ow's'at",
    "'ow'sat": "'ow's'at",
    "somebody'd": "somebodyd",  # the wrong way round in the original
    "let's": "let's",
    "she's": "she's",
}


def _contractions() -> dict[str, str]:
    """Builds the table of contractions from misspelt word to word, 120 entries."""
    table = {word.replace("'", ""): word for word in _PLAIN.split()}
    for word in _DOUBLE.split():
        first, second = (i for i, letter in enumerate(word) if letter == "'")
        table[word[:first] + word[first + 1 :]] = word
        table[word[:second] + word[second + 1 :]] = word
    return table | _IRREGULAR


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


def without_commas(text: str) -> str:
    """Lower-cases, deletes commas and question marks, puts a blank before ``'s``, strips.

    This is the first step of TextVQA's scorer and LLaVA's VQAv2 submission, not of VQAv2's scorer.
    """
    text = text.lower().replace(",", "").replace("?", "")
    return text.replace("'s", " 's").strip()


def one_line(text: str) -> str:
    """Replaces each newline and tab by a blank, and strips."""
    return text.replace("\n", " ").replace("\t", " ").strip()


def without_punctuation(text: str) -> str:
    """Deletes 21 marks or replaces them by blanks, and deletes up to 32 full stops.

    A mark is deleted if it touches a blank anywhere in `text`, or if `text` has a comma between
    two digits; otherwise it is replaced by blanks. A full stop before a digit is kept.
    """
    deletes_all = _DIGIT_COMMA.search(text) is not None
    cleaned = text
    for mark in _MARKS:
        if mark in text:
            touches = f"{mark} " in text or f" {mark}" in text
            cleaned = cleaned.replace(mark, "" if deletes_all or touches else " ")
    return _STOP.sub("", cleaned, count=_STOP_LIMIT)


def plain_words(text: str) -> str:
    """Lower-cases, converts number words to digits, drops articles, repairs contractions.

    The words are joined by single blanks.
    """
    words = (_DIGITS.get(word, word) for word in text.lower().split())
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


# The same answers are given to many questions.
@lru_cache(maxsize=1 << 16)
def official(text: str) -> str:
    """Normalises an answer on one line as the scorer of VQAv2 does where people disagree."""
    return plain_words(without_punctuation(text))


def normalise(text: str) -> str:
    """Normalises as TextVQA's scorer and LLaVA's VQAv2 submission do."""
    return official(one_line(without_commas(text)))


def ten(where: str, answers: Sequence[str]) -> list[str]:
    """Returns the human answers to a question; raises a UserError unless there are ten texts."""
    if len(answers) != NUM_PEOPLE or not all(isinstance(answer, str) for answer in answers):
        raise UserError(f"{where}: expected {NUM_PEOPLE} answers in words, got {answers!r:.80}")
    return list(answers)


def soft_accuracy(prediction: str, answers: Sequence[str]) -> float:
    """Computes how far ten people agree with an answer.

    Leaves out each person in turn, and averages min(1, n / 3), where n of the nine remaining
    people gave the prediction. The result is 0, 0.3, 0.6 or 0.9 if 0, 1, 2 or 3 people gave it, and
    1 if at least 4 did.
    """
    agreeing = sum(answer == prediction for answer in answers)
    disagreeing = len(answers) - agreeing
    total = agreeing * min(1, (agreeing - 1) / 3) + disagreeing * min(1, agreeing / 3)
    return total / len(answers)
