"""Checks a data folder before training: `stepprune-check DIR`.

Reads the training file `train.json`, and for each existing split its questions and answers. Decodes
every image and a few frames of every video that these files name. Faults are malformed entries,
unreadable images or videos, and images or videos that two of the files share. Notes are about
images that only some models or settings accept.
"""

import concurrent.futures
import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stepprune_jax.data.image_files import OUTSIDE, ImageFolder, existing_image
from stepprune_jax.data.images import MAX_ASPECT, is_shown_otherwise, open_image
from stepprune_jax.data.json_files import read_json_lines, read_json_list, words
from stepprune_jax.data.llava import parse_conversation, parse_question, read_unique_id
from stepprune_jax.data.source import IMAGES, TRAIN_FILE
from stepprune_jax.data.videos import Video, open_video
from stepprune_jax.user_input import UserError, local_path

# A split consists of the files `SPLIT.jsonl` (questions) and `SPLIT_answers.jsonl`.
SPLITS = ("validation", "test")


class Medium(NamedTuple):
    """An image or a video of a data folder."""

    path: Path
    is_video: bool


# The questions about each image and video of a file.
QuestionsByMedium = dict[Medium, set[str]]


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
        One result per existing file, one result for all images, one for all videos, and one for
        the images and videos that two files share. A result about videos or shared images is absent
        if there are none.

    Raises:
        FileNotFoundError: the folder has neither a training file nor a file of a split.
    """
    folder = local_path(folder)
    results: list[CheckResult] = []
    questions_of: dict[str, QuestionsByMedium] = {}  # by name of the file
    # `lexists` also finds a folder or a broken link with the name of a file. Reading it then gives
    # a fault, where `exists` would skip it silently.
    if os.path.lexists(folder / TRAIN_FILE):
        result, questions_of[TRAIN_FILE] = _check_training_file(folder)
        results.append(result)
    for split in SPLITS:
        # Answers without questions are a fault, so either file is enough to check the split.
        files = (folder / f"{split}.jsonl", folder / f"{split}_answers.jsonl")
        if any(map(os.path.lexists, files)):
            split_results, questions_of[files[0].name] = _check_split(folder, split)
            results += split_results
    if not results:
        names = ", ".join([TRAIN_FILE, *(f"{split}.jsonl" for split in SPLITS)])
        raise FileNotFoundError(f"{folder} has no file to check, expected some of {names}")
    media = set().union(*questions_of.values())
    images = sorted(medium.path for medium in media if not medium.is_video)
    videos = sorted(medium.path for medium in media if medium.is_video)
    results.append(_check_images(folder / IMAGES, images))
    if videos:
        results.append(_check_videos(videos))
    shared = _check_shared(questions_of)
    return [*results, shared] if shared.faults else results


def _check_training_file(folder: Path) -> tuple[CheckResult, QuestionsByMedium]:
    """Checks every sample of a folder's training file.

    Returns:
        The result with one fault per malformed sample, and the questions about each existing image
        and video.
    """
    file = folder / TRAIN_FILE
    faults: list[str] = []
    questions_of: QuestionsByMedium = defaultdict(set)
    try:
        samples = read_json_list(file, "sample")
    except (OSError, UserError) as error:
        return CheckResult(TRAIN_FILE, 0, "samples", [str(error)]), questions_of
    for sample_index, sample in enumerate(samples):
        place = f"{file}: sample {sample_index}"
        try:
            conversation = parse_conversation(sample, place)
            for kind, name in (("image", conversation.image), ("video", conversation.video)):
                if name is not None:
                    path = existing_image(folder / IMAGES, name, place, kind)
                    medium = Medium(path, is_video=kind == "video")
                    questions_of[medium].update(conversation.turns[::2])
        except (OSError, UserError) as error:
            faults.append(str(error))
    num_valid = len(samples) - len(faults)
    return CheckResult(TRAIN_FILE, num_valid, "samples", faults), questions_of


def _check_split(folder: Path, split: str) -> tuple[list[CheckResult], QuestionsByMedium]:
    """Checks every line of the question file and the answer file of a split.

    Answers are matched to questions, so a question file with a fault leaves the answers unchecked.

    Returns:
        One result per file that was read, and the questions about each image and video.
    """
    question_file, answer_file = folder / f"{split}.jsonl", folder / f"{split}_answers.jsonl"
    faults: list[str] = []
    first_places: dict[str, str] = {}
    questions_of: QuestionsByMedium = defaultdict(set)
    num_valid = 0
    try:
        records = read_json_lines(question_file, faults)
    except (OSError, UserError) as error:
        return [CheckResult(question_file.name, 0, "questions", faults or [str(error)])], {}
    for record in records:
        try:
            question = parse_question(record, first_places, folder / IMAGES)
            medium = Medium(question.image, question.video is not None)
            questions_of[medium].add(question.text)
            num_valid += 1
        except (OSError, UserError) as error:
            faults.append(str(error))
    results = [CheckResult(question_file.name, num_valid, "questions", faults)]
    if not faults:
        results.append(_check_answers(answer_file, [*first_places]))
    return results, questions_of


def _check_answers(file: Path, question_ids: Sequence[str]) -> CheckResult:
    """Checks every line of an answer file, and that each question has an answer.

    Args:
        file: the answer file.
        question_ids: ids of the questions, in the order of their file.
    """
    faults: list[str] = []
    first_places: dict[str, str] = {}
    unanswered_ids = dict.fromkeys(question_ids)
    num_valid = 0
    try:
        records = read_json_lines(file, faults)
    except (OSError, UserError) as error:
        return CheckResult(file.name, 0, "answers", faults or [str(error)])
    for record in records:
        try:
            question_id = read_unique_id(record, first_places)
            if question_id not in unanswered_ids:
                problem = f'"question_id" {question_id!r} belongs to no question'
                raise UserError(f"{record.place}: {problem}")
            del unanswered_ids[question_id]
            words(record.value, "answer", record.place)
            num_valid += 1
        except UserError as error:
            faults.append(str(error))
    faults += [f"{file}: no answer for question_id {name!r}" for name in unanswered_ids]
    return CheckResult(file.name, num_valid, "answers", faults)


def _digest(path: Path) -> str:
    """Returns a hash of a file's content; for a file that cannot be read, its path."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return str(path)


def _check_shared(questions_of: Mapping[str, QuestionsByMedium]) -> CheckResult:
    """Finds images and videos that two files share, by name or by content.

    A policy that was trained or calibrated on an image of the test questions makes the table wrong.

    Args:
        questions_of: questions about each image and video, by name of the file.
    """
    paths = sorted({medium.path for media in questions_of.values() for medium in media})
    with concurrent.futures.ThreadPoolExecutor() as pool:
        digest_of = dict(zip(paths, pool.map(_digest, paths), strict=True))
    # By content, then by name of the file: the first path with this content, and the questions.
    uses: dict[str, dict[str, tuple[Path, set[str]]]] = defaultdict(dict)
    for file_name, questions_by_medium in questions_of.items():
        for medium, texts in questions_by_medium.items():
            use_by_file = uses[digest_of[medium.path]]
            use_by_file.setdefault(file_name, (medium.path, set()))[1].update(texts)
    faults = [
        _describe_shared(use_by_file) for use_by_file in uses.values() if len(use_by_file) > 1
    ]
    return CheckResult("splits", len(uses) - len(faults), "images or videos in one file", faults)


def _describe_shared(use_by_file: Mapping[str, tuple[Path, set[str]]]) -> str:
    """Returns the line about an image or a video of several files, and a question that they share.

    Args:
        use_by_file: path and questions by name of the file.
    """
    path_of = {file_name: path for file_name, (path, _) in use_by_file.items()}
    if len({*path_of.values()}) == 1:
        line = f"{next(iter(path_of.values()))} is in {' and '.join(path_of)}"
    else:
        places = [f"{path} of {file_name}" for file_name, path in path_of.items()]
        line = f"{' and '.join(places)} have the same content"
    num_files = Counter(text for _, texts in use_by_file.values() for text in texts)
    shared_texts = sorted(text for text, count in num_files.items() if count > 1)
    if not shared_texts:
        return line
    more = f" and {len(shared_texts) - 1} more" if len(shared_texts) > 1 else ""
    return f"{line}, with the question {shared_texts[0]!r}{more}"


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
