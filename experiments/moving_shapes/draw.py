"""Draws scenes as frames, and labels their visual tokens."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int8, UInt8

from experiments.moving_shapes.scene import (
    CELL,
    COLORS,
    DIRECTIONS,
    GRID,
    KINDS,
    NUM_FRAMES,
    RADIUS,
    SIDE,
    Scene,
    Shape,
    random_scene,
)

NUM_PATCHES = NUM_FRAMES // 2  # temporal patches of two frames
NUM_TOKENS = NUM_PATCHES * GRID * GRID
_COLOR_IDS = {color: number for number, color in enumerate(COLORS, start=1)}
# Every shape of a clip covers at least this many tokens, and a ring in its first color does, too.
MIN_SHAPE_TOKENS = 3
# A token shows a shape if the shape covers at least this fraction of it, in the mean of its frames.
_MIN_SHARE = 0.12


class TokenLabels(NamedTuple):
    """Labels of the visual tokens of a clip, in raster order of (time, row, column).

    Attributes:
        shape: [n] index of the shape that covers most of the token; -1 for background.
        kind: [n] number of the kind in `KINDS`, from 1; 0 for background.
        color: [n] number of the color in `COLORS`, from 1; 0 for background.
        direction: [n] number of the direction in `DIRECTIONS`, from 1; 0 for background.
        changed: [n] 1 if the shape has changed its color in this temporal patch or earlier.
    """

    shape: Int8[np.ndarray, "n"]
    kind: Int8[np.ndarray, "n"]
    color: Int8[np.ndarray, "n"]
    direction: Int8[np.ndarray, "n"]
    changed: Int8[np.ndarray, "n"]


def coverage(shape: Shape) -> Float[np.ndarray, "visible side side"]:
    """Returns the fraction of each pixel that a shape covers, in the frames that show the shape."""
    centers = shape.centers()[shape.visible_frames()]
    pixels = np.arange(SIDE, dtype=np.float32) + 0.5
    x = (pixels - centers[:, :1])[:, None, :].astype(np.float32)
    y = (pixels - centers[:, 1:])[:, :, None].astype(np.float32)
    # Signed distances from the edge in pixels, negative inside.
    if shape.kind == "circle":
        distance = np.sqrt(x * x + y * y) - RADIUS
    elif shape.kind == "square":
        distance = np.maximum(np.abs(x), np.abs(y)) - 0.88 * RADIUS
    elif shape.kind == "triangle":
        slope = 0.88 * np.abs(x) - 0.47 * y - 0.5 * RADIUS
        distance = np.maximum(slope, y - 0.8 * RADIUS)
    else:
        distance = np.abs(np.sqrt(x * x + y * y) - 0.72 * RADIUS) - 0.28 * RADIUS
    return np.clip(0.5 - distance, 0, 1)


def draw_background(rng: np.random.Generator) -> Float[np.ndarray, "frames side side 3"]:
    """Returns a gray background with stones that lie still and flashes that last one frame."""
    shade = rng.uniform(50, 100)
    ground = np.kron(rng.normal(0, 7, (SIDE // 3, SIDE // 3)), np.ones((3, 3))) + shade
    for row, column, size in _random_squares(rng, int(rng.integers(1, 4)), (4, 10)):
        ground[row : row + size, column : column + size] = shade + rng.choice([-40, 45])
    frames = np.repeat(ground[None], NUM_FRAMES, axis=0)
    for frame in frames:
        for row, column, size in _random_squares(rng, int(rng.integers(0, 3)), (3, 7)):
            frame[row : row + size, column : column + size] = rng.uniform(120, 190)
    return np.repeat(frames[..., None], 3, axis=3).astype(np.float32)


def _random_squares(
    rng: np.random.Generator, count: int, sizes: tuple[int, int]
) -> list[tuple[int, int, int]]:
    """Returns row, column and side of random squares."""
    return [(*map(int, rng.integers(0, SIDE, 2)), int(rng.integers(*sizes))) for _ in range(count)]


def draw_clip(scene: Scene) -> tuple[UInt8[np.ndarray, "frames side side 3"], TokenLabels]:
    """Draws the frames of a scene; shapes that enter later cover earlier ones.

    Returns:
        The frames, and the labels of their visual tokens.
    """
    rng = np.random.default_rng(scene.texture_seed)
    frames = draw_background(rng)
    shares = np.zeros((len(scene.shapes), NUM_TOKENS), np.float32)
    for index, shape in enumerate(scene.shapes):
        share, visible = coverage(shape), shape.visible_frames()
        tint = rng.uniform(-10, 10, 3)
        colors = np.array([COLORS[shape.color_at(frame)] for frame in visible]) + tint
        shown = slice(visible[0], visible[-1] + 1)
        frames[shown] += share[..., None] * (
            colors[:, None, None].astype(np.float32) - frames[shown]
        )
        cells = np.zeros((NUM_FRAMES, GRID, GRID), np.float32)
        cells[shown] = share.reshape(-1, GRID, CELL, GRID, CELL).mean((2, 4))
        cells = cells.reshape(NUM_PATCHES, 2, -1).mean(1).ravel()
        shares[:index] *= 1 - np.minimum(cells, 1)  # the later shape covers the earlier ones
        shares[index] = cells
    return np.clip(frames, 0, 255).astype(np.uint8), _label_tokens(scene, shares)


def random_clip(
    rng: np.random.Generator,
) -> tuple[Scene, UInt8[np.ndarray, "frames side side 3"], TokenLabels]:
    """Returns a random scene in which no shape is hidden, its frames and its labels."""
    while True:
        scene = random_scene(rng)
        frames, labels = draw_clip(scene)
        if all(
            np.sum((labels.shape == index) & (labels.changed == 0)) >= MIN_SHAPE_TOKENS
            for index in range(len(scene.shapes))
        ):
            return scene, frames, labels


def _label_tokens(scene: Scene, shares: Float[np.ndarray, "shapes n"]) -> TokenLabels:
    """Labels the tokens from the fraction of each token that each shape covers."""
    shape = np.where(shares.max(0) >= _MIN_SHARE, shares.argmax(0), -1)
    patch = np.arange(NUM_TOKENS) // GRID**2

    def look_up(numbers: list[int]) -> np.ndarray:
        return np.where(shape >= 0, np.array(numbers)[shape], 0).astype(np.int8)

    kind = look_up([KINDS.index(one.kind) + 1 for one in scene.shapes])
    ways = list(DIRECTIONS)
    direction = look_up([ways.index(one.direction) + 1 for one in scene.shapes])
    first = look_up([_COLOR_IDS[one.color] for one in scene.shapes])
    later = look_up([_COLOR_IDS[one.later_color] for one in scene.shapes])
    change_frame = np.array([one.change_frame for one in scene.shapes])[shape]
    changed = ((shape >= 0) & (2 * patch >= change_frame)).astype(np.int8)
    color = np.where(changed, later, first)
    return TokenLabels(shape.astype(np.int8), kind, color, direction, changed)
