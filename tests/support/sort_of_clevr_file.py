"""A small Sort-of-CLEVR in the layouts of its public generator, drawn with numpy alone."""

import pickle
from typing import NamedTuple

import numpy as np

SIDE, HALF = 40, 3  # pixels: of an image, and from the middle of a shape to its edge
CODES = {"red": 0, "green": 1, "blue": 2, "orange": 3, "gray": 4, "yellow": 5}
RGB = {
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
    "orange": (255, 156, 0),
    "gray": (128, 128, 128),
    "yellow": (255, 255, 0),
}


class Thing(NamedTuple):
    x: int  # column
    y: int
    shape: str


def place(random):
    """Six things that do not touch, by colour."""
    things = {}
    while len(things) < len(CODES):
        x, y = random.integers(HALF, SIDE - HALF, 2).tolist()
        if all(max(abs(x - t.x), abs(y - t.y)) > 2 * HALF for t in things.values()):
            shape = ("rectangle", "circle")[random.integers(2)]
            things[list(CODES)[len(things)]] = Thing(x, y, shape)
    return things


def draw(things):
    """The image as it is stored: floats, blue first."""
    image = np.ones((SIDE, SIDE, 3))
    y, x = np.mgrid[:SIDE, :SIDE]
    for color, thing in things.items():
        across, down = abs(x - thing.x), abs(y - thing.y)
        box = np.maximum(across, down) <= HALF
        inside = box if thing.shape == "rectangle" else across**2 + down**2 <= HALF**2
        image[inside] = np.asarray(RGB[color][::-1]) / 255
    return image


def code(width, kind, subtype, first, second=None):
    """A question as bits: 11 have no place for a second colour nor a third kind."""
    bits = np.zeros(width)
    bits[CODES[first]] = bits[subtype - 3] = bits[{11: 6, 18: 12}[width] + kind] = 1
    if second:
        bits[6 + CODES[second]] = 1
    return bits


def answers(things, color):
    """The classes of the answers, by kind and subtype."""
    me, shapes = things[color], {"rectangle": 2, "circle": 3}
    far = {c: (t.x - me.x) ** 2 + (t.y - me.y) ** 2 for c, t in things.items()}
    closest = min((c for c in things if c != color), key=far.__getitem__)
    furthest = max(things, key=far.__getitem__)
    same = sum(thing.shape == me.shape for thing in things.values())
    return (
        (shapes[me.shape], int(me.x >= SIDE / 2), int(me.y >= SIDE / 2)),
        (shapes[things[closest].shape], shapes[things[furthest].shape], 3 + same),
    )


def entry(things, width=11, ternary=()):
    """An image with every question about each of its things, those in relation to others first.

    Args:
        things: from `place`.
        width: length of a code.
        ternary: (subtype, colour, other colour, class of the answer) of questions to put in front.
    """
    groups = []
    for kind in (1, 0):
        asked = [
            (code(width, kind, subtype, color), answers(things, color)[kind][subtype])
            for color in things
            for subtype in range(3)
        ]
        groups.append(tuple(map(list, zip(*asked, strict=True))))
    if ternary:
        codes = [code(width, 2, subtype, one, two) for subtype, one, two, _ in ternary]
        groups.insert(0, (codes, [answer for *_, answer in ternary]))
    return draw(things), *groups


class Python2(pickle._Pickler):
    """Writes arrays as Python 2 and numpy 1 did: bytes and text are strings of bytes."""

    def __init__(self, file, protocol):
        super().__init__(file, protocol)
        self.dispatch = {**self.dispatch, bytes: Python2.save_string, str: Python2.save_string}

    def save_string(self, value):
        data = value if isinstance(value, bytes) else value.encode("latin1")
        if self.proto:
            self.write(b"T" + len(data).to_bytes(4, "little") + data)
        else:
            text = data.decode("latin1").encode("unicode_escape").replace(b"'", rb"\'")
            self.write(b"S'" + text + b"'\n")
        self.memoize(value)
