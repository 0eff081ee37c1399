"""Descriptions of the images of a data folder's questions, in ``SPLIT_scenes.jsonl``.

A line is ``{"question_id", "complexity", "relevant"}``, and names the patches that the answer
depends on.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.data.json_files import field
from stepprune_jax.data.llava import Question, read_for
from stepprune_jax.settings import is_count


class Scene(NamedTuple):
    """Description of the image of a question.

    Attributes:
        complexity: number of objects.
        relevant: patches that the answer depends on, numbered row by row from 0, in the order in
            which one has to look at them, if there is one.
    """

    complexity: int
    relevant: tuple[int, ...]


def read_scenes(file: str | Path, questions: Sequence[Question]) -> list[Scene]:
    """Reads the descriptions of the images of questions."""
    scenes = []
    for where, value in read_for(file, questions, "scene"):
        complexity = field(
            value, "complexity", where, lambda n: is_count(n, 0), "a whole number from 0"
        )
        relevant = field(value, "relevant", where, _are_patches, "a list of patch numbers")
        scenes.append(Scene(complexity, tuple(relevant)))
    return scenes


def _are_patches(value: object) -> bool:
    return isinstance(value, list) and all(is_count(number, 0) for number in value)
