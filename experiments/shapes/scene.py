"""Random scenes: non-overlapping shapes, dots and strokes on a background."""

import itertools
from typing import NamedTuple

import numpy as np

SIDE = 96  # pixels; the unit of lengths in a scene at every resolution
GRID = 12  # patches along an edge
CELL = SIDE // GRID

SHAPES = ("circle", "square", "triangle", "cross", "diamond")
COLORS = {
    "red": (214, 40, 40),
    "green": (38, 160, 66),
    "blue": (44, 82, 212),
    "yellow": (236, 200, 38),
    "purple": (146, 54, 176),
    "cyan": (40, 186, 200),
}
BACKGROUNDS = ("plain", "striped", "checkered", "speckled")
MOST_SHAPES = 8
_SMALLEST, _LARGEST = 6.5, 21.0
_CLEAR = 1.0  # distance in pixels of a shape's middle from the edges of its patch

CROWD_GRID = 16  # patches along an edge of a crowd, each with one shape or none
REACH = 3  # patches to a neighbour in a crowd, at most
# Where each direction leads: patches down and to the right.
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


class Shape(NamedTuple):
    """A coloured shape; `x`, `y` and `radius` in pixels of an image of `SIDE` pixels."""

    kind: str
    color: str
    x: float
    y: float
    radius: float


class Dot(NamedTuple):
    """A small disc near the middle of a patch of the `GRID`."""

    color: str
    x: float
    y: float


class Stroke(NamedTuple):
    """A grey line from one point to another: a distractor that no question asks about."""

    start: tuple[float, float]
    end: tuple[float, float]
    shade: int


class Scene(NamedTuple):
    """The contents of an image.

    Attributes:
        background: one of `BACKGROUNDS`.
        shade: base colour of the background, RGB.
        texture_seed: seed of the background's pattern.
        shapes: one to eight, or in a crowd twenty to forty; large ones first.
        dots: None, or a dozen and more in two colours.
        strokes: distractors.
    """

    background: str
    shade: tuple[int, int, int]
    texture_seed: int
    shapes: tuple[Shape, ...]
    dots: tuple[Dot, ...]
    strokes: tuple[Stroke, ...]

    @property
    def complexity(self) -> int:
        """Number of things in the image: shapes, dots and strokes."""
        return len(self.shapes) + len(self.dots) + len(self.strokes)


def cell_of(x: float, y: float, grid: int = GRID) -> int:
    """Returns the raster index of the patch under a point, of `grid` patches along an edge."""
    cell = SIDE / grid
    return int(min(y // cell, grid - 1)) * grid + int(min(x // cell, grid - 1))


def _into_patch(point: np.ndarray) -> np.ndarray:
    """Moves a point to be clearly inside one patch of a grid with cells half as wide."""
    cell = CELL / 2
    corner = point // cell * cell
    return corner + np.clip(point - corner, _CLEAR, cell - _CLEAR)


def _place_shapes(random: np.random.Generator) -> list[Shape]:
    """Places one to eight separate shapes; more shapes are smaller on average."""
    shape_limit = int(random.integers(1, MOST_SHAPES + 1))
    largest = _LARGEST if shape_limit <= 3 else (16.0 if shape_limit <= 5 else 12.0)
    shapes: list[Shape] = []
    for _ in range(shape_limit):
        if shapes and random.random() < 0.35:  # repeated, in kind and colour
            kind, color = shapes[int(random.integers(len(shapes)))][:2]
        else:
            kind, color = str(random.choice(SHAPES)), str(random.choice(list(COLORS)))
        for _ in range(40):
            radius = float(random.uniform(_SMALLEST, largest))
            x, y = _into_patch(random.uniform(radius + 1, SIDE - radius - 1, 2))
            if all(np.hypot(x - o.x, y - o.y) > radius + o.radius + 2 for o in shapes):
                shapes.append(Shape(kind, color, float(x), float(y), radius))
                break
    return sorted(shapes, key=lambda shape: -shape.radius)


def _place_dots(random: np.random.Generator, shapes: list[Shape]) -> list[Dot]:
    """Places dots in free patches, in two colours of which one is clearly more frequent."""
    free = []
    for cell in range(GRID * GRID):
        x, y = (cell % GRID + 0.5) * CELL, (cell // GRID + 0.5) * CELL
        if all(np.hypot(x - o.x, y - o.y) > 1.1 * o.radius + CELL / 2 for o in shapes):
            free.append((x, y))
    dot_limit = min(len(free), 90)
    if dot_limit < 12:
        return []
    total = int(np.round(np.exp(random.uniform(np.log(12), np.log(dot_limit)))))
    lead = int(np.round(total * random.uniform(0.2, 0.7)))
    first = (total + max(3, lead)) // 2
    colors = random.choice(list(COLORS), 2, replace=False)
    dots = []
    for number, cell_number in enumerate(random.permutation(len(free))[:total]):
        x, y = free[cell_number] + random.uniform(-1, 1, 2)
        dots.append(Dot(str(colors[int(number >= first)]), float(x), float(y)))
    return dots


def _crowd_looks(random: np.random.Generator) -> list[tuple[str, str]]:
    """Draws kind and colour of each shape of a crowd.

    There are two to five kinds and as many colours. Up to two of each occur once; all others are
    shared by look-alikes.
    """
    # Scenes with many of them are asked for their number less often; so all answers are as likely.
    numbers = random.choice([2, 3, 4, 5], 2, p=[0.17, 0.25, 0.32, 0.26])
    kinds, colors = (
        random.permutation(names)[:number].tolist()
        for names, number in zip((SHAPES, list(COLORS)), numbers, strict=True)
    )
    single = [min(len(names) - 2, int(random.integers(1, 3))) for names in (kinds, colors)]
    common = kinds[single[0] :], colors[single[1] :]
    looks = [(kind, str(random.choice(common[1]))) for kind in kinds[: single[0]]]
    looks += [(str(random.choice(common[0])), color) for color in colors[: single[1]]]
    shared_looks = [
        tuple(names[n % len(names)] for names in common) for n in range(max(map(len, common)))
    ]
    more = int(random.integers(3))
    shared_looks += [tuple(str(random.choice(names)) for names in common) for _ in range(more)]
    remaining = int(random.integers(20, 41)) - len(looks) - 2 * len(shared_looks)
    return (
        looks
        + 2 * shared_looks
        + [shared_looks[n] for n in random.integers(0, len(shared_looks), remaining)]
    )


def _place_crowd(random: np.random.Generator) -> list[Shape]:
    """Places a crowd, each shape in a patch of its own and most of them near another."""
    looks, places, steps = _crowd_looks(random), {}, list(DIRECTIONS.values())
    free = {*itertools.product(range(CROWD_GRID), repeat=2)}
    for number in random.permutation(len(looks)):
        row = column = -1
        while (row, column) not in free:
            row, column = random.integers(0, CROWD_GRID, 2).tolist()
            if places and random.random() < 0.75:
                neighbor = list(places)[int(random.integers(len(places)))]
                row_step, column_step = steps[int(random.integers(4))]
                distance = int(random.integers(1, REACH + 1))
                row, column = (
                    neighbor[0] + distance * row_step,
                    neighbor[1] + distance * column_step,
                )
        free.remove((row, column))
        places[row, column] = looks[number]
    cell, shapes = SIDE / CROWD_GRID, []
    for (row, column), look in places.items():
        x, y = (np.array([column, row]) + 0.5) * cell + random.uniform(-0.3, 0.3, 2)
        shapes.append(Shape(*look, float(x), float(y), float(random.uniform(2.2, 2.7))))
    return sorted(shapes, key=lambda shape: -shape.radius)


def draw_scene(random: np.random.Generator, crowd: bool = False) -> Scene:
    """Draws a scene."""
    shapes = _place_crowd(random) if crowd else _place_shapes(random)
    dots = _place_dots(random, shapes) if not crowd and random.random() < 0.85 else []
    strokes = []
    for _ in range(int(random.integers(0, 6))):
        start = random.uniform(0, SIDE, 2)
        end = start + random.uniform(-30, 30, 2)
        strokes.append(Stroke(tuple(start), tuple(end), int(random.integers(70, 130))))
    shade = int(random.integers(150, 236)) + random.integers(-10, 11, 3)
    return Scene(
        background=str(random.choice(BACKGROUNDS)),
        shade=tuple(int(value) for value in shade),
        texture_seed=int(random.integers(2**31)),
        shapes=tuple(shapes),
        dots=tuple(dots),
        strokes=tuple(strokes),
    )
