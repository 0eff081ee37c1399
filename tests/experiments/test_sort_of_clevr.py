"""Questions, answers and colours of a drawing of our own survive the way through the pickle."""

import pickle
import re

import numpy as np
import pytest
from PIL import Image
from sort_of_clevr_file import CODES, HALF, RGB, SIDE, Python2, draw, entry, place

from experiments.datasets import sort_of_clevr
from experiments.pretrain.conversations import read_conversations
from stepprune_jax.data import check
from stepprune_jax.data.llava import read_answers, read_questions

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
# Subtype, colour, other colour, class; one in words.
TERNARY = [(0, "red", "blue", 4), (1, "gray", "green", 0), (2, "orange", "yellow", 8)]
OBTUSE = "How many objects form an obtuse triangle with the orange and the yellow object?"
TERNARY_WORDS = [
    ("How many objects are between the red and the blue object?", "zero", "between"),
    ("Is an object on the line through the gray and the green object?", "yes", "line"),
    (OBTUSE, "four", "obtuse"),
]


@pytest.fixture(scope="module")
def worlds():
    random = np.random.default_rng(0)
    return {"train": [place(random) for _ in range(5)], "test": [place(random) for _ in range(2)]}


def write(path, worlds, pickler=pickle.Pickler, **layout):
    value = tuple([entry(things, **layout) for things in worlds[split]] for split in worlds)
    with path.open("wb") as file:
        pickler(file, 2).dump(value)
    return path


def expected(question, things):
    """The answer to a question in words, and its family."""
    color = re.search(rf"the ({'|'.join(CODES)}) object", question)[1]
    me = things[color]

    def distance(other):
        return np.hypot(other.x - me.x, other.y - me.y)

    others = [thing for name, thing in things.items() if name != color]
    if "closest" in question:
        return min(others, key=distance).shape, "closest"
    if "furthest" in question:
        return max(others, key=distance).shape, "furthest"
    if "How many" in question:
        return NUMBERS[sum(thing.shape == me.shape for thing in things.values())], "count"
    if "left" in question:
        return ("left" if me.x < SIDE / 2 else "right"), "horizontal"
    if "top" in question:
        return ("top" if me.y < SIDE / 2 else "bottom"), "vertical"
    return me.shape, "shape"


@pytest.mark.parametrize(
    ("pickler", "layout"),
    [(pickle.Pickler, {}), (Python2, {"width": 18, "ternary": TERNARY})],
)
def test_every_question_has_its_answer_in_words(worlds, tmp_path, pickler, layout):
    source, out = write(tmp_path / "soc.pickle", worlds, pickler, **layout), tmp_path / "out"
    counts = sort_of_clevr.convert(source, out, validation_share=0.4)
    assert counts == {"train": 3 * 36, "validation": 2 * 36, "test": 2 * 36}
    assert not any(part.faults for part in check.check_folder(out))

    found = []
    for sample in read_conversations(out / "train.json", out / "images"):
        found += [(sample.image, *sample.turns[n : n + 2], None) for n in range(0, 72, 2)]
    trained = {image for image, *_ in found}
    for split in ("validation", "test"):
        asked = read_questions(out / f"{split}.jsonl", out / "images")
        answers = read_answers(out / f"{split}_answers.jsonl", asked)
        found += [(q.image, q.text, a, q.category) for q, a in zip(asked, answers, strict=True)]
        assert not trained & {question.image for question in asked}
    seen = set()
    for image, question, answer, category in found:
        things = worlds[image.parent.name][int(image.stem)]
        right, family = expected(question, things)
        assert (answer, category or family) == (right, family), question
        seen |= {family, answer}
    assert seen >= {"shape", "horizontal", "vertical", "closest", "furthest", "count"}
    assert seen >= {"left", "right", "top", "bottom", "rectangle", "circle", "two", "three", "four"}


def test_red_is_red_and_left_is_left(worlds, tmp_path):
    sort_of_clevr.convert(write(tmp_path / "soc.pickle", worlds), tmp_path, validation_share=0.4)
    for split, numbered in worlds.items():
        for number, things in enumerate(numbered):
            with Image.open(tmp_path / "images" / split / f"{number}.png") as image:
                assert (image.size, image.mode) == ((SIDE, SIDE), "RGB")
                for color, thing in things.items():
                    assert image.getpixel((thing.x, thing.y)) == RGB[color]
                    corner = image.getpixel((thing.x + HALF, thing.y + HALF))
                    assert (corner == RGB[color]) == (thing.shape == "rectangle")


def test_ternary_questions_are_taken_where_wanted(worlds, tmp_path, capsys):
    source = write(tmp_path / "soc.pickle", worlds, width=18, ternary=TERNARY)
    given = ["--source", str(source), "--out", str(tmp_path), "--ternary"]
    sort_of_clevr.main([*given, "--validation_share", "0.4"])
    assert f"{3 * 39} train, {2 * 39} validation, {2 * 39} test" in capsys.readouterr().out
    asked = read_questions(tmp_path / "test.jsonl", tmp_path / "images")
    answers = read_answers(tmp_path / "test_answers.jsonl", asked)
    found = [(q.text, a, q.category) for q, a in zip(asked, answers, strict=True)]
    assert found[:3] == found[39:42] == TERNARY_WORDS


RED_FIRST = draw(place(np.random.default_rng(0)))[..., ::-1]


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ([[1.0]], "test: image 1: expected an image .*, got list"),
        (np.ones((4, 4, 3), np.uint8), r"test: image 1: .*got an array \[4, 4, 3\] of uint8"),
        (np.full((4, 4, 3), 2.0), "test: image 1: .*numbers from 0 to 1"),
        (RED_FIRST, "test: image 1: nothing is orange.* blue first"),
        (RED_FIRST[..., ::-1], "train: expected ternary questions, got none"),
    ],
)
def test_other_files_are_refused_before_anything_is_written(worlds, tmp_path, image, message):
    good, path = entry(worlds["train"][0]), tmp_path / "soc.pickle"
    path.write_bytes(pickle.dumps(([good] * 3, [good, (image, *good[1:])])))
    with pytest.raises(ValueError, match=rf"soc\.pickle: {message}") as found:
        sort_of_clevr.convert(path, tmp_path / "out", ternary=True)
    assert "\n" not in str(found.value) and not (tmp_path / "out").exists()
