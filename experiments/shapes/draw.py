"""Renders scenes and labels their patches."""

import math

import numpy as np
from jaxtyping import Float, Float32, Int8
from PIL import Image, ImageDraw

from experiments.shapes.scene import (
    BACKGROUNDS,
    CELL,
    COLORS,
    GRID,
    SHAPES,
    SIDE,
    Scene,
    Shape,
    cell_of,
)

DOT_RADIUS = 2.4
_COLOR_IDS = {color: number for number, color in enumerate(COLORS, start=1)}
_SUPERSAMPLING = 4  # Each pixel is the mean of 4 x 4 drawn pixels.
# Corners of polygonal shapes of radius 1 around (0, 0). The cross has three corners per quarter
# turn, which maps (x, y) to (-y, x).
_CROSS_QUARTER = [(-0.32, -1.0), (0.32, -1.0), (0.32, -0.32)]
_UNIT_CORNERS = {
    "square": [(-0.84, -0.84), (0.84, -0.84), (0.84, 0.84), (-0.84, 0.84)],
    "triangle": [(0.0, -1.0), (0.95, 0.72), (-0.95, 0.72)],
    "diamond": [(0.0, -1.0), (0.72, 0.0), (0.0, 1.0), (-0.72, 0.0)],
    "cross": [
        *_CROSS_QUARTER,
        *((-y, x) for x, y in _CROSS_QUARTER),
        *((-x, -y) for x, y in _CROSS_QUARTER),
        *((y, -x) for x, y in _CROSS_QUARTER),
    ],
}


def _background(scene: Scene, side: int) -> Float[np.ndarray, "side side 3"]:
    """Returns the background in RGB, from 0 to 255."""
    rng = np.random.default_rng(scene.texture_seed)
    y, x = np.mgrid[:side, :side].astype(np.float32) * np.float32(SIDE / side)
    pattern = np.zeros((side, side), np.float32)
    if scene.background == "striped":
        angle, period = rng.uniform(0, math.pi), rng.uniform(7, 14)
        phase = (x * math.cos(angle) + y * math.sin(angle)) * 2 * math.pi / period
        pattern = np.sign(np.sin(phase)) * 14
    elif scene.background == "checkered":
        side = rng.integers(5, 10)
        pattern = (((x // side) + (y // side)) % 2 * 2 - 1) * 14
    elif scene.background == "speckled":
        # Images of all resolutions have the same grains.
        pattern = rng.normal(0, 16, (SIDE, SIDE))[y.astype(int), x.astype(int)]
    colors = np.asarray(scene.shade, np.float32) + pattern[..., None]
    return np.clip(colors, 0, 255)


def _corners(shape: Shape) -> list[tuple[float, float]]:
    """Returns the corners of a polygonal shape, in pixels."""
    x, y, radius = shape.x, shape.y, shape.radius
    return [(x + dx * radius, y + dy * radius) for dx, dy in _UNIT_CORNERS[shape.kind]]


def area(shape: Shape) -> float:
    """Returns the area of a shape in square pixels."""
    if shape.kind == "circle":
        return math.pi * shape.radius**2
    x, y = np.asarray(_corners(shape)).T
    return float(abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2)


def _fill(canvas: ImageDraw.ImageDraw, shape: Shape, scale: float, color) -> None:
    """Fills a shape on a canvas with `scale` times the scene's resolution."""
    if shape.kind == "circle":
        x, y, radius = (scale * value for value in (shape.x, shape.y, shape.radius))
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
    else:
        canvas.polygon([(scale * x, scale * y) for x, y in _corners(shape)], fill=color)


def _tint(color: str, rng: np.random.Generator) -> tuple[int, ...]:
    """Returns a color of the palette with a small random change."""
    return tuple(int(np.clip(value + rng.integers(-10, 11), 0, 255)) for value in COLORS[color])


def render(scene: Scene, side: int = SIDE) -> Image.Image:
    """Renders a scene as an image of `side` by `side` pixels."""
    rng = np.random.default_rng(scene.texture_seed + 1)
    base = Image.fromarray(_background(scene, side).astype(np.uint8))
    image = base.resize((side * _SUPERSAMPLING, side * _SUPERSAMPLING), Image.Resampling.NEAREST)
    scale = _SUPERSAMPLING * side / SIDE
    canvas = ImageDraw.Draw(image)
    for stroke in scene.strokes:
        ends = [tuple(scale * value for value in point) for point in (stroke.start, stroke.end)]
        canvas.line(ends, fill=(stroke.shade,) * 3, width=max(1, round(scale)))
    for dot in scene.dots:
        x, y, radius = (scale * value for value in (dot.x, dot.y, DOT_RADIUS))
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_tint(dot.color, rng))
    for shape in scene.shapes:
        _fill(canvas, shape, scale, _tint(shape.color, rng))
    return image.reduce(_SUPERSAMPLING)


def _coverage(shape: Shape, grid: int) -> Float32[np.ndarray, " n"]:
    """Returns the fraction of each patch that a shape covers."""
    mask = Image.new("L", (CELL * grid, CELL * grid))
    _fill(ImageDraw.Draw(mask), shape, grid / GRID, 255)
    share = mask.resize((grid, grid), Image.Resampling.BOX)
    return np.asarray(share, np.float32).ravel() / 255


def covered(shape: Shape, grid: int = GRID, min_share: float = 0.1) -> list[int]:
    """Returns the patches whose covered fraction is at least `min_share`."""
    return np.flatnonzero(_coverage(shape, grid) >= min_share).tolist()


def patch_labels(scene: Scene, grid: int = GRID, relative: bool = False) -> dict[str, np.ndarray]:
    """Returns labels of all patches, which supervise a vision tower.

    Args:
        scene: the scene.
        grid: patches along an edge.
        relative: whether places are relative to each patch (`value_offset`) instead of the image
            (`value_place`).

    Returns:
        Arrays by name. The prefix is the type of label: `class_` is a class, `value_` are numbers,
        NaN where undefined, and `share_` is the probability of the second of two opposite words.
    """
    n = grid * grid
    kind, color = np.zeros(n, np.int8), np.zeros(n, np.int8)
    place = np.full((n, 3), np.nan, np.float16)
    max_coverage, is_center = np.full(n, 0.1), np.zeros(n, np.int8)
    for dot in scene.dots:
        cell = cell_of(dot.x, dot.y, grid)
        kind[cell], color[cell] = len(SHAPES) + 1, _COLOR_IDS[dot.color]
    for shape in scene.shapes:
        coverage = _coverage(shape, grid)
        is_covered = coverage > max_coverage
        max_coverage = np.where(is_covered, coverage, max_coverage)
        kind[is_covered] = SHAPES.index(shape.kind) + 1
        color[is_covered] = _COLOR_IDS[shape.color]
        is_center[cell_of(shape.x, shape.y, grid)] = 1
        half_side = SIDE / 2
        place[is_covered] = (shape.x / half_side - 1, shape.y / half_side - 1, shape.radius / 10)
    background = np.full(n, BACKGROUNDS.index(scene.background), np.int8)
    value = {"value_offset": _offset(place, grid)} if relative else {"value_place": place}
    return {
        "class_kind": kind,
        "class_color": color,
        "class_background": background,
        "class_middle": is_center,
        **value,
        "share_across": _share(place[:, 0]),
        "share_down": _share(place[:, 1]),
    }


def _offset(place: np.ndarray, grid: int) -> np.ndarray:
    """Converts `value_place` to patches, with centers relative to the center of each patch."""
    row, column = np.divmod(np.arange(grid * grid), grid)
    center = (place[:, :2].astype(np.float32) + 1) * (grid / 2)
    radius = place[:, 2:].astype(np.float32) * (10 * grid / SIDE)
    patch_center = np.stack([column, row], axis=1) + 0.5
    return np.concatenate([center - patch_center, radius], axis=1).astype(np.float16)


def _share(place: np.ndarray) -> np.ndarray:
    """Returns the probability of the second of two opposite words: sigmoid(8 * place)."""
    return (1 / (1 + np.exp(-8 * place.astype(np.float32)))).astype(np.float16)


def label_words() -> dict[str, np.ndarray]:
    """Returns the words of the labels of `patch_labels`; "" for a class without a word."""
    return {
        "words_kind": np.asarray(["", *SHAPES, "dots"]),
        "words_color": np.asarray(["", *COLORS]),
        "words_background": np.asarray(BACKGROUNDS),
        "words_middle": np.asarray(["zero", "one"]),
        "words_across": np.asarray(["left", "right"]),
        "words_down": np.asarray(["above", "below"]),
    }


def presence(scene: Scene) -> Int8[np.ndarray, "p"]:
    """Returns 1 for each pair of kind and color in a scene, and 0 otherwise, in row-major order."""
    pairs = np.zeros((len(SHAPES), len(COLORS)), np.int8)
    for shape in scene.shapes:
        pairs[SHAPES.index(shape.kind), _COLOR_IDS[shape.color] - 1] = 1
    return pairs.ravel()
