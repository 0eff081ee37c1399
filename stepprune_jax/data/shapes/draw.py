"""Scenes to pixels, and to labels of their patches."""

import functools
import math

import numpy as np
from jaxtyping import Int8
from PIL import Image, ImageDraw

from stepprune_jax.data.shapes.scene import (
    BACKGROUNDS,
    COLORS,
    GRID,
    SHAPES,
    SIDE,
    Scene,
    Shape,
    cell_of,
)

DOT_RADIUS = 2.4
_FINE = 4  # pixels are drawn this many times finer, then averaged


def _background(scene: Scene) -> np.ndarray:
    """The background as float RGB [SIDE, SIDE, 3]."""
    random = np.random.default_rng(scene.texture_seed)
    y, x = np.mgrid[:SIDE, :SIDE].astype(np.float32)
    pattern = np.zeros((SIDE, SIDE), np.float32)
    if scene.background == "striped":
        angle, period = random.uniform(0, math.pi), random.uniform(7, 14)
        phase = (x * math.cos(angle) + y * math.sin(angle)) * 2 * math.pi / period
        pattern = np.sign(np.sin(phase)) * 14
    elif scene.background == "checkered":
        side = random.integers(5, 10)
        pattern = (((x // side) + (y // side)) % 2 * 2 - 1) * 14
    elif scene.background == "speckled":
        pattern = random.normal(0, 16, (SIDE, SIDE))
    return np.clip(np.asarray(scene.shade, np.float32) + pattern[..., None], 0, 255)


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


def _fill(canvas: ImageDraw.ImageDraw, shape: Shape, scale: int, color) -> None:
    """Fills a shape on a canvas `scale` times finer than the picture."""
    if shape.kind == "circle":
        x, y, r = (scale * value for value in (shape.x, shape.y, shape.radius))
        canvas.ellipse((x - r, y - r, x + r, y + r), fill=color)
    else:
        canvas.polygon([(scale * x, scale * y) for x, y in _corners(shape)], fill=color)


def _tinted(color: str, random: np.random.Generator) -> tuple[int, ...]:
    """A colour of the palette, slightly off."""
    return tuple(int(np.clip(v + random.integers(-10, 11), 0, 255)) for v in COLORS[color])


def render(scene: Scene) -> Image.Image:
    """Draws a scene.

    Args:
      scene: What to draw.

    Returns:
      An RGB picture of `SIDE` by `SIDE` pixels; the same for the same scene.
    """
    random = np.random.default_rng(scene.texture_seed + 1)
    base = Image.fromarray(_background(scene).astype(np.uint8))
    picture = base.resize((SIDE * _FINE, SIDE * _FINE), Image.Resampling.NEAREST)
    canvas = ImageDraw.Draw(picture)
    for stroke in scene.strokes:
        ends = [tuple(_FINE * v for v in point) for point in (stroke.start, stroke.end)]
        canvas.line(ends, fill=(stroke.shade,) * 3, width=_FINE)
    for dot in scene.dots:
        x, y, r = (_FINE * value for value in (dot.x, dot.y, DOT_RADIUS))
        canvas.ellipse((x - r, y - r, x + r, y + r), fill=_tinted(dot.color, random))
    for shape in scene.shapes:
        _fill(canvas, shape, _FINE, _tinted(shape.color, random))
    return picture.reduce(_FINE)


@functools.cache
def _color_ids() -> dict[str, int]:
    return {color: number + 1 for number, color in enumerate(COLORS)}


def covered(shape: Shape, least: float = 0.1) -> list[int]:
    """Patches of which a shape covers at least this share."""
    mask = Image.new("L", (SIDE, SIDE))
    _fill(ImageDraw.Draw(mask), shape, 1, 255)
    share = np.asarray(mask.resize((GRID, GRID), Image.Resampling.BOX)).ravel() / 255
    return np.flatnonzero(share >= least).tolist()


def patch_labels(scene: Scene) -> dict[str, np.ndarray]:
    """What each patch shows, for local supervision of a vision tower.

    Args:
      scene: The scene.

    Returns:
      `class_kind` (0 nothing, shapes from 1, a dot last), `class_color` (0 none, colours from 1)
      and `class_background`, int8 [n], and `value_place` float16 [n, 3]: centre of the shape in
      [-1, 1] and a tenth of its radius in pixels, NaN
      where there is no shape.
    """
    n = GRID * GRID
    kind, color = np.zeros(n, np.int8), np.zeros(n, np.int8)
    place = np.full((n, 3), np.nan, np.float16)
    best = np.full(n, 0.1)
    for dot in scene.dots:
        cell = cell_of(dot.x, dot.y)
        kind[cell], color[cell] = len(SHAPES) + 1, _color_ids()[dot.color]
    mask = Image.new("L", (SIDE, SIDE))
    for shape in scene.shapes:
        mask.paste(0, (0, 0, SIDE, SIDE))
        _fill(ImageDraw.Draw(mask), shape, 1, 255)
        share = np.asarray(mask.resize((GRID, GRID), Image.Resampling.BOX)).ravel() / 255
        hit = share > best
        best = np.where(hit, share, best)
        kind[hit] = SHAPES.index(shape.kind) + 1
        color[hit] = _color_ids()[shape.color]
        half = SIDE / 2
        place[hit] = (shape.x / half - 1, shape.y / half - 1, shape.radius / 10)
    ground = np.full(n, BACKGROUNDS.index(scene.background), np.int8)
    return {
        "class_kind": kind, "class_color": color, "class_background": ground, "value_place": place,
    }  # fmt: skip


def label_words() -> dict[str, np.ndarray]:
    """The word for each class of `patch_labels`, "" where there is none."""
    return {
        "words_kind": np.asarray(["", *SHAPES, "dots"]),
        "words_color": np.asarray(["", *COLORS]),
        "words_background": np.asarray(BACKGROUNDS),
    }


def presence(scene: Scene) -> Int8[np.ndarray, "p"]:
    """Which (shape, colour) pairs a scene holds, as 0 or 1, shapes slowest."""
    pairs = np.zeros((len(SHAPES), len(COLORS)), np.int8)
    for shape in scene.shapes:
        pairs[SHAPES.index(shape.kind), _color_ids()[shape.color] - 1] = 1
    return pairs.ravel()
