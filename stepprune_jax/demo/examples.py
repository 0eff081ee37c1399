"""Initial examples of the page: images of the shapes world with a question each."""

import json

from PIL import Image

from stepprune_jax.checkpoints.shipped import ASSETS


def shapes_examples() -> list[tuple[Image.Image, str]]:
    """Returns an image and a question about it for each of four families of questions.

    The shapes world draws image N as scene N of its test split, with seed 2026.
    """
    folder = ASSETS / "examples"
    rows = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    return [(Image.open(folder / row["image"]).convert("RGB"), row["text"]) for row in rows]
