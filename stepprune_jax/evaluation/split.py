"""Reads the questions and answers of a data folder's split, and selects some of them."""

from pathlib import Path
from typing import NamedTuple

from stepprune_jax.data.llava import Question, read_answers, read_questions


class Split(NamedTuple):
    """A split of a data folder. Read by `read_split`.

    Attributes:
        questions: the questions in the order of their file.
        answers: the correct answer to each question.
    """

    questions: list[Question]
    answers: list[str]


def read_split(folder: str | Path, name: str) -> Split:
    """Reads the questions and answers of a data folder's split "validation" or "test"."""
    folder = Path(folder)
    questions = read_questions(folder / f"{name}.jsonl", folder / "images")
    return Split(questions, read_answers(folder / f"{name}_answers.jsonl", questions))


def thin(split: Split, limit: int) -> Split:
    """Samples at most `limit` questions of a split at regular intervals; 0 keeps all questions."""
    if not 0 < limit < len(split.questions):
        return split
    indices = spread_over(len(split.questions), limit)
    return Split(
        questions=[split.questions[index] for index in indices],
        answers=[split.answers[index] for index in indices],
    )


def spread_over(total: int, limit: int) -> list[int]:
    """Returns at most `limit` indices at regular intervals from 0 to `total` - 1; 0 returns all."""
    num_indices = min(limit, total) if limit else total
    return [step * total // num_indices for step in range(num_indices)]
