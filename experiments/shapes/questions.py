"""Questions of the first level: one-word answers, and the patches that they depend on."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from experiments.shapes.draw import area, covered
from experiments.shapes.scene import (
    CELL,
    COLORS,
    GRID,
    MOST_SHAPES,
    SHAPES,
    SIDE,
    Dot,
    Scene,
    Shape,
    cell_of,
)

NUMBERS = ("zero", "one", "two", "three", "four", "five")


class Mention(NamedTuple):
    """Shapes that a question mentions.

    Attributes:
        word: last word that names them.
        number: how many there are; of more than `MOST_SHAPES`, that many.
        place: middle and radius of the only one, as shares of the image's side; else None.
        look: kind and colour of the only one; else None.
    """

    word: str
    number: int
    place: tuple[float, float, float] | None
    look: tuple[str, str] | None = None


class Query(NamedTuple):
    """A question about a scene.

    Attributes:
        family: a family of `levels.LEVELS`.
        text: the question.
        answer: one word.
        relevant: patches that suffice to answer: the middle of each shape or dot the answer depends
            on, everything two shapes cover if their sizes are compared, one patch of the
            background. In raster order, or along the chain that a question of several steps
            describes.
        mentions: the shapes it mentions, in the order of its words.
    """

    family: str
    text: str
    answer: str
    relevant: tuple[int, ...]
    mentions: tuple[Mention, ...] = ()


def mention_of(word: str, shapes: list[Shape]) -> Mention:
    """Returns the mention of the shapes that `word` denotes in the scene."""
    only = shapes[0] if len(shapes) == 1 else None
    place = only and (only.x / SIDE, only.y / SIDE, only.radius / SIDE)
    return Mention(word, min(len(shapes), MOST_SHAPES), place, only and only[:2])


def _sole_mentions(*shapes: Shape) -> tuple[Mention, ...]:
    return tuple(mention_of(shape.kind, [shape]) for shape in shapes)


def _middle(grid: int, *things: Shape | Dot) -> tuple[int, ...]:
    return tuple(sorted({cell_of(thing.x, thing.y, grid) for thing in things}))


def pick(random: np.random.Generator, items: list):
    """Draws one of some items; None if there is none."""
    return items[int(random.integers(len(items)))] if items else None


def sole(scene: Scene, key: Callable[[Shape], object]) -> list[Shape]:
    """Returns shapes that are the only ones with their `key`."""
    counts = Counter(key(shape) for shape in scene.shapes)
    return [shape for shape in scene.shapes if counts[key(shape)] == 1]


def _named(shape: Shape) -> str:
    return f"{shape.color} {shape.kind}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _color(scene: Scene, random: np.random.Generator, grid: int) -> Query | None:
    shape = pick(random, sole(scene, lambda s: s.kind))
    if shape is None:
        return None
    text = f"What color is the {shape.kind}?"
    return Query("color", text, shape.color, _middle(grid, shape), _sole_mentions(shape))


def _shape(scene: Scene, random: np.random.Generator, grid: int) -> Query | None:
    shape = pick(random, sole(scene, lambda s: s.color))
    if shape is None:
        return None
    text, mention = f"What shape is {shape.color}?", mention_of(shape.color, [shape])
    return Query("shape", text, shape.kind, _middle(grid, shape), (mention,))


def _existence(scene: Scene, random: np.random.Generator, grid: int) -> Query:
    """Asks as in POPE: absent pairs mostly have a colour and a kind that are present."""
    if random.random() < 0.5:
        shape = pick(random, list(scene.shapes))
        mention = mention_of(shape.kind, [s for s in scene.shapes if _named(s) == _named(shape)])
        text = f"Is there a {_named(shape)}?"
        return Query("existence", text, "yes", _middle(grid, shape), (mention,))
    present = {(s.color, s.kind) for s in scene.shapes}
    colors, kinds = {s.color for s in scene.shapes}, {s.kind for s in scene.shapes}
    mixed = sorted((c, k) for c in colors for k in kinds if (c, k) not in present)
    if mixed and random.random() < 0.6:
        color, kind = pick(random, mixed)
    else:
        absent = [(c, k) for c in COLORS for k in SHAPES if (c, k) not in present]
        half = [pair for pair in absent if pair[0] in colors or pair[1] in kinds]
        color, kind = pick(random, half)
    similar = [s for s in scene.shapes if s.color == color or s.kind == kind]
    text = f"Is there a {color} {kind}?"
    return Query("existence", text, "no", _middle(grid, *similar), (mention_of(kind, []),))


def _counting(scene: Scene, random: np.random.Generator, grid: int) -> Query | None:
    """Counts all shapes, or those of a colour or kind, possibly none; never more than five."""
    shapes, draw = list(scene.shapes), random.random()
    if draw < 0.4:
        word, hit = "shapes", shapes
        text = "How many shapes are there?"
    elif draw < 0.75:
        colors = [s.color for s in shapes] if random.random() < 0.8 else list(COLORS)
        color = pick(random, colors)
        word, hit = "shapes", [s for s in shapes if s.color == color]
        text = f"How many {color} shapes are there?"
    else:
        kinds = [s.kind for s in shapes] if random.random() < 0.8 else list(SHAPES)
        kind = pick(random, kinds)
        word = "crosses" if kind == "cross" else f"{kind}s"
        text, hit = f"How many {word} are there?", [s for s in shapes if s.kind == kind]
    if len(hit) >= len(NUMBERS):
        return None
    # That there is none is visible in any shape that might have been one.
    relevant = _middle(grid, *(hit or shapes))
    return Query("counting", text, NUMBERS[len(hit)], relevant, (mention_of(word, hit),))


def _comparison(scene: Scene, random: np.random.Generator, grid: int) -> Query | None:
    """Compares the counts of two colours; never a tie, and the answers are balanced."""
    counts = Counter(s.color for s in scene.shapes)
    first = pick(random, list(counts))
    second = pick(random, [c for c in COLORS if counts[c] != counts[first]])
    if second is None:
        return None
    more, less = sorted((first, second), key=lambda c: -counts[c])
    one, two = (more, less) if random.random() < 0.5 else (less, more)
    hits = [[s for s in scene.shapes if s.color == color] for color in (one, two)]
    text = f"Are there more {one} shapes than {two} shapes?"
    mentions = tuple(mention_of("shapes", hit) for hit in hits)
    relevant = _middle(grid, *hits[0], *hits[1])
    return Query("comparison", text, _yes(counts[one] > counts[two]), relevant, mentions)


def _relation(scene: Scene, random: np.random.Generator, grid: int) -> Query | None:
    """Asks left or right, above or below, by at least ten pixels.

    The two shapes are mostly in the same half of the image, so that the place of one tells little.
    """
    pairs = list(itertools.permutations(sole(scene, _named), 2))
    axis, near = int(random.integers(2)), random.random() < 0.8
    places = {id(shape): (shape.x, shape.y)[axis] for shape in scene.shapes}
    distant_pairs = [p for p in pairs if abs(places[id(p[0])] - places[id(p[1])]) >= 10]
    half = SIDE / 2
    same_half = [p for p in distant_pairs if (places[id(p[0])] < half) == (places[id(p[1])] < half)]
    pair = pick(random, same_half if near else distant_pairs)
    if pair is None:
        return None
    one, two = pair
    words, of = ((("left", "right"), " of"), (("above", "below"), ""))[axis]
    text = f"Is the {_named(one)} {words[0]} or {words[1]}{of} the {_named(two)}?"
    answer = words[int(places[id(one)] > places[id(two)])]
    return Query("relation", text, answer, _middle(grid, one, two), _sole_mentions(one, two))


def _position(scene: Scene, random: np.random.Generator, grid: int) -> Query | None:
    shape = pick(random, [s for s in sole(scene, _named) if abs(s.x - SIDE / 2) > 5])
    if shape is None:
        return None
    side = "left" if shape.x < SIDE / 2 else "right"
    text = f"Which side is the {_named(shape)} on?"
    return Query("position", text, side, _middle(grid, shape), _sole_mentions(shape))


def _size(scene: Scene, random: np.random.Generator, grid: int) -> Query | None:
    """Compares two shapes, one at least a quarter larger in radius, and larger in area."""
    pairs = [
        (one, two)
        for one, two in itertools.permutations(sole(scene, _named), 2)
        if not 0.8 < one.radius / two.radius < 1.25
        and (one.radius > two.radius) == (area(one) > area(two))
    ]
    pair = pick(random, pairs)
    if pair is None:
        return None
    one, two = pair
    text = f"Is the {_named(one)} larger than the {_named(two)}?"
    patches = tuple(sorted({*covered(one, grid), *covered(two, grid)}))
    return Query("size", text, _yes(one.radius > two.radius), patches, _sole_mentions(one, two))


def _majority(scene: Scene, random: np.random.Generator, grid: int) -> Query | None:
    if not scene.dots:
        return None
    counts = Counter(dot.color for dot in scene.dots)
    more, less = sorted(counts, key=lambda c: -counts[c])
    patches = _middle(grid, *scene.dots)
    if random.random() < 0.5:
        return Query("majority", "What color are most dots?", more, patches)
    one, two = (more, less) if random.random() < 0.5 else (less, more)
    text = f"Are there more {one} dots than {two} dots?"
    return Query("majority", text, _yes(one == more), patches)


def _background(scene: Scene, random: np.random.Generator, grid: int) -> Query:
    covered_patches = set(_middle(GRID, *scene.dots))
    covered_patches = covered_patches.union(
        *(covered(shape, min_share=0.01) for shape in scene.shapes)
    )
    # Drawn from the same patches whatever the grid, so that all grids see the same questions.
    row, column = divmod(pick(random, sorted(set(range(GRID**2)) - covered_patches)) or 0, GRID)
    patch = cell_of((column + 0.5) * CELL, (row + 0.5) * CELL, grid)
    return Query("background", "What is the background?", scene.background, (patch,))


FAMILIES = {
    "color": _color,
    "shape": _shape,
    "existence": _existence,
    "counting": _counting,
    "comparison": _comparison,
    "relation": _relation,
    "position": _position,
    "size": _size,
    "majority": _majority,
    "background": _background,
}
