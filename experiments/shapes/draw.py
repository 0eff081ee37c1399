"""Rendering of scenes, and labels of their patches."""

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
_FINE = 4  # pixels are drawn this many times finer, then averaged


def _background(scene: Scene, side: int) -> Float[np.ndarray, "side side 3"]:
    """The background as RGB from 0 to 255."""
    random = np.random.default_rng(scene.texture_seed)
    y, x = np.mgrid[:side, :side].astype(np.float32) * np.float32(SIDE / side)
    pattern = np.zeros((side, side), np.float32)
    if scene.background == "striped":
        angle, period = random.uniform(0, math.pi), random.uniform(7, 14)
        phase = (x * math.cos(angle) + y * math.sin(angle)) * 2 * math.pi / period
        pattern = np.sign(np.sin(phase)) * 14
    elif scene.background == "checkered":
        side = random.integers(5, 10)
        pattern = (((x // side) + (y // side)) % 2 * 2 - 1) * 14
    elif scene.background == "speckled":
        # The same grains at every resolution.
        pattern = random.normal(0, 16, (SIDE, SIDE))[y.astype(int), x.astype(int)]
    colors = np.asarray(scene.shade, np.float32) + pattern[..., None]
    return np.clip(colors, 0, 255)


def _corners(shape: Shape) -> list[tuple[float, float]]:
    """Corners of a polygonal shape, in pixels."""
    x, y, r = shape.x, shape.y, shape.radius
    if shape.kind == "square":
        h = 0.84 * r
        return [(x - h, y - h), (x + h, y - h), (x + h, y + h), (x - h, y + h)]
    if shape.kind == "triangle":
        return [(x, y - r), (x + 0.95 * r, y + 0.72 * r), (x - 0.95 * r, y + 0.72 * r)]
    if shape.kind == "diamond":
        return [(x, y - r), (x + 0.72 * r, y), (x, y + r), (x - 0.72 * r, y)]
    w = 0.32 * r
    steps = [(-w, -r), (w, -r), (w, -w), (r, -w), (r, w), (w, w), (w, r), (-w, r)]
    steps += [(-w, w), (-r, w), (-r, -w), (-w, -w)]
    return [(x + dx, y + dy) for dx, dy in steps]


def area(shape: Shape) -> float:
    """Area of a shape in square pixels."""
    if shape.kind == "circle":
        return math.pi * shape.radius**2
    x, y = np.asarray(_corners(shape)).T
    return float(abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2)


def _fill(canvas: ImageDraw.ImageDraw, shape: Shape, scale: float, color) -> None:
    """Fills a shape on a canvas `scale` times finer than the image."""
    if shape.kind == "circle":
        x, y, r = (scale * value for value in (shape.x, shape.y, shape.radius))
        canvas.ellipse((x - r, y - r, x + r, y + r), fill=color)
    else:
        canvas.polygon([(scale * x, scale * y) for x, y in _corners(shape)], fill=color)


def _tinted(color: str, random: np.random.Generator) -> tuple[int, ...]:
    """A colour of the palette, slightly off."""
    return tuple(int(np.clip(v + random.integers(-10, 11), 0, 255)) for v in COLORS[color])


def render(scene: Scene, side: int = SIDE) -> Image.Image:
    """Draws a scene."""
    random = np.random.default_rng(scene.texture_seed + 1)
    base = Image.fromarray(_background(scene, side).astype(np.uint8))
    image = base.resize((side * _FINE, side * _FINE), Image.Resampling.NEAREST)
    scale = _FINE * side / SIDE
    canvas = ImageDraw.Draw(image)
    for stroke in scene.strokes:
        ends = [tuple(scale * v for v in point) for point in (stroke.start, stroke.end)]
        canvas.line(ends, fill=(stroke.shade,) * 3, width=max(1, round(scale)))
    for dot in scene.dots:
        x, y, r = (scale * value for value in (dot.x, dot.y, DOT_RADIUS))
        canvas.ellipse((x - r, y - r, x + r, y + r), fill=_tinted(dot.color, random))
    for shape in scene.shapes:
        _fill(canvas, shape, scale, _tinted(shape.color, random))
    return image.reduce(_FINE)


def _shares(shape: Shape, grid: int) -> Float32[np.ndarray, " n"]:
    """Returns the share of each patch that a shape covers."""
    mask = Image.new("L", (CELL * grid, CELL * grid))
    _fill(ImageDraw.Draw(mask), shape, grid / GRID, 255)
    share = mask.resize((grid, grid), Image.Resampling.BOX)
    return np.asarray(share, np.float32).ravel() / 255


def covered(shape: Shape, grid: int = GRID, min_share: float = 0.1) -> list[int]:
    """Returns the patches of which a shape covers at least a share."""
    return np.flatnonzero(_shares(shape, grid) >= min_share).tolist()


def patch_labels(scene: Scene, grid: int = GRID, relative: bool = False) -> dict[str, np.ndarray]:
    """Returns labels of each patch, for local supervision of a vision tower."""
    n = grid * grid
    kind, color = np.zeros(n, np.int8), np.zeros(n, np.int8)
    place = np.full((n, 3), np.nan, np.float16)
    best, middle = np.full(n, 0.1), np.zeros(n, np.int8)
    for dot in scene.dots:
        cell = cell_of(dot.x, dot.y, grid)
        kind[cell], color[cell] = len(SHAPES) + 1, _COLOR_IDS[dot.color]
    for shape in scene.shapes:
        share = _shares(shape, grid)
        hit = share > best
        best = np.where(hit, share, best)
        kind[hit] = SHAPES.index(shape.kind) + 1
        color[hit] = _COLOR_IDS[shape.color]
        middle[cell_of(shape.x, shape.y, grid)] = 1
        half = SIDE / 2
        place[hit] = (shape.x / half - 1, shape.y / half - 1, shape.radius / 10)
    ground = np.full(n, BACKGROUNDS.index(scene.background), np.int8)
    value = {"value_offset": _offset(place, grid)} if relative else {"value_place": place}
    return {
        "class_kind": kind,
        "class_color": color,
        "class_background": ground,
        "class_middle": middle,
        **value,
        "share_across": _share(place[:, 0]),
        "share_down": _share(place[:, 1]),
    }


def _offset(place: np.ndarray, grid: int) -> np.ndarray:
    """A `value_place` in patches, its centre from the middle of each patch."""
    row, column = np.divmod(np.arange(grid * grid), grid)
    centre = (place[:, :2].astype(np.float32) + 1) * (grid / 2)
    radius = place[:, 2:].astype(np.float32) * (10 * grid / SIDE)
    patch_middle = np.stack([column, row], axis=1) + 0.5
    return np.concatenate([centre - patch_middle, radius], axis=1).astype(np.float16)


def _share(place: np.ndarray) -> np.ndarray:
    """Returns the share of the second of two opposite words, with log odds 8 times the place."""
    return (1 / (1 + np.exp(-8 * place.astype(np.float32)))).astype(np.float16)


def label_words() -> dict[str, np.ndarray]:
    """Returns the word for each class of `patch_labels`, "" if none, and those of shares."""
    return {
        "words_kind": np.asarray(["", *SHAPES, "dots"]),
        "words_color": np.asarray(["", *COLORS]),
        "words_background": np.asarray(BACKGROUNDS),
        "words_middle": np.asarray(["zero", "one"]),
        "words_across": np.asarray(["left", "right"]),
        "words_down": np.asarray(["above", "below"]),
    }


def presence(scene: Scene) -> Int8[np.ndarray, "p"]:
    """Returns which (shape, colour) pairs a scene contains, as 0 or 1, shapes slowest."""
    pairs = np.zeros((len(SHAPES), len(COLORS)), np.int8)
    for shape in scene.shapes:
        pairs[SHAPES.index(shape.kind), _COLOR_IDS[shape.color] - 1] = 1
    return pairs.ravel()
