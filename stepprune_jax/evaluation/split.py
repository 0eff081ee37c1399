"""Reads the questions and answers of a data folder's split, and selects some of them."""

from pathlib import Path
from typing import NamedTuple

from stepprune_jax.data.llava import Question, read_answers, read_questions


class Split(NamedTuple):
    """Questions in the order of their file, and the answer to each."""

    questions: list[Question]
    answers: list[str]


def read_split(folder: str | Path, name: str) -> Split:
    """Reads the questions and answers of a data folder's split "validation" or "test"."""
    folder = Path(folder)
    questions = read_questions(folder / f"{name}.jsonl", folder / "images")
    return Split(questions, read_answers(folder / f"{name}_answers.jsonl", questions))


def thin(split: Split, limit: int) -> Split:
    """Returns at most `limit` questions at evenly spaced positions of a split; 0 keeps all."""
    if not 0 < limit < len(split.questions):
        return split
    positions = spread_over(len(split.questions), limit)
    return Split(*([part[position] for position in positions] for part in split))


def spread_over(total: int, limit: int) -> list[int]:
    """Returns at most `limit` evenly spaced integers below `total`; 0 returns all of them."""
    count = min(limit, total) if limit else total
    return [number * total // count for number in range(count)]
