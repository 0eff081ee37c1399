"""Checks a data folder before training: `stepprune-check DIR`.

Reads `train.json` and the questions and answers of each existing split, and decodes every image
that they name. The command prints a count for each file and the first faults, and exits with status
1 if there are faults. Images that only some models or settings accept are listed as notes.
"""

import concurrent.futures
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stepprune_jax.data.image_files import OUTSIDE, ImageFolder, existing_image
from stepprune_jax.data.images import MAX_ASPECT, is_shown_otherwise, open_image
from stepprune_jax.data.json_files import read_json_list
from stepprune_jax.data.llava import (
    Question,
    parse_conversation,
    read_answers,
    read_questions,
)
from stepprune_jax.data.source import IMAGES, TRAIN_FILE
from stepprune_jax.user_input import UserError, local_path

SPLITS = ("validation", "test")


class Checked(NamedTuple):
    """Result of checking one file, or all images.

    Attributes:
        name: name of the file, or of the image folder.
        count: number of valid entries.
        kind: name of the entries in the plural.
        faults: faults, one line each.
        notes: lines about images that some models or settings do not accept.
    """

    name: str
    count: int
    kind: str
    faults: list[str]
    notes: Sequence[str] = ()


def check_folder(folder: str | Path) -> list[Checked]:
    """Checks all files of a data folder and decodes its images.

    Args:
        folder: the folder.

    Returns:
        One result for each file, and one for the images.

    Raises:
        FileNotFoundError: the folder has no file to check.
    """
    folder, images = local_path(folder), set()
    results = []
    if os.path.lexists(folder / TRAIN_FILE):
        results.append(_check_conversations(folder, images))
    for split in SPLITS:
        # Answers without questions are a fault, and so is a folder that has the name of a file.
        if any(os.path.lexists(folder / f"{split}{end}.jsonl") for end in ("", "_answers")):
            results += _check_split(folder, split, images)
    if not results:
        names = ", ".join([TRAIN_FILE, *(f"{split}.jsonl" for split in SPLITS)])
        raise FileNotFoundError(f"{folder} has no file to check, expected some of {names}")
    return [*results, _check_images(folder / IMAGES, sorted(images))]


def _check_conversations(folder: Path, images: set[Path]) -> Checked:
    """Checks the samples of the training file, and adds their images to `images`."""
    file, faults, num_valid = folder / TRAIN_FILE, [], 0
    try:
        entries = read_json_list(file, "sample")
    except (OSError, UserError) as error:
        return Checked(TRAIN_FILE, 0, "samples", [str(error)])
    for index, entry in enumerate(entries):
        place = f"{file}: sample {index}"
        try:
            image = parse_conversation(entry, place).image
            if image is not None:
                images.add(existing_image(folder / IMAGES, image, place))
        except (OSError, UserError) as error:
            faults.append(str(error))
        else:
            num_valid += 1
    return Checked(TRAIN_FILE, num_valid, "samples", faults)


def _check_split(folder: Path, split: str, images: set[Path]) -> list[Checked]:
    """Checks the questions and answers of a split, and adds the images to `images`.

    A file with a fault is reported with its first fault only.
    """
    questions: list[Question] = []

    def read() -> list[Question]:
        questions.extend(read_questions(folder / f"{split}.jsonl", folder / IMAGES))
        return questions

    results = [_check_file(f"{split}.jsonl", "questions", read)]
    images.update(question.image for question in questions)
    if questions:
        file = folder / f"{split}_answers.jsonl"
        results.append(_check_file(file.name, "answers", partial(read_answers, file, questions)))
    return results


def _check_file(name: str, kind: str, read: Callable[[], Sequence[object]]) -> Checked:
    """Checks a file by reading it, up to its first fault."""
    try:
        return Checked(name, len(read()), kind, [])
    except (OSError, UserError) as error:
        return Checked(name, 0, kind, [str(error)])


def _check_images(root: Path, paths: Sequence[Path]) -> Checked:
    """Decodes images of a folder, and lists faults and notes."""
    differing: set[Path] = set()  # images that a viewer shows differently

    def read_size(path: Path) -> tuple[int, int] | str:
        """Returns width and height, or the fault of an image that cannot be read."""
        try:
            size = open_image(path).size
        except (OSError, UserError) as error:
            return str(error)
        if is_shown_otherwise(path):
            differing.add(path)
        return size

    with concurrent.futures.ThreadPoolExecutor() as pool:
        sizes = list(pool.map(read_size, paths))
    faults = [fault for fault in sizes if isinstance(fault, str)]
    notes = [
        f"{path} has {size[0]} x {size[1]} pixels: Qwen takes sides of at most {MAX_ASPECT} to 1"
        for path, size in zip(paths, sizes, strict=True)
        if not isinstance(size, str) and max(size) > MAX_ASPECT * min(size)
    ]
    notes += [
        f"{path} is read as stored by training and evaluation, but turned or on a white ground by "
        "stepprune-generate: save it as it is shown"
        for path in sorted(differing)
    ]
    is_outside = ImageFolder(root).check([str(path.relative_to(root)) for path in paths]) == OUTSIDE
    notes += [
        f"{paths[n]} is a link that leads out of {root}: training takes it if its target folder is "
        "in config.data.linked_folders"
        for n in np.flatnonzero(is_outside)
    ]
    return Checked(IMAGES, len(sizes) - len(faults), "images decoded", faults, notes)
