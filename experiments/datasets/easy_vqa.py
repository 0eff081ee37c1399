"""Converts the public easy-VQA set (github.com/vzhou842/easy-VQA, MIT) to a LLaVA data folder.

    python -m experiments.datasets.easy_vqa --source FOLDER --out data/easy_vqa

FOLDER holds ``train/`` and ``test/``, each with ``questions.json``, a list of [question,
answer, number of the image], and ``images/NUMBER.png``. Images show one coloured shape, and there
are thirteen answers. The validation split is taken from the training images, without overlap.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from experiments.datasets.llava_folder import (
    Asked,
    convert_by_command,
    validation_images,
    write_conversations,
    write_questions,
)
from stepprune_jax.command_line import Parser, exit_with
from stepprune_jax.data.image_files import existing_image
from stepprune_jax.data.json_files import read_json_list, words
from stepprune_jax.settings import is_count


class Line(NamedTuple):
    """One line of easy-VQA.

    Attributes:
        question: the question.
        answer: one word.
        image: number of the image in its split.
    """

    question: str
    answer: str
    image: int


def convert(
    source: str | Path,
    out: str | Path,
    *,
    validation_share: float = 0.1,
    seed: int = 0,
    test_images: int = 0,
) -> dict[str, int]:
    """Writes easy-VQA as ``images/``, ``train.json``, and questions and answers of two splits."""
    source, out = Path(source), Path(out)
    train, test = read_split(source, "train"), read_split(source, "test")
    numbers = sorted({line.image for line in train})
    tested = sorted({line.image for line in test})
    if not 0 <= test_images <= len(tested):
        raise ValueError(f"test_images is {test_images}, expected 0 to {len(tested)}")
    kept = {*tested[: test_images or None]}
    test = [line for line in test if line.image in kept]
    held = validation_images(numbers, validation_share, seed)
    validation = [line for line in train if line.image in held]
    train = [line for line in train if line.image not in held]
    _copy_images(source, out, "train", numbers)
    _copy_images(source, out, "test", sorted(kept))
    write_conversations(out, _asked(train, "train"))
    write_questions(out, "validation", _asked(validation, "train"))
    write_questions(out, "test", _asked(test, "test"))
    return {"train": len(train), "validation": len(validation), "test": len(test)}


def read_split(source: str | Path, split: str) -> list[Line]:
    """Reads a split of easy-VQA and checks that its images exist."""
    folder = Path(source) / split
    file = folder / "questions.json"
    lines = []
    for number, entry in enumerate(read_json_list(file, "question")):
        where = f"{file}: entry {number}"
        lines.append(_line(entry, where))
        existing_image(folder / "images", _image(lines[-1].image), where)
    return lines


def category(line: Line) -> str:
    """Returns the kind of a question: "yes-no", "color" or "shape"."""
    if line.answer in ("yes", "no"):
        return "yes-no"
    return "color" if "color" in line.question.split() else "shape"


def _line(entry: object, where: str) -> Line:
    """Checks one entry."""
    if not isinstance(entry, list) or len(entry) != 3 or not is_count(entry[2], 0):
        raise ValueError(f"{where}: expected [question, answer, number of image], got {entry!r}")
    named = dict(zip(Line._fields, entry, strict=True))
    return Line(words(named, "question", where), words(named, "answer", where), entry[2])


def _asked(lines: Sequence[Line], images: str) -> list[Asked]:
    """Converts lines to output questions; `images` is the folder of their images."""
    return [
        Asked(line.question, line.answer, category(line), f"{images}/{_image(line.image)}")
        for line in lines
    ]


def _image(number: int) -> str:
    return f"{number}.png"


def _copy_images(source: Path, out: Path, split: str, numbers: Sequence[int]) -> None:
    """Copies the images of a split to ``images/SPLIT/``."""
    target = out / "images" / split
    target.mkdir(parents=True, exist_ok=True)
    for number in tqdm(numbers, f"copying {split}", unit="image", disable=len(numbers) < 500):
        shutil.copyfile(source / split / "images" / _image(number), target / _image(number))


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the arguments and converts; reports errors in one line and exits with status 2."""
    parser = Parser(prog="experiments.datasets.easy_vqa", description=__doc__.splitlines()[0])
    parser.add_argument("--source", required=True, help="the folder that holds train/ and test/")
    parser.add_argument("--test_images", type=int, default=0, help="images to test on; 0: all")
    convert_by_command(parser, convert, argv)


if __name__ == "__main__":
    exit_with("experiments.datasets.easy_vqa", main)
