"""The questions of a data folder's split, with their answers."""

from pathlib import Path
from typing import NamedTuple

from stepprune_jax.data.llava import Question, read_answers, read_questions


class Split(NamedTuple):
    """Questions in the file's order, with their answers."""

    questions: list[Question]
    answers: list[str]


def read_split(folder: str | Path, name: str) -> Split:
    """Reads the split "validation" or "test" of a data folder."""
    folder = Path(folder)
    questions = read_questions(folder / f"{name}.jsonl", folder / "images")
    return Split(questions, read_answers(folder / f"{name}_answers.jsonl", questions))


def thin(split: Split, limit: int) -> Split:
    """Returns at most `limit` questions of a split, spread evenly over it; 0 keeps all."""
    if not 0 < limit < len(split.questions):
        return split
    positions = spread_over(len(split.questions), limit)
    return Split(*([part[position] for position in positions] for part in split))


def spread_over(total: int, limit: int) -> list[int]:
    """Returns at most `limit` evenly spread numbers below `total`; 0 keeps all."""
    count = min(limit, total) if limit else total
    return [number * total // count for number in range(count)]
