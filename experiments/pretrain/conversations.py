"""Reads all training conversations of a file."""

from pathlib import Path
from typing import NamedTuple

from stepprune_jax.data.image_files import existing_image
from stepprune_jax.data.json_files import read_json_list
from stepprune_jax.data.llava import parse_conversation
from stepprune_jax.user_input import require


class Sample(NamedTuple):
    """One training conversation.

    Attributes:
        image: the image's file, or None.
        turns: texts of user and assistant in turn, without image marks.
        index: number of the conversation in the file, from 0.
    """

    image: Path | None
    turns: tuple[str, ...]
    index: int


def read_conversations(file: str | Path, image_root: str | Path) -> list[Sample]:
    """Reads training conversations.

    A conversation without a user's message is skipped.
    """
    samples = []
    for index, entry in enumerate(read_json_list(file, "sample")):
        location = f"{file}: sample {index}"
        image, turns, video = parse_conversation(entry, location)
        require(video is None, f'{location}: "video" is not followed, expected "image"')
        if turns:
            path = None if image is None else existing_image(image_root, image, location)
            samples.append(Sample(path, turns, index))
    return samples
