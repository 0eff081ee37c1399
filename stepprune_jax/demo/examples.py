"""Initial examples of the page: images of the shapes world with a question each."""

from typing import NamedTuple

from PIL import Image

from stepprune_jax.data.shapes import render, scene_at

# A seed that no run trains on by default.
_SEED = 2026


class Example(NamedTuple):
    """An image and a question about it."""

    image: Image.Image
    question: str


def shapes_examples(count: int = 4) -> list[Example]:
    """Draws scenes, each with a question of another family.

    Args:
        count: number of examples, at most the number of families.

    Returns:
        The examples, the same each time.
    """
    examples, families = [], set()
    number = 0
    while len(examples) < count:
        scene, queries = scene_at(_SEED, "test", number)
        new = [query for query in queries if query.family not in families]
        if new:
            families.add(new[0].family)
            examples.append(Example(render(scene), new[0].text))
        number += 1
    return examples
