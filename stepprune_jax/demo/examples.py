"""Examples of the page: images of the shapes world with a question each."""

import json

from PIL import Image

from stepprune_jax.checkpoints.shipped import ASSETS


def shapes_examples() -> list[tuple[Image.Image, str]]:
    """Returns four pairs of an image and a question, one for each kind of question.

    The shapes world is a synthetic data set of drawn shapes. Image N is scene N of its test split
    with seed 2026.
    """
    folder = ASSETS / "examples"
    examples = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    return [
        (Image.open(folder / example["image"]).convert("RGB"), example["text"])
        for example in examples
    ]
