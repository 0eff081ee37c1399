"""Initial examples of the page: images of the shapes world with a question each."""

import json
from typing import NamedTuple

from PIL import Image

from stepprune_jax.checkpoints.shipped import ASSETS


class Example(NamedTuple):
    """An image and a question about it."""

    image: Image.Image
    question: str


def shapes_examples() -> list[Example]:
    """Returns the examples: questions of four families."""
    folder = ASSETS / "examples"
    rows = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    return [Example(Image.open(folder / row["image"]).convert("RGB"), row["text"]) for row in rows]
