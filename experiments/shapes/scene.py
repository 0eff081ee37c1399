"""Generates random scenes: separate shapes, dots and strokes on a background."""

from typing import NamedTuple

import numpy as np

SIDE = 96  # Side of an image in pixels. Lengths in scenes have this unit at every resolution.
GRID = 12  # Patches along an edge.
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
MAX_SHAPES = 8
_MIN_RADIUS, _MAX_RADIUS = 6.5, 21.0
_PATCH_MARGIN = 1.0  # Distance of a shape's center from the edges of its patch, in pixels.


class Shape(NamedTuple):
    """A colored shape. `x`, `y` and `radius` are pixels of an image of `SIDE` pixels."""

    kind: str
    color: str
    x: float
    y: float
    radius: float


class Dot(NamedTuple):
    """A small disc near the center of a patch."""

    color: str
    x: float
    y: float


class Stroke(NamedTuple):
    """A gray line from one point to another, which no question is about."""

    start: tuple[float, float]
    end: tuple[float, float]
    shade: int


class Scene(NamedTuple):
    """The contents of an image.

    Attributes:
        background: one of `BACKGROUNDS`.
        shade: base color of the background, RGB.
        texture_seed: seed of the background's pattern.
        shapes: one to eight shapes, by descending radius.
        dots: no dots, or at least twelve dots in two colors.
        strokes: up to five lines.
    """

    background: str
    shade: tuple[int, int, int]
    texture_seed: int
    shapes: tuple[Shape, ...]
    dots: tuple[Dot, ...]
    strokes: tuple[Stroke, ...]

    @property
    def complexity(self) -> int:
        """Number of shapes, dots and strokes."""
        return len(self.shapes) + len(self.dots) + len(self.strokes)


def cell_of(x: float, y: float, grid: int = GRID) -> int:
    """Returns the row-major index of the patch at a point, for `grid` patches along an edge."""
    cell = SIDE / grid
    return int(min(y // cell, grid - 1)) * grid + int(min(x // cell, grid - 1))


def _move_into_patch(point: np.ndarray) -> np.ndarray:
    """Moves a point away from the edges of the patches of a grid of half the patch size."""
    cell = CELL / 2
    corner = point // cell * cell
    return corner + np.clip(point - corner, _PATCH_MARGIN, cell - _PATCH_MARGIN)


def _place_shapes(rng: np.random.Generator) -> list[Shape]:
    """Places one to eight separate shapes. The more shapes, the smaller they are."""
    shape_limit = int(rng.integers(1, MAX_SHAPES + 1))
    max_radius = _MAX_RADIUS if shape_limit <= 3 else (16.0 if shape_limit <= 5 else 12.0)
    shapes: list[Shape] = []
    for _ in range(shape_limit):
        if shapes and rng.random() < 0.35:  # Repeats kind and color of another shape.
            kind, color = shapes[int(rng.integers(len(shapes)))][:2]
        else:
            kind, color = str(rng.choice(SHAPES)), str(rng.choice(list(COLORS)))
        for _ in range(40):
            radius = float(rng.uniform(_MIN_RADIUS, max_radius))
            x, y = _move_into_patch(rng.uniform(radius + 1, SIDE - radius - 1, 2))
            if all(
                np.hypot(x - shape.x, y - shape.y) > radius + shape.radius + 2 for shape in shapes
            ):
                shapes.append(Shape(kind, color, float(x), float(y), radius))
                break
    return sorted(shapes, key=lambda shape: -shape.radius)


def _place_dots(rng: np.random.Generator, shapes: list[Shape]) -> list[Dot]:
    """Places dots in free patches, in two colors. One color is clearly more frequent."""
    free_centers = []
    for cell in range(GRID * GRID):
        x, y = (cell % GRID + 0.5) * CELL, (cell // GRID + 0.5) * CELL
        if all(
            np.hypot(x - shape.x, y - shape.y) > 1.1 * shape.radius + CELL / 2 for shape in shapes
        ):
            free_centers.append((x, y))
    dot_limit = min(len(free_centers), 90)
    if dot_limit < 12:
        return []
    total = int(np.round(np.exp(rng.uniform(np.log(12), np.log(dot_limit)))))
    lead = int(np.round(total * rng.uniform(0.2, 0.7)))
    majority = (total + max(3, lead)) // 2
    colors = rng.choice(list(COLORS), 2, replace=False)
    dots = []
    for number, free_index in enumerate(rng.permutation(len(free_centers))[:total]):
        x, y = free_centers[free_index] + rng.uniform(-1, 1, 2)
        dots.append(Dot(str(colors[int(number >= majority)]), float(x), float(y)))
    return dots


def random_scene(rng: np.random.Generator) -> Scene:
    """Generates a scene."""
    shapes = _place_shapes(rng)
    dots = _place_dots(rng, shapes) if rng.random() < 0.85 else []
    strokes = []
    for _ in range(int(rng.integers(0, 6))):
        start = rng.uniform(0, SIDE, 2)
        end = start + rng.uniform(-30, 30, 2)
        strokes.append(Stroke(tuple(start), tuple(end), int(rng.integers(70, 130))))
    shade = int(rng.integers(150, 236)) + rng.integers(-10, 11, 3)
    return Scene(
        background=str(rng.choice(BACKGROUNDS)),
        shade=tuple(int(value) for value in shade),
        texture_seed=int(rng.integers(2**31)),
        shapes=tuple(shapes),
        dots=tuple(dots),
        strokes=tuple(strokes),
    )
