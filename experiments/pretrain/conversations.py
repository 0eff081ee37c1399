"""Training conversations with their images, read as a whole."""

from pathlib import Path
from typing import NamedTuple

from stepprune_jax.data.image_files import existing_image
from stepprune_jax.data.json_files import read_json_list
from stepprune_jax.data.llava import parse_conversation


class Sample(NamedTuple):
    """One training conversation.

    Attributes:
        image: its image, or None.
        turns: the turns, user first and then alternating, without image marks.
        index: place in the file, from 0.
    """

    image: Path | None
    turns: tuple[str, ...]
    index: int


def read_conversations(file: str | Path, image_root: str | Path) -> list[Sample]:
    """Reads training conversations.

    A conversation that has only a first message of the assistant is left out.
    """
    samples = []
    for index, entry in enumerate(read_json_list(file, "sample")):
        where = f"{file}: sample {index}"
        image, turns = parse_conversation(entry, where)
        if turns:
            path = None if image is None else existing_image(image_root, image, where)
            samples.append(Sample(path, turns, index))
    return samples
