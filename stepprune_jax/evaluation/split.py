"""Reads the questions and answers of a data folder's split, and selects some of them."""

from pathlib import Path
from typing import NamedTuple

from stepprune_jax.data.llava import Question, read_answers, read_questions
from stepprune_jax.data.source import VideoSampling


class Split(NamedTuple):
    """A split of a data folder. Read by `read_split`.

    Attributes:
        questions: the questions in the order of their file.
        answers: the correct answer to each question.
    """

    questions: list[Question]
    answers: list[str]


def read_split(
    folder: str | Path,
    name: str,
    sampling: VideoSampling = VideoSampling(),  # noqa: B008
) -> Split:
    """Reads the questions and answers of a data folder's split "validation" or "test".

    Args:
        folder: the data folder.
        name: name of the split.
        sampling: sampling of the frames of videos.
    """
    folder = Path(folder)
    file, (fps, num_frames) = folder / f"{name}.jsonl", sampling
    questions = read_questions(file, folder / "images", fps=fps, num_frames=num_frames)
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
