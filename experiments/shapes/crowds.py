"""Questions of the second level: chains of neighbours, and one of each among look-alikes.

The patches of a chain follow it: each but the first is known only once the one before it is seen.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float16

from experiments.shapes.questions import NUMBERS, Mention, Query, mention_of, pick, sole
from experiments.shapes.scene import CROWD_GRID, DIRECTIONS, REACH, Scene, Shape, cell_of


class Chain(NamedTuple):
    """A way from one shape to another.

    Attributes:
        shapes: the shapes along it, all different.
        directions: the directions between them.
    """

    shapes: tuple[Shape, ...]
    directions: tuple[str, ...]


def _patch(shape: Shape, grid: int = CROWD_GRID) -> int:
    return cell_of(shape.x, shape.y, grid)


@functools.lru_cache(maxsize=1)
def neighbours(scene: Scene) -> dict[Shape, dict[str, Shape]]:
    """Returns the nearest shape of the same row or column by direction, where one is in reach."""
    shape_at = {divmod(_patch(shape), CROWD_GRID): shape for shape in scene.shapes}
    neighbours_of: dict[Shape, dict[str, Shape]] = {}
    for (row, column), shape in shape_at.items():
        ways = {
            name: [(row + far * down, column + far * right) for far in range(1, REACH + 1)]
            for name, (down, right) in DIRECTIONS.items()
        }
        first = {name: next((p for p in way if p in shape_at), None) for name, way in ways.items()}
        neighbours_of[shape] = {
            name: shape_at[place] for name, place in first.items() if place is not None
        }
    return neighbours_of


def chains(scene: Scene, starts: list[Shape], steps: int) -> list[Chain]:
    """Returns the chains of a number of steps from some shapes, none of which returns."""
    neighbours_of, chains_so_far = neighbours(scene), [Chain((start,), ()) for start in starts]
    for _ in range(steps):
        chains_so_far = [
            Chain((*shapes, shape), (*directions, direction))
            for shapes, directions in chains_so_far
            for direction, shape in neighbours_of[shapes[-1]].items()
            if shape not in shapes
        ]
    return chains_so_far


def distances(scene: Scene, grid: int) -> Float16[np.ndarray, "n 4"]:
    """Returns how far the neighbours of each patch's shape are, as shares of `REACH`."""
    label = np.full((grid * grid, len(DIRECTIONS)), np.nan, np.float16)
    for shape, nearest in neighbours(scene).items():
        for number, name in enumerate(DIRECTIONS):
            if name in nearest:
                one, two = (np.array(divmod(_patch(s), CROWD_GRID)) for s in (shape, nearest[name]))
                label[_patch(shape, grid), number] = np.abs(one - two).sum() / REACH
    return label


def _steps(family: str, steps: int) -> Callable[..., Query | None]:
    """Returns a function that asks about the end of a chain that begins at a sole kind or color."""

    def ask(scene: Scene, random: np.random.Generator, grid: int) -> Query | None:
        start_property, end_property = (
            ("kind", "color") if random.random() < 0.5 else ("color", "kind")
        )
        ways = chains(scene, sole(scene, lambda shape: getattr(shape, start_property)), steps)
        # All answers are as likely: otherwise the most frequent look would be a good guess.
        answer = pick(random, sorted({getattr(way.shapes[-1], end_property) for way in ways}))
        way = pick(random, [w for w in ways if getattr(w.shapes[-1], end_property) == answer])
        if way is None:
            return None
        start, *later_shapes = way.shapes
        word = start.kind if start_property == "kind" else "shape"
        named = start.kind if start_property == "kind" else f"{start.color} shape"
        end_word = {"color": "color", "kind": "shape"}[end_property]
        path = " then ".join(way.directions)
        text = f"From the {named} go {path}: what {end_word} is there?"
        words = zip((word, *way.directions), (start, *later_shapes), strict=True)
        mentions = tuple(mention_of(word_in_text, [shape]) for word_in_text, shape in words)
        relevant = tuple(_patch(shape, grid) for shape in way.shapes)
        return Query(family, text, answer, relevant, mentions)

    return ask


def _distinct(scene: Scene, random: np.random.Generator, grid: int) -> Query:
    """Asks for the number of kinds or colours; one shape of each suffices."""
    key, word = ("kind", "kinds") if random.random() < 0.5 else ("color", "colors")
    first = {}
    for shape in sorted(scene.shapes, key=_patch):
        first.setdefault(getattr(shape, key), shape)
    text = f"How many {word} of shapes are there?"
    relevant = tuple(_patch(shape, grid) for shape in first.values())
    mentions = (Mention(word, len(first), None),)
    return Query("distinct", text, NUMBERS[len(first)], relevant, mentions)


def _odd(scene: Scene, random: np.random.Generator, grid: int) -> Query | None:
    """Asks for the kind or colour of which there is only one shape, if it is the only such."""
    key, word = ("kind", "shape") if random.random() < 0.5 else ("color", "color")
    alone = sole(scene, lambda shape: getattr(shape, key))
    if len(alone) != 1:
        return None
    text, (shape,) = f"What {word} is there only once?", alone
    mentions = (mention_of("once", [shape]),)
    return Query("odd", text, getattr(shape, key), (_patch(shape, grid),), mentions)


FAMILIES = {
    "distinct": _distinct,
    "odd": _odd,
    "one step": _steps("one step", 1),
    "two steps": _steps("two steps", 2),
    "three steps": _steps("three steps", 3),
}
