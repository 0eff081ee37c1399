"""Questions about scenes, with one-word answers and the patches that the answers depend on."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from experiments.shapes.draw import area, covered
from experiments.shapes.scene import CELL, COLORS, GRID, SHAPES, SIDE, Dot, Scene, Shape, cell_of

NUMBERS = ("zero", "one", "two", "three", "four", "five")


class Mention(NamedTuple):
    """Shapes that a question mentions.

    Attributes:
        word: last word of the mention.
        number: number of the shapes.
        place: center and radius of a single shape, as fractions of the image's side; otherwise
            None.
    """

    word: str
    number: int
    place: tuple[float, float, float] | None


class Query(NamedTuple):
    """A question about a scene.

    Attributes:
        family: a key of `FAMILIES`.
        text: the question.
        answer: one word.
        relevant: patches that suffice to answer the question, in row-major order: the center of
            each shape or dot that the answer depends on, all patches of two shapes whose sizes are
            compared, or one patch of the background.
        mentions: the shapes of the question, in the order of its words.
    """

    family: str
    text: str
    answer: str
    relevant: tuple[int, ...]
    mentions: tuple[Mention, ...] = ()


def _mention(word: str, shapes: list[Shape]) -> Mention:
    """Returns the mention of all shapes in the scene that `word` denotes."""
    shape = shapes[0] if len(shapes) == 1 else None
    place = shape and (shape.x / SIDE, shape.y / SIDE, shape.radius / SIDE)
    return Mention(word, len(shapes), place)


def _mention_each(*shapes: Shape) -> tuple[Mention, ...]:
    """Returns one mention for each shape, which is the only one of its description."""
    return tuple(_mention(shape.kind, [shape]) for shape in shapes)


def _center_patches(grid: int, *items: Shape | Dot) -> tuple[int, ...]:
    """Returns the patches of the centers of shapes and dots, in row-major order."""
    return tuple(sorted({cell_of(item.x, item.y, grid) for item in items}))


def _choose(rng: np.random.Generator, items: list):
    """Returns a random item, or None from an empty list."""
    return items[int(rng.integers(len(items)))] if items else None


def _unique_shapes(scene: Scene, key: Callable[[Shape], object]) -> list[Shape]:
    """Returns the shapes whose `key` no other shape has."""
    counts = Counter(key(shape) for shape in scene.shapes)
    return [shape for shape in scene.shapes if counts[key(shape)] == 1]


def _describe(shape: Shape) -> str:
    """Returns color and kind of a shape, such as "red circle"."""
    return f"{shape.color} {shape.kind}"


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def _color(scene: Scene, rng: np.random.Generator, grid: int) -> Query | None:
    shape = _choose(rng, _unique_shapes(scene, lambda shape: shape.kind))
    if shape is None:
        return None
    text = f"What color is the {shape.kind}?"
    return Query("color", text, shape.color, _center_patches(grid, shape), _mention_each(shape))


def _shape(scene: Scene, rng: np.random.Generator, grid: int) -> Query | None:
    shape = _choose(rng, _unique_shapes(scene, lambda shape: shape.color))
    if shape is None:
        return None
    text, mention = f"What shape is {shape.color}?", _mention(shape.color, [shape])
    return Query("shape", text, shape.kind, _center_patches(grid, shape), (mention,))


def _existence(scene: Scene, rng: np.random.Generator, grid: int) -> Query:
    """Asks whether a shape exists, as POPE does.

    Color and kind of an absent shape mostly occur in the scene, but not together.
    """
    if rng.random() < 0.5:
        shape = _choose(rng, list(scene.shapes))
        mention = _mention(
            shape.kind, [s for s in scene.shapes if _describe(s) == _describe(shape)]
        )
        text = f"Is there a {_describe(shape)}?"
        return Query("existence", text, "yes", _center_patches(grid, shape), (mention,))
    present = {(s.color, s.kind) for s in scene.shapes}
    colors, kinds = {s.color for s in scene.shapes}, {s.kind for s in scene.shapes}
    mixed = sorted((c, k) for c in colors for k in kinds if (c, k) not in present)
    if mixed and rng.random() < 0.6:
        color, kind = _choose(rng, mixed)
    else:
        absent = [(c, k) for c in COLORS for k in SHAPES if (c, k) not in present]
        plausible = [pair for pair in absent if pair[0] in colors or pair[1] in kinds]
        color, kind = _choose(rng, plausible)
    similar = [s for s in scene.shapes if s.color == color or s.kind == kind]
    text = f"Is there a {color} {kind}?"
    return Query("existence", text, "no", _center_patches(grid, *similar), (_mention(kind, []),))


def _counting(scene: Scene, rng: np.random.Generator, grid: int) -> Query | None:
    """Asks for the number of all shapes, or of the shapes of a color or kind, up to five."""
    shapes, variant = list(scene.shapes), rng.random()
    if variant < 0.4:
        word, counted = "shapes", shapes
        text = "How many shapes are there?"
    elif variant < 0.75:
        colors = [s.color for s in shapes] if rng.random() < 0.8 else list(COLORS)
        color = _choose(rng, colors)
        word, counted = "shapes", [s for s in shapes if s.color == color]
        text = f"How many {color} shapes are there?"
    else:
        kinds = [s.kind for s in shapes] if rng.random() < 0.8 else list(SHAPES)
        kind = _choose(rng, kinds)
        word = "crosses" if kind == "cross" else f"{kind}s"
        text, counted = f"How many {word} are there?", [s for s in shapes if s.kind == kind]
    if len(counted) >= len(NUMBERS):
        return None
    # The answer zero depends on all shapes: any of them might have been of the color or kind.
    relevant = _center_patches(grid, *(counted or shapes))
    return Query("counting", text, NUMBERS[len(counted)], relevant, (_mention(word, counted),))


def _comparison(scene: Scene, rng: np.random.Generator, grid: int) -> Query | None:
    """Compares the numbers of shapes of two colors, which differ. The answers are balanced."""
    counts = Counter(s.color for s in scene.shapes)
    first = _choose(rng, list(counts))
    second = _choose(rng, [c for c in COLORS if counts[c] != counts[first]])
    if second is None:
        return None
    more, less = sorted((first, second), key=lambda c: -counts[c])
    first, second = (more, less) if rng.random() < 0.5 else (less, more)
    groups = [[s for s in scene.shapes if s.color == color] for color in (first, second)]
    text = f"Are there more {first} shapes than {second} shapes?"
    mentions = tuple(_mention("shapes", group) for group in groups)
    relevant = _center_patches(grid, *groups[0], *groups[1])
    answer = _yes_or_no(counts[first] > counts[second])
    return Query("comparison", text, answer, relevant, mentions)


def _relation(scene: Scene, rng: np.random.Generator, grid: int) -> Query | None:
    """Asks whether a shape is left or right of another shape, or above or below.

    The distance is at least ten pixels. Both shapes are mostly in the same half of the image, so
    the place of one shape hardly predicts the answer.
    """
    pairs = list(itertools.permutations(_unique_shapes(scene, _describe), 2))
    axis, is_same_half = int(rng.integers(2)), rng.random() < 0.8
    places = {id(shape): (shape.x, shape.y)[axis] for shape in scene.shapes}
    distant_pairs = [p for p in pairs if abs(places[id(p[0])] - places[id(p[1])]) >= 10]
    half = SIDE / 2
    same_half = [p for p in distant_pairs if (places[id(p[0])] < half) == (places[id(p[1])] < half)]
    pair = _choose(rng, same_half if is_same_half else distant_pairs)
    if pair is None:
        return None
    first, second = pair
    words, preposition = ((("left", "right"), " of"), (("above", "below"), ""))[axis]
    choice = f"{words[0]} or {words[1]}{preposition}"
    text = f"Is the {_describe(first)} {choice} the {_describe(second)}?"
    answer = words[int(places[id(first)] > places[id(second)])]
    return Query("relation", text, answer, _center_patches(grid, *pair), _mention_each(*pair))


def _position(scene: Scene, rng: np.random.Generator, grid: int) -> Query | None:
    shape = _choose(rng, [s for s in _unique_shapes(scene, _describe) if abs(s.x - SIDE / 2) > 5])
    if shape is None:
        return None
    side = "left" if shape.x < SIDE / 2 else "right"
    text = f"Which side is the {_describe(shape)} on?"
    return Query("position", text, side, _center_patches(grid, shape), _mention_each(shape))


def _size(scene: Scene, rng: np.random.Generator, grid: int) -> Query | None:
    """Compares the sizes of two shapes, whose radii differ by at least a fifth.

    The shape with the larger radius also has the larger area.
    """
    pairs = [
        (first, second)
        for first, second in itertools.permutations(_unique_shapes(scene, _describe), 2)
        if not 0.8 < first.radius / second.radius < 1.25
        and (first.radius > second.radius) == (area(first) > area(second))
    ]
    pair = _choose(rng, pairs)
    if pair is None:
        return None
    first, second = pair
    text = f"Is the {_describe(first)} larger than the {_describe(second)}?"
    patches = tuple(sorted({*covered(first, grid), *covered(second, grid)}))
    answer = _yes_or_no(first.radius > second.radius)
    return Query("size", text, answer, patches, _mention_each(*pair))


def _majority(scene: Scene, rng: np.random.Generator, grid: int) -> Query | None:
    if not scene.dots:
        return None
    counts = Counter(dot.color for dot in scene.dots)
    more, less = sorted(counts, key=lambda c: -counts[c])
    patches = _center_patches(grid, *scene.dots)
    if rng.random() < 0.5:
        return Query("majority", "What color are most dots?", more, patches)
    first, second = (more, less) if rng.random() < 0.5 else (less, more)
    text = f"Are there more {first} dots than {second} dots?"
    return Query("majority", text, _yes_or_no(first == more), patches)


def _background(scene: Scene, rng: np.random.Generator, grid: int) -> Query:
    covered_patches = set(_center_patches(GRID, *scene.dots))
    covered_patches = covered_patches.union(
        *(covered(shape, min_share=0.01) for shape in scene.shapes)
    )
    # The patch is chosen on the grid of the scene, so that worlds of all grids have the same
    # questions.
    row, column = divmod(_choose(rng, sorted(set(range(GRID**2)) - covered_patches)) or 0, GRID)
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

# Families that depend on many tokens are asked more often.
_FREQUENCIES = (1.0, 1.0, 1.2, 1.6, 1.2, 1.2, 0.8, 1.2, 4.5, 0.8)
# Small models learn questions about geometry and number last.
_SLOW_FAMILIES = ("counting", "relation", "position", "size")


def random_queries(
    scene: Scene,
    rng: np.random.Generator,
    count: int = 8,
    grid: int = GRID,
    emphasis: float = 1.0,
) -> list[Query]:
    """Returns up to `count` different random questions about a scene.

    Args:
        scene: the scene.
        rng: source of random numbers.
        count: number of questions. A scene without enough different questions has fewer.
        grid: patches along an edge, for the relevant patches.
        emphasis: factor on the frequency of slowly learned families.
    """
    makers, queries = list(FAMILIES.values()), {}
    factors = [emphasis if name in _SLOW_FAMILIES else 1.0 for name in FAMILIES]
    weights = np.asarray(_FREQUENCIES) * factors
    for _ in range(12 * count):
        maker = makers[int(rng.choice(len(makers), p=weights / weights.sum()))]
        query = maker(scene, rng, grid)
        if query is not None:
            queries.setdefault(query.text, query)
        if len(queries) == count:
            break
    return list(queries.values())
