"""Reads the scenes of a data folder's questions from `SPLIT_scenes.jsonl`.

Each line is `{"question_id", "complexity", "relevant"}`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.data.json_files import field
from stepprune_jax.data.llava import Question, read_for
from stepprune_jax.settings import is_count


class SceneFacts(NamedTuple):
    """Facts about the image of a question.

    Attributes:
        complexity: number of objects.
        relevant: patches that the answer depends on, in row-major order.
    """

    complexity: int
    relevant: tuple[int, ...]


def read_scenes(file: str | Path, questions: Sequence[Question]) -> list[SceneFacts]:
    """Reads the facts about the image of each question."""
    scenes = []
    for location, value in read_for(file, questions, "scene"):
        complexity = field(
            value, "complexity", location, lambda n: is_count(n, 0), "a whole number from 0"
        )
        relevant = field(value, "relevant", location, _are_patches, "a list of patch numbers")
        scenes.append(SceneFacts(complexity, tuple(relevant)))
    return scenes


def _are_patches(value: object) -> bool:
    return isinstance(value, list) and all(is_count(number, 0) for number in value)
