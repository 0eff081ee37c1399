"""The second level of the shapes world: crowds of look-alikes, and chains of neighbours."""

import re
from collections import Counter

import numpy as np
import pytest

from experiments.datasets.scenes import read_scenes
from experiments.shapes import LEVELS, Scene, Shape, patch_labels, scene_at, write_world
from experiments.shapes.crowds import distances
from experiments.shapes.scene import COLORS, SHAPES
from stepprune_jax.data.llava import read_questions

CELL = 6.0  # of sixteen along 96 pixels
NUMBERS = ("zero", "one", "two", "three", "four", "five")
STEPS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
SMALL = {"seed": 4, "train": 3, "validation": 1, "test": 2, "level": 2}


@pytest.fixture(scope="module")
def asked():
    drawn = (scene_at(11, "train", number, level=2) for number in range(120))
    return [(scene, query) for scene, queries in drawn for query in queries]


def at(kind, color, row, column):
    return Shape(kind, color, (column + 0.5) * CELL, (row + 0.5) * CELL, 2.5)


def scene_of(*shapes):
    return Scene("plain", (200, 200, 200), 0, shapes, (), ())


# One square; from it left to a circle, down from there to a triangle, right to a cross. The other
# circle is four patches to the right, out of reach; a diamond stands behind the first circle.
CHAIN = scene_of(
    at("square", "red", 2, 6),
    at("circle", "blue", 2, 4),
    at("diamond", "blue", 2, 3),
    at("triangle", "green", 5, 4),
    at("cross", "green", 5, 6),
    at("circle", "red", 2, 10),
    at("diamond", "green", 12, 12),
    at("triangle", "blue", 14, 14),
    at("cross", "red", 9, 0),
)


def test_distances_of_neighbors_in_each_direction():
    label = distances(CHAIN, 16)
    # Left, right, up, down, in thirds of the reach.
    np.testing.assert_allclose(label[36], [1 / 3, 2 / 3, np.nan, 1], atol=1e-3)
    assert np.isnan(label[0]).all() and np.isnan(label[42]).all()


def walk(scene, text):
    """Answer and patches of a question about steps, one pixel row and column after the other."""
    match = re.fullmatch(r"From the (.+) go (.+): what (color|shape) is there\?", text)
    named, path, wanted = match.groups()
    cells = {(int(s.y // CELL), int(s.x // CELL)): s for s in scene.shapes}
    words = named.removesuffix(" shape")
    ((row, column),) = [p for p, s in cells.items() if words in (s.kind, s.color)]
    passed = [(row, column)]
    for word in path.split(" then "):
        down, right = STEPS[word]
        far = min(f for f in (1, 2, 3) if (row + f * down, column + f * right) in cells)
        row, column = row + far * down, column + far * right
        passed.append((row, column))
    assert len({*passed}) == len(passed)
    end = cells[row, column]
    return end.color if wanted == "color" else end.kind, tuple(16 * r + c for r, c in passed)


def test_answers_and_chains_are_those_of_brute_force(asked):
    seen = Counter(query.family for _, query in asked)
    assert set(seen) == set(LEVELS[2].families) and min(seen.values()) >= 40
    for scene, query in asked:
        kinds, colors = (Counter(s[at] for s in scene.shapes) for at in (0, 1))
        if query.family.endswith(("step", "steps")):
            assert (query.answer, query.relevant) == walk(scene, query.text)
            count = ["one step", "two steps", "three steps"].index(query.family) + 2
            assert len(query.relevant) == count
        elif query.family == "distinct":
            number = len(kinds if "kinds" in query.text else colors)
            assert query.answer == NUMBERS[number] and len(query.relevant) == number
        elif query.family == "odd":
            counts = kinds if "shape" in query.text else colors
            assert [name for name, count in counts.items() if count == 1] == [query.answer]


def test_a_crowd_has_twenty_to_forty_shapes_one_to_a_patch_most_of_them_look_alikes(asked):
    scenes = {id(scene): scene for scene, _ in asked}.values()
    for scene in scenes:
        patches = {int(s.y // CELL) * 16 + int(s.x // CELL) for s in scene.shapes}
        assert 20 <= len(scene.shapes) == len(patches) <= 40
        for shape in scene.shapes:  # it does not reach into the next patch
            assert all(shape.radius <= place % CELL <= CELL - shape.radius for place in shape[2:4])
        looks = Counter(shape[:2] for shape in scene.shapes)
        assert len(looks) <= 12 and max(looks.values()) >= 3
        labels = patch_labels(scene, 16)
        assert set(np.flatnonzero(labels["class_middle"])) == patches
        assert set(np.flatnonzero(labels["class_kind"])) == patches
    assert len({len(scene.shapes) for scene in scenes}) > 15


def test_a_world_of_the_second_level_has_labels_of_its_own(tmp_path):
    world = write_world(tmp_path, patches=True, **SMALL)
    questions = read_questions(world / "test.jsonl", world / "images")
    facts = read_scenes(world / "test_scenes.jsonl", questions)
    drawn = [scene_at(4, "test", number, level=2) for number in range(2)]
    expected = [query.relevant for _, queries in drawn for query in queries]
    assert [fact.relevant for fact in facts] == expected
    with np.load(world / "train_patches.npz") as labels:
        assert labels["value_next"].shape == (3, 256, 4) and labels["class_kind"].max() <= 5
        assert labels["words_down"].tolist() == ["up", "down"]
    with np.load(world / "train_mentions.npz") as mentions:
        value, sample, exchange = (mentions[name] for name in ("value", "sample", "exchange"))
    chains = 0
    for number in range(3):
        for place, query in enumerate(scene_at(4, "train", number, level=2)[1]):
            if "step" in query.family:
                # The look of the last shape along the way is the answer.
                *_, last = value[(sample == number) & (exchange == place)]
                look = [n for n, told in zip((*SHAPES, *COLORS), last[3:], strict=True) if told]
                assert len(look) == 2 and query.answer in look
                chains += 1
    assert chains > 5
