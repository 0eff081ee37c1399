"""Random scenes of the world, and the questions about them.

A scene lasts `NUM_FRAMES` frames. Shapes enter at one side of the picture, cross it in a straight
line and leave at the opposite side. All shapes of a scene have different colors. A ring, which only
some scenes have, changes its color once on its way. Gray flashes and stones distract.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

NUM_FRAMES = 16
FRAME_RATE = 2.0  # frames per second
SIDE = 60  # height and width of a frame in pixels
GRID = 5  # visual tokens along an edge of a frame
CELL = SIDE // GRID
RADIUS = 7.0

COLORS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 90, 220),
    "yellow": (240, 200, 20),
    "purple": (150, 60, 190),
    "white": (245, 245, 245),
}
COUNTED_KINDS = ("circle", "square", "triangle")
RING = "ring"
KINDS = (*COUNTED_KINDS, RING)
# Pixels that a shape moves between two frames: columns, rows.
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
FAMILIES = ("first", "way", "count", "before")
# Part of a scene's seed, so that different splits never have the same scene.
SPLITS = {"train": 0, "validation": 1, "test": 2, "pretrain": 3}
_SPEEDS = (8.0, 12.0)
# The first shape enters at least this many frames before the second.
_LEAD = 3
_MAX_SHAPES = 5


class Shape(NamedTuple):
    """A shape that crosses the picture.

    Attributes:
        kind: one of `KINDS`.
        color: color of the shape, for a ring until it changes.
        later_color: color of a ring after it has changed; `color` for all other shapes.
        change_frame: first frame with `later_color`; `NUM_FRAMES` for a shape that does not change.
        direction: one of `DIRECTIONS`.
        enter_frame: first frame in which the shape is in view.
        speed: pixels that the shape moves between two frames.
        lane: distance of the shape's path from the top or left edge of the picture, in pixels.
    """

    kind: str
    color: str
    later_color: str
    change_frame: int
    direction: str
    enter_frame: int
    speed: float
    lane: float

    def centers(self) -> Float[np.ndarray, "frames 2"]:
        """Returns column and row of the center in each frame, in pixels."""
        steps = np.arange(NUM_FRAMES) - self.enter_frame
        # In its first frame the shape is half inside of the picture.
        distance = steps * self.speed
        columns, rows = DIRECTIONS[self.direction]
        along = distance if columns + rows > 0 else SIDE - distance
        across = np.full(NUM_FRAMES, self.lane)
        return np.stack([along, across] if columns else [across, along], axis=1)

    def visible_frames(self) -> list[int]:
        """Returns the frames in which the shape is in view."""
        return [frame for frame in range(NUM_FRAMES) if self.is_visible(frame)]

    def is_visible(self, frame: int) -> bool:
        """Returns whether the shape is in view in a frame."""
        return self.enter_frame <= frame < self.enter_frame + num_visible(self.speed)

    def color_at(self, frame: int) -> str:
        """Returns the shape's color in a frame."""
        return self.color if frame < self.change_frame else self.later_color


class Scene(NamedTuple):
    """A clip of the world before it is drawn.

    Attributes:
        shapes: the shapes, in the order in which they enter.
        texture_seed: seed of the background, the stones and the flashes.
    """

    shapes: tuple[Shape, ...]
    texture_seed: int


class Query(NamedTuple):
    """A question about a scene.

    Attributes:
        text: the question.
        answer: one word or digit.
        family: one of `FAMILIES`.
        frames: frames that hold the answer.
        evidence: the shapes that the answer depends on. Each pair has a shape's index and whether
            only its frames before the change of color count.
    """

    text: str
    answer: str
    family: str
    frames: tuple[int, ...]
    evidence: tuple[tuple[int, bool], ...]


def num_visible(speed: float) -> int:
    """Returns the number of frames that a shape with this speed is in view."""
    return int(SIDE // speed) + 1


def random_scene(rng: np.random.Generator) -> Scene:
    """Returns a random scene with 2 to 5 shapes."""
    has_ring = rng.random() < 0.7
    num_same = int(rng.integers(1, 4))  # shapes of one kind, so that counts are balanced
    num_other = int(rng.integers(0 if has_ring or num_same > 1 else 1, 3))
    num_other = min(num_other, _MAX_SHAPES - num_same - has_ring)
    counted = rng.permutation(COUNTED_KINDS)
    kinds = [str(counted[0])] * num_same
    kinds += [str(kind) for kind in rng.choice(counted[1:], num_other)] + [RING] * has_ring
    rng.shuffle(kinds)
    colors = [str(color) for color in rng.permutation(list(COLORS))]
    speeds = rng.uniform(*_SPEEDS, len(kinds))
    latest = NUM_FRAMES - max(map(num_visible, speeds))
    enter_frames = _random_enter_frames(rng, len(kinds), latest)
    shapes = []
    for index, (kind, speed, enter_frame) in enumerate(
        zip(kinds, speeds.tolist(), enter_frames, strict=True)
    ):
        later_color, change_frame = colors[index], NUM_FRAMES
        if kind == RING:
            later_color = str(rng.choice([c for c in COLORS if c not in colors[: len(kinds)]]))
            middle = num_visible(speed) // 2
            change_frame = enter_frame + middle + int(rng.integers(0, 2))
            change_frame += change_frame % 2  # no temporal patch has both colors
        direction = str(rng.choice(list(DIRECTIONS)))
        lane = float(rng.uniform(RADIUS, SIDE - RADIUS))
        shapes.append(
            Shape(
                kind,
                colors[index],
                later_color,
                change_frame,
                direction,
                enter_frame,
                speed,
                lane,
            )
        )
    return Scene(tuple(shapes), int(rng.integers(1 << 32)))


def _random_enter_frames(rng: np.random.Generator, count: int, latest: int) -> list[int]:
    """Returns ascending frames in which shapes enter; the first is clearly ahead of the second."""
    first = int(rng.integers(0, latest - _LEAD + 1))
    later = rng.integers(first + _LEAD, latest + 1, count - 1)
    return [first, *sorted(later.tolist())]


def list_queries(scene: Scene) -> list[Query]:
    """Returns all questions about a scene.

    There is one question about the first shape and one about a ring, one for each shape's way, and
    one for each kind's count.
    """
    shapes, queries = scene.shapes, []
    first_frames = range(shapes[0].enter_frame, shapes[1].enter_frame)
    first_frames = [
        frame
        for frame in first_frames
        if shapes[0].is_visible(frame) and frame < shapes[0].change_frame
    ]
    text = "Which color enters first?"
    queries.append(Query(text, shapes[0].color, "first", tuple(first_frames), ((0, True),)))
    for index, shape in enumerate(shapes):
        frames = shape.visible_frames()
        name = RING if shape.kind == RING else f"{shape.color} {shape.kind}"
        text, evidence = f"Which way does the {name} move?", ((index, False),)
        queries.append(Query(text, shape.direction, "way", tuple(frames), evidence))
        if shape.kind == RING:
            frames = [frame for frame in frames if frame < shape.change_frame]
            text, evidence = "What color was the ring before?", ((index, True),)
            queries.append(Query(text, shape.color, "before", tuple(frames), evidence))
    for kind in COUNTED_KINDS:
        members = [index for index, shape in enumerate(shapes) if shape.kind == kind]
        if members:
            frames = sorted({f for index in members for f in shapes[index].visible_frames()})
            text, evidence = f"How many {kind}s pass?", tuple((index, False) for index in members)
            queries.append(Query(text, str(len(members)), "count", tuple(frames), evidence))
    return queries


def choose_queries(scene: Scene, rng: np.random.Generator) -> list[Query]:
    """Returns one random question of each family that fits the scene, in random order.

    Most questions about counts name the most frequent kind, which balances the answers 1, 2 and 3.
    """
    queries, chosen = list_queries(scene), []
    for family in rng.permutation(FAMILIES):
        members = [query for query in queries if query.family == family]
        if family == "count" and rng.random() < 0.8:
            members = [max(members, key=lambda query: int(query.answer))]
        if members:
            chosen.append(members[rng.integers(len(members))])
    return chosen
