"""Examples of the page: images of the shapes world with a question each."""

import json

from PIL import Image

from stepprune_jax.checkpoints.shipped import ASSETS


def shapes_examples() -> list[tuple[Image.Image, str]]:
    """Returns one image and question for each of four families of questions.

    Image N is scene N of the world's test split with seed 2026.
    """
    folder = ASSETS / "examples"
    rows = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    return [(Image.open(folder / row["image"]).convert("RGB"), row["text"]) for row in rows]
