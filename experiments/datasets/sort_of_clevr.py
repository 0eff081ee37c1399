"""Converts Sort-of-CLEVR (Santoro et al., 2017, Sec. 3.3) to a LLaVA data folder.

    python -m experiments.datasets.sort_of_clevr --source FILE --out data/sort_of_clevr

FILE is the ``sort-of-clevr.pickle`` of any version of the generator kimhc6028/relational-networks:
training and test images of six coloured shapes, with coded questions about each. The validation
split is taken from the training images, without overlap.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from tqdm import tqdm

from experiments.datasets.array_pickle import Array, read_pickle
from experiments.datasets.llava_folder import (
    Asked,
    validation_images,
    write_conversations,
    write_questions,
)
from stepprune_jax.cli.command_line import Parser, exit_with
from stepprune_jax.user_input import UserError

# In the order of the codes, and as stored: blue first, as in OpenCV.
COLORS = {
    "red": (0, 0, 255),
    "green": (0, 255, 0),
    "blue": (255, 0, 0),
    "orange": (0, 156, 255),
    "gray": (128, 128, 128),
    "yellow": (0, 255, 255),
}


class Family(NamedTuple):
    """A kind of question.

    Attributes:
        name: its name, for tables.
        text: the question, with a place for each colour.
        answers: the word of each class of answers.
    """

    name: str
    text: str
    answers: dict[int, str]


_YES_NO = {0: "yes", 1: "no"}
# The generator's yes and no, to whether the object is in the left half, and in the top half.
_ACROSS = {0: "left", 1: "right"}
_DOWN = {0: "top", 1: "bottom"}
_SHAPES = {2: "rectangle", 3: "circle"}
# Class 4 is the smallest count: one if the object itself is counted, otherwise zero.
_FROM_ONE = dict(enumerate(("one", "two", "three", "four", "five", "six"), start=4))
_FROM_ZERO = dict(enumerate(("zero", "one", "two", "three", "four"), start=4))

# By kind (of one object, of one in relation to the others, of two and the others) and subtype.
FAMILIES = (
    (
        Family("shape", "What shape is the {} object?", _SHAPES),
        Family("horizontal", "Is the {} object on the left or the right of the image?", _ACROSS),
        Family("vertical", "Is the {} object at the top or the bottom of the image?", _DOWN),
    ),
    (
        Family("closest", "What is the shape of the object closest to the {} object?", _SHAPES),
        Family("furthest", "What is the shape of the object furthest from the {} object?", _SHAPES),
        Family("count", "How many objects have the shape of the {} object?", _FROM_ONE),
    ),
    (
        Family("between", "How many objects are between the {} and the {} object?", _FROM_ZERO),
        Family("line", "Is an object on the line through the {} and the {} object?", _YES_NO),
        Family(
            "obtuse",
            "How many objects form an obtuse triangle with the {} and the {} object?",
            _FROM_ZERO,
        ),
    ),
)
TERNARY = frozenset(family.name for family in FAMILIES[2])

# Where the colour of a second object, the kind and the subtype begin, by the length of a code.
_CUTS = {11: (6, 6, 8), 18: (6, 12, 15)}


class Scene(NamedTuple):
    """An image with the questions about it.

    Attributes:
        image: RGB.
        asked: question, answer and name of the family.
    """

    image: UInt8[np.ndarray, "h w 3"]
    asked: list[tuple[str, str, str]]


def convert(
    source: str | Path,
    out: str | Path,
    *,
    ternary: bool = False,
    validation_share: float = 0.1,
    seed: int = 0,
) -> dict[str, int]:
    """Writes Sort-of-CLEVR as images, ``train.json``, and questions and answers of two splits."""
    out = Path(out)
    scenes = read_scenes(source)
    asked = {split: _asked(scenes[split], split, ternary) for split in scenes}
    for split, questions in asked.items():
        if not questions or (ternary and not TERNARY & {q.category for q in questions}):
            kind = "ternary questions" if ternary else "others than ternary questions (--ternary)"
            raise UserError(f"{source}: {split}: expected {kind}, got none")
    held = validation_images(range(len(scenes["train"])), validation_share, seed)
    held = {_image("train", number) for number in held}
    for split in scenes:
        _write_images(out, split, scenes[split])
    train = [question for question in asked["train"] if question.image not in held]
    validation = [question for question in asked["train"] if question.image in held]
    write_conversations(out, train)
    write_questions(out, "validation", validation)
    write_questions(out, "test", asked["test"])
    return {"train": len(train), "validation": len(validation), "test": len(asked["test"])}


def read_scenes(file: str | Path) -> dict[str, list[Scene]]:
    """Reads the generator's pickle, without running any code that it names."""
    splits = _sequence(read_pickle(file), str(file), "training and test images", (2,))
    scenes = {}
    for split, entries in zip(("train", "test"), splits, strict=True):
        entries = _sequence(entries, f"{file}: {split}", "images with their questions")
        scenes[split] = [
            _scene(entry, f"{file}: {split}: image {number}")
            for number, entry in enumerate(entries)
        ]
    return scenes


def _sequence(value: object, where: str, what: str, lengths: Sequence[int] = ()) -> Sequence:
    """Checks that a value is a list or tuple, of one of the lengths or non-empty."""
    fits = isinstance(value, list | tuple)
    if not fits or (len(value) not in lengths if lengths else not value):
        got = f"{len(value)} entries" if fits else _shown(value)
        raise UserError(f"{where}: expected {what}, got {got}")
    return value


def _shown(value: object) -> str:
    """Describes a value in a message."""
    if isinstance(value, Array):
        return f"an array {list(value.values.shape)} of {value.values.dtype}"
    return type(value).__name__


def _scene(entry: object, where: str) -> Scene:
    """Checks and decodes an image with its questions."""
    image, *groups = _sequence(entry, where, "an image and two or three pairs of lists", (3, 4))
    asked = []
    for group in groups:
        codes, classes = _sequence(group, where, "a pair of questions and answers", (2,))
        codes = _sequence(codes, where, "coded questions")
        classes = _sequence(classes, where, f"answers to {len(codes)} questions", (len(codes),))
        asked += [_decode(*pair, where) for pair in zip(codes, classes, strict=True)]
    return Scene(_rgb(image, where), asked)


def _rgb(value: object, where: str) -> UInt8[np.ndarray, "h w 3"]:
    """Checks an image and puts red first."""
    stored = value.values if isinstance(value, Array) else np.empty(0)
    fits = stored.ndim == 3 and stored.shape[2] == 3 and stored.dtype.kind == "f"
    if not fits or not ((stored >= 0) & (stored <= 1)).all():
        raise UserError(
            f"{where}: expected an image [height, width, 3] of numbers from 0 to 1, got "
            f"{_shown(value)}"
        )
    image = np.rint(255 * stored).astype(np.uint8)
    for color, code in COLORS.items():
        if not (image == np.uint8(code)).all(-1).any():
            raise UserError(
                f"{where}: nothing is {color}, which is {code} with blue first, as in OpenCV"
            )
    return image[..., ::-1]


def _decode(code: object, answer: object, where: str) -> tuple[str, str, str]:
    """Returns the text of a question and its answer, and the family."""
    bits = code.values if isinstance(code, Array) else np.empty(0)
    if bits.ndim != 1 or len(bits) not in _CUTS:
        raise UserError(f"{where}: expected questions of 11 or 18 numbers, got {_shown(code)}")
    first, second, kind, subtype = (
        np.flatnonzero(part).tolist() for part in np.split(bits, _CUTS[len(bits)])
    )
    single = len(first) == len(kind) == len(subtype) == 1
    if not np.isin(bits, (0, 1)).all() or not single or len(second) != (kind == [2]):
        raise UserError(f"{where}: not the code of a question: {bits.tolist()}")
    family = FAMILIES[kind[0]][subtype[0]]
    if type(answer) is not int or answer not in family.answers:  # True is an int, too
        raise UserError(
            f"{where}: expected an answer of {list(family.answers)} to a question of the family "
            f"{family.name}, got {answer!r}"
        )
    names = list(COLORS)
    text = family.text.format(*(names[color] for color in first + second))
    return text, family.answers[answer], family.name


def _asked(scenes: Sequence[Scene], split: str, ternary: bool) -> list[Asked]:
    """Converts the questions of a split to output questions."""
    return [
        Asked(question, answer, family, _image(split, number))
        for number, scene in enumerate(scenes)
        for question, answer, family in scene.asked
        if ternary or family not in TERNARY
    ]


def _image(split: str, number: int) -> str:
    return f"{split}/{number}.png"


def _write_images(out: Path, split: str, scenes: Sequence[Scene]) -> None:
    """Writes the images of a split to ``images/SPLIT/``."""
    (out / "images" / split).mkdir(parents=True, exist_ok=True)
    shown = tqdm(scenes, f"writing {split}", unit="image", disable=len(scenes) < 500)
    for number, scene in enumerate(shown):
        Image.fromarray(scene.image).save(out / "images" / _image(split, number))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = Parser(prog="experiments.datasets.sort_of_clevr", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--source", required=True, help="sort-of-clevr.pickle of the generator")
    add("--ternary", action="store_true", help="include questions about two objects and the others")
    add("--out", required=True, help="folder to write")
    add("--validation_share", type=float, default=0.1, help="share of the training images")
    add("--seed", type=int, default=0, help="seed for choosing validation images")
    options = parser.parse_args(argv)
    counts = convert(**vars(options))
    print(f"wrote {options.out}: {', '.join(f'{n} {k}' for k, n in counts.items())} questions")


if __name__ == "__main__":
    exit_with("experiments.datasets.sort_of_clevr", main)
