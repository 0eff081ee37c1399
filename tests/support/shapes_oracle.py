"""Answers the questions of the shapes world from a scene, by brute force."""

import re
from collections import Counter

SIDES, HEIGHTS = ("left", "right"), ("above", "below")
NUMBERS = ["zero", "one", "two", "three", "four", "five"]
# Of shapes of radius 1.
AREAS = {
    "circle": 3.1416,
    "square": 1.68**2,
    "triangle": 0.95 * 1.72,
    "cross": 2 * 1.28 - 0.64**2,
    "diamond": 2 * 0.72,
}


def yes(value):
    return "yes" if value else "no"


def matching(scene, words):
    """Returns the shapes that match a description: a color, a kind, both, or "shapes"."""
    shapes = []
    for shape in scene.shapes:
        plural = {"crosses"} if shape.kind == "cross" else {shape.kind + "s"}
        known_words = {shape.color, shape.kind, "shape", "shapes"} | plural
        if set(words.split()) <= known_words:
            shapes.append(shape)
    return shapes


def the(scene, words):
    """Returns the only shape that matches a description."""
    (shape,) = matching(scene, words)
    return shape


def _existence(scene, words):
    shapes = matching(scene, words)
    return yes(shapes), shapes


def _counting(scene, words):
    shapes = matching(scene, words)
    return NUMBERS[len(shapes)], shapes


def _comparison(scene, one, two):
    first, second = matching(scene, one), matching(scene, two)
    assert len(first) != len(second)
    return yes(len(first) > len(second)), first + second


def _relation(axis, words):
    def act(scene, one, two):
        a, b = the(scene, one), the(scene, two)
        assert abs(getattr(a, axis) - getattr(b, axis)) >= 10
        return words[getattr(a, axis) > getattr(b, axis)], [a, b]

    return act


def _position(scene, words):
    shape = the(scene, words)
    assert abs(shape.x - 48) > 5
    return ("left" if shape.x < 48 else "right"), [shape]


def _size(scene, one, two):
    a, b = the(scene, one), the(scene, two)
    assert max(a.radius, b.radius) >= 1.25 * min(a.radius, b.radius)
    area_a, area_b = (AREAS[s.kind] * s.radius**2 for s in (a, b))
    assert (area_a > area_b) == (a.radius > b.radius)
    return yes(a.radius > b.radius), [a, b]


def _most_dots(scene):
    (first, n), (_, m) = Counter(dot.color for dot in scene.dots).most_common()
    assert n > m
    return first, list(scene.dots)


def _more_dots(scene, one, two):
    counts = Counter(dot.color for dot in scene.dots)
    assert counts[one] and counts[two] and counts[one] != counts[two]
    return yes(counts[one] > counts[two]), list(scene.dots)


RULES = [
    ("color", r"What color is the (\w+)\?", lambda s, kind: (the(s, kind).color, [the(s, kind)])),
    ("shape", r"What shape is (\w+)\?", lambda s, color: (the(s, color).kind, [the(s, color)])),
    ("existence", r"Is there a (\w+ \w+)\?", _existence),
    ("counting", r"How many (.+) are there\?", _counting),
    ("comparison", r"Are there more (\w+) shapes than (\w+) shapes\?", _comparison),
    ("relation", r"Is the (\w+ \w+) left or right of the (\w+ \w+)\?", _relation("x", SIDES)),
    ("relation", r"Is the (\w+ \w+) above or below the (\w+ \w+)\?", _relation("y", HEIGHTS)),
    ("position", r"Which side is the (\w+ \w+) on\?", _position),
    ("size", r"Is the (\w+ \w+) larger than the (\w+ \w+)\?", _size),
    ("majority", r"What color are most dots\?", _most_dots),
    ("majority", r"Are there more (\w+) dots than (\w+) dots\?", _more_dots),
    ("background", r"What is the background\?", lambda scene: (scene.background, [])),
]


def answer(scene, text):
    """Returns (family, answer, the shapes or dots that the question is about)."""
    rules = [(family, re.fullmatch(rule, text), act) for family, rule, act in RULES]
    ((family, match, act),) = [entry for entry in rules if entry[1]]
    return family, *act(scene, *match.groups())
