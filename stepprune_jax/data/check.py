"""Checks a data folder before training: `stepprune-check DIR`.

Reads `train.json` and the questions and answers of each existing split, and decodes every image
that they name. Prints a count for each file and the first faults; the exit status is 1 if there are
any. Images that only some models or settings take are listed, but are no faults.
"""

import concurrent.futures
import os
from collections.abc import Callable, Iterable, Sequence
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
    """Result of checking a file, or the images.

    Attributes:
        name: name of the file.
        count: number of valid entries.
        kind: name of the entries, in the plural.
        faults: faults, one line each.
        notes: what is a fault for some models or settings only, one line each.
    """

    name: str
    count: int
    kind: str
    faults: list[str]
    notes: Sequence[str] = ()


def check_folder(folder: str | Path) -> list[Checked]:
    """Reads all files of a data folder, including images."""
    folder, images = local_path(folder), set()
    checked = [_conversations(folder, images)] if os.path.lexists(folder / TRAIN_FILE) else []
    for split in SPLITS:
        # Answers without their questions are a fault, and so is a folder in place of a file.
        if any(os.path.lexists(folder / f"{split}{end}.jsonl") for end in ("", "_answers")):
            checked += _split(folder, split, images)
    if not checked:
        names = ", ".join([TRAIN_FILE, *(f"{split}.jsonl" for split in SPLITS)])
        raise FileNotFoundError(f"{folder} has no file to check, expected some of {names}")
    return [*checked, _decoded(folder / IMAGES, sorted(images))]


def _conversations(folder: Path, images: set[Path]) -> Checked:
    """Checks the training file, sample by sample, and collects its images."""
    file, faults, good = folder / TRAIN_FILE, [], 0
    try:
        entries = read_json_list(file, "sample")
    except (OSError, UserError) as error:
        return Checked(TRAIN_FILE, 0, "samples", [str(error)])
    for index, entry in enumerate(entries):
        where = f"{file}: sample {index}"
        try:
            image = parse_conversation(entry, where).image
            if image is not None:
                images.add(existing_image(folder / IMAGES, image, where))
        except (OSError, UserError) as error:
            faults.append(str(error))
        else:
            good += 1
    return Checked(TRAIN_FILE, good, "samples", faults)


def _split(folder: Path, split: str, images: set[Path]) -> list[Checked]:
    """Checks a split's questions and answers, each up to its first fault."""
    questions: list[Question] = []

    def ask() -> list[Question]:
        questions.extend(read_questions(folder / f"{split}.jsonl", folder / IMAGES))
        return questions

    checked = [_whole(f"{split}.jsonl", "questions", ask)]
    images.update(question.image for question in questions)
    if questions:
        file = folder / f"{split}_answers.jsonl"
        checked.append(_whole(file.name, "answers", partial(read_answers, file, questions)))
    return checked


def _whole(name: str, kind: str, read: Callable[[], Sequence[object]]) -> Checked:
    """Checks a file that is read as a whole."""
    try:
        return Checked(name, len(read()), kind, [])
    except (OSError, UserError) as error:
        return Checked(name, 0, kind, [str(error)])


def _decoded(root: Path, paths: Iterable[Path]) -> Checked:
    """Decodes the images of a folder."""
    turned: set[Path] = set()

    def size_or_fault(path: Path) -> tuple[int, int] | str:
        try:
            size = open_image(path).size
        except (OSError, UserError) as error:
            return str(error)
        if is_shown_otherwise(path):
            turned.add(path)
        return size

    paths = list(paths)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = list(pool.map(size_or_fault, paths))
    faults = [line for line in found if isinstance(line, str)]
    notes = [
        f"{path} has {size[0]} x {size[1]} pixels: Qwen takes sides of at most {MAX_ASPECT} to 1"
        for path, size in zip(paths, found, strict=True)
        if not isinstance(size, str) and max(size) > MAX_ASPECT * min(size)
    ]
    notes += [
        f"{path} is read as stored by training and evaluation, but turned or on a white ground by "
        "stepprune-generate: save it as it is shown"
        for path in sorted(turned)
    ]
    outside = ImageFolder(root).check([str(path.relative_to(root)) for path in paths]) == OUTSIDE
    notes += [
        f"{paths[n]} is a link that leads out of {root}: training takes it if its target folder is "
        "in config.data.linked_folders"
        for n in np.flatnonzero(outside)
    ]
    return Checked(IMAGES, len(found) - len(faults), "images decoded", faults, notes)
