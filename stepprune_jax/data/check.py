"""Checks a data folder before training: `stepprune-check DIR`.

Reads the training file `train.json`, and for each existing split its questions and answers. Decodes
every image and a few frames of every video that these files name. Faults are malformed entries and
unreadable images or videos. Notes are about images that only some models or settings accept.
"""

import concurrent.futures
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stepprune_jax.data.image_files import OUTSIDE, ImageFolder, existing_image
from stepprune_jax.data.images import MAX_ASPECT, is_shown_otherwise, open_image
from stepprune_jax.data.json_files import read_json_list
from stepprune_jax.data.llava import parse_conversation, read_answers, read_questions
from stepprune_jax.data.source import IMAGES, TRAIN_FILE
from stepprune_jax.data.videos import Video, open_video
from stepprune_jax.user_input import UserError, local_path

# A split consists of the files `SPLIT.jsonl` (questions) and `SPLIT_answers.jsonl`.
SPLITS = ("validation", "test")


class Medium(NamedTuple):
    """An image or a video of a data folder."""

    path: Path
    is_video: bool


class CheckResult(NamedTuple):
    """Result of checking one file, all images or all videos. The command prints a block for each.

    Attributes:
        name: name of the file, or of the image folder.
        num_valid: number of valid entries.
        unit: what `num_valid` counts, in the plural, such as "samples".
        faults: one line per fault.
        notes: one line per image that some models or settings do not accept.
    """

    name: str
    num_valid: int
    unit: str
    faults: Sequence[str]
    notes: Sequence[str] = ()


def check_folder(folder: str | Path) -> list[CheckResult]:
    """Checks all files of a data folder, and decodes the images and videos that they name.

    Args:
        folder: folder with `train.json` or files of splits, and with `images/`.

    Returns:
        One result per existing file, one result for all images, and one for all videos.

    Raises:
        FileNotFoundError: the folder has neither a training file nor a file of a split.
    """
    folder = local_path(folder)
    results: list[CheckResult] = []
    media: set[Medium] = set()
    # `lexists` also finds a folder or a broken link with the name of a file. Reading it then gives
    # a fault, where `exists` would skip it silently.
    if os.path.lexists(folder / TRAIN_FILE):
        result, sample_media = _check_training_file(folder)
        results.append(result)
        media |= sample_media
    for split in SPLITS:
        # Answers without questions are a fault, so either file is enough to check the split.
        files = (folder / f"{split}.jsonl", folder / f"{split}_answers.jsonl")
        if any(map(os.path.lexists, files)):
            split_results, question_media = _check_split(folder, split)
            results += split_results
            media |= question_media
    if not results:
        names = ", ".join([TRAIN_FILE, *(f"{split}.jsonl" for split in SPLITS)])
        raise FileNotFoundError(f"{folder} has no file to check, expected some of {names}")
    images = sorted(medium.path for medium in media if not medium.is_video)
    videos = sorted(medium.path for medium in media if medium.is_video)
    results.append(_check_images(folder / IMAGES, images))
    return [*results, _check_videos(videos)] if videos else results


def _check_training_file(folder: Path) -> tuple[CheckResult, set[Medium]]:
    """Checks every sample of a folder's training file.

    Returns:
        The result with one fault per malformed sample, and the existing images and videos.
    """
    file = folder / TRAIN_FILE
    faults: list[str] = []
    media: set[Medium] = set()
    try:
        samples = read_json_list(file, "sample")
    except (OSError, UserError) as error:
        return CheckResult(TRAIN_FILE, 0, "samples", [str(error)]), media
    for sample_index, sample in enumerate(samples):
        place = f"{file}: sample {sample_index}"
        try:
            conversation = parse_conversation(sample, place)
            for kind, name in (("image", conversation.image), ("video", conversation.video)):
                if name is not None:
                    path = existing_image(folder / IMAGES, name, place, kind)
                    media.add(Medium(path, is_video=kind == "video"))
        except (OSError, UserError) as error:
            faults.append(str(error))
    num_valid = len(samples) - len(faults)
    return CheckResult(TRAIN_FILE, num_valid, "samples", faults), media


def _check_split(folder: Path, split: str) -> tuple[list[CheckResult], set[Medium]]:
    """Checks the question file and the answer file of a split.

    Reading stops at the first fault of a file. Answers are matched to questions, so a question file
    with a fault leaves the answers unchecked.

    Returns:
        One result per file that was read, and the images and videos of the questions.
    """
    question_file, answer_file = folder / f"{split}.jsonl", folder / f"{split}_answers.jsonl"
    try:
        questions = read_questions(question_file, folder / IMAGES)
    except (OSError, UserError) as error:
        return [CheckResult(question_file.name, 0, "questions", [str(error)])], set()
    results = [CheckResult(question_file.name, len(questions), "questions", [])]
    try:
        answers = read_answers(answer_file, questions)
        results.append(CheckResult(answer_file.name, len(answers), "answers", []))
    except (OSError, UserError) as error:
        results.append(CheckResult(answer_file.name, 0, "answers", [str(error)]))
    return results, {Medium(question.image, question.video is not None) for question in questions}


def _check_video(path: Path) -> str:
    """Decodes the first, the middle and the last frame of a video.

    Returns:
        Why the video cannot be read, or "".
    """
    try:
        frames = open_video(Video(path))
        last_index = len(frames.times) - 1
        for _ in frames.read(np.unique([0, last_index // 2, last_index])):
            pass
    except (OSError, UserError, MemoryError) as error:
        return str(error) or f"{path} needs more memory than is available"
    return ""


def _check_videos(paths: Sequence[Path]) -> CheckResult:
    """Reads the times of all frames of videos, and decodes a few frames of each, in parallel.

    Raises:
        MissingPackageError: PyAV is not installed.
    """
    with concurrent.futures.ThreadPoolExecutor() as pool:
        faults = list(filter(None, pool.map(_check_video, paths)))
    return CheckResult("videos", len(paths) - len(faults), "videos read", faults)


class _ImageCheck(NamedTuple):
    """Result of decoding one image.

    Attributes:
        size: width and height in pixels; (0, 0) if the image could not be decoded.
        fault: why the image could not be decoded, or "".
        is_shown_otherwise: whether an image viewer shows other pixels than training reads.
    """

    size: tuple[int, int]
    fault: str
    is_shown_otherwise: bool


def _check_image(path: Path) -> _ImageCheck:
    """Decodes one image."""
    try:
        size = open_image(path).size
    except (OSError, UserError) as error:
        return _ImageCheck((0, 0), str(error), False)
    return _ImageCheck(size, "", is_shown_otherwise(path))


def _check_images(folder: Path, paths: Sequence[Path]) -> CheckResult:
    """Decodes images in parallel.

    Args:
        folder: the image folder.
        paths: paths of the images in this folder.

    Returns:
        The result. Its faults are about images that cannot be decoded. Its notes are about images
        with a long side, about images that a viewer shows differently, and about links.
    """
    with concurrent.futures.ThreadPoolExecutor() as pool:
        checks = list(pool.map(_check_image, paths))
    faults = [check.fault for check in checks if check.fault]
    notes = [
        f"{path} has {width} x {height} pixels: Qwen takes sides of at most {MAX_ASPECT} to 1"
        for path, ((width, height), _, _) in zip(paths, checks, strict=True)
        if max(width, height) > MAX_ASPECT * min(width, height)
    ]
    notes += [
        f"{path} is read as stored by training and evaluation, but turned or on a white ground by "
        "stepprune-generate: save it as it is shown"
        for path, check in zip(paths, checks, strict=True)
        if check.is_shown_otherwise
    ]
    states = ImageFolder(folder).check([str(path.relative_to(folder)) for path in paths])
    notes += [
        f"{paths[i]} is a link that leads out of {folder}: training takes it if its target folder "
        "is in config.data.linked_folders"
        for i in np.flatnonzero(states == OUTSIDE).tolist()
    ]
    return CheckResult(IMAGES, len(paths) - len(faults), "images decoded", faults, notes)
