"""Reads training conversations and questions in LLaVA's file formats.

A data folder holds ``images/``, ``train.json``, and for each split ``SPLIT.jsonl`` (questions) and
``SPLIT_answers.jsonl``.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stepprune_jax.data.image_files import existing_image, image_name
from stepprune_jax.data.json_files import (
    Record,
    as_object,
    field,
    identity,
    read_json_lines,
    words,
)
from stepprune_jax.data.prompts import IMAGE_MARK
from stepprune_jax.user_input import UserError, require

# Fields of other programs' formats that change the meaning of a sample, with the supported way to
# express it. Ignoring these fields would train on the wrong samples.
_UNSUPPORTED_FIELDS = {
    **dict.fromkeys(("images", "videos"), '"image" with the name of one image, or none'),
    **dict.fromkeys(("system", "system_prompt"), "the model's own system prompt"),
}
# Mark of a video in files of Video-LLaVA, LLaVA-Video and LLaMA-Factory.
_VIDEO_MARK = "<video>"


class Conversation(NamedTuple):
    """One entry of a training file, parsed by `parse_conversation`.

    Attributes:
        image: name of the image as in the file, or None for a conversation without an image.
        turns: texts of the user and the assistant in turn, from the user's first text to an answer,
            without marks of images and videos. Empty if the entry has only a first message of the
            assistant, which is dropped.
        video: name of the video as in the file, or None for a conversation without a video.
    """

    image: str | None
    turns: tuple[str, ...]
    video: str | None = None


class Question(NamedTuple):
    """One question about an image or a video.

    Attributes:
        question_id: id of the question, unique in the question file.
        image: path of the image or the video.
        text: the user's message without an image mark.
        category: kind of question. Tables of results have a column per category.
        video: the video, with the sampling of its frames; None for an image.
    """

    question_id: str
    image: Path
    text: str
    category: str
    video: Any = None  # a `Video`, whose module needs Pillow


def parse_conversation(entry: object, place: str) -> Conversation:
    """Parses one entry of a training file.

    A first message of the assistant is dropped, as in LLaVA's training. The image or video belongs
    to the first question, at any position of its mark.

    Args:
        entry: a value of the file's JSON list.
        place: file and number of the entry, for messages.

    Returns:
        The conversation.

    Raises:
        ValueError: the entry is malformed, or has fields of another format.
    """
    json_object = as_object(entry, place)
    _refuse_unsupported(json_object, place)
    image = image_name(json_object, place) if json_object.get("image") is not None else None
    video = image_name(json_object, place, "video") if json_object.get("video") else None
    require(image is None or video is None, f'{place}: has both "image" and "video"')
    kind = "image" if video is None else "video"
    has_medium = image is not None or video is not None
    return Conversation(image, _read_turns(json_object, place, has_medium, kind), video)


def read_questions(
    file: str | Path,
    image_root: str | Path,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
) -> list[Question]:
    """Reads a question file, one JSON object per line.

    A question has the field "image" or the field "video".

    Args:
        file: path of the question file.
        image_root: folder that image and video names are relative to.
        fps: number of frames to sample of videos per second, see `Video`.
        num_frames: number of frames to sample of each video.

    Returns:
        The questions in the order of the file.

    Raises:
        FileNotFoundError: the file or an image is missing.
        ValueError: a question is malformed, or two questions have one id.
    """
    first_places: dict[str, str] = {}
    return [
        parse_question(record, first_places, image_root, fps=fps, num_frames=num_frames)
        for record in read_json_lines(file)
    ]


def parse_question(
    record: Record,
    first_places: dict[str, str],
    image_root: str | Path,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
) -> Question:
    """Parses one object of a question file.

    Args:
        record: the object.
        first_places: line of each earlier object of the file, by its id. The new id is added.
        image_root: folder that image and video names are relative to.
        fps: number of frames to sample of a video per second, see `Video`.
        num_frames: number of frames to sample of a video.

    Returns:
        The question.

    Raises:
        FileNotFoundError: the image is missing.
        ValueError: the question is malformed, or an earlier object has the same id.
    """
    place, json_object = record
    question_id = read_unique_id(record, first_places)
    _refuse_unsupported(json_object, place)
    text = words(json_object, "text", place)
    kind = "image" if json_object.get("video") is None else "video"
    if kind == "video":
        require(json_object.get("image") is None, f'{place}: has both "image" and "video"')
        text = text.replace(_VIDEO_MARK, IMAGE_MARK)
    text = _remove_image_marks(text, "text", place)
    category = words(json_object, "category", place) if "category" in json_object else "default"
    name = image_name(json_object, place, kind)
    image = existing_image(image_root, name, place, kind)
    video = _make_video(image, fps, num_frames) if kind == "video" else None
    return Question(question_id, image, text, category, video)


def _make_video(path: Path, fps: float | None, num_frames: int | None) -> Any:
    """Returns a `Video`. Pillow is imported here, because scores need no Pillow."""
    from stepprune_jax.data.videos import Video

    return Video(path, fps, num_frames)


def read_answers(file: str | Path, questions: Sequence[Question]) -> list[str]:
    """Reads the reference answers in the order of the questions, with the errors of `read_for`."""
    records = read_for(file, questions, "answer")
    return [words(record.value, "answer", record.place) for record in records]


def read_for(file: str | Path, questions: Sequence[Question], kind: str) -> list[Record]:
    """Reads a file with one JSON object for each question, such as an answer.

    Args:
        file: path of a file whose objects have the field "question_id", in any order.
        questions: the questions.
        kind: what the objects are, in the singular, for messages, such as "answer".

    Returns:
        The objects in the order of the questions.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: a question has no object or several, or an object has no question.
    """
    question_ids = {question.question_id for question in questions}
    first_places: dict[str, str] = {}
    records: dict[str, Record] = {}
    for record in read_json_lines(file):
        question_id = read_unique_id(record, first_places)
        if question_id not in question_ids:
            raise UserError(f'{record.place}: "question_id" {question_id!r} belongs to no question')
        records[question_id] = record
    ordered_ids = [question.question_id for question in questions]
    missing_ids = [question_id for question_id in ordered_ids if question_id not in records]
    if missing_ids:
        more = f" and {len(missing_ids) - 1} more" if len(missing_ids) > 1 else ""
        raise UserError(f"{file}: no {kind} for question_id {missing_ids[0]!r}{more}")
    return [records[question_id] for question_id in ordered_ids]


def _refuse_unsupported(json_object: Mapping[str, object], place: str) -> None:
    """Raises an error if a sample has one of `_UNSUPPORTED_FIELDS`."""
    for name, expected in _UNSUPPORTED_FIELDS.items():
        if json_object.get(name):
            raise UserError(f'{place}: "{name}" is not followed, expected {expected}')


def _is_nonempty_list(value: object) -> bool:
    """Returns whether a value is a list with at least one item."""
    return isinstance(value, list) and len(value) > 0


def _read_turns(
    json_object: Mapping[str, object], place: str, has_image: bool, kind: str
) -> tuple[str, ...]:
    """Reads and checks the turns of a conversation.

    Args:
        json_object: the fields of an entry of a training file, by name.
        place: file and index of the entry, for messages.
        has_image: whether the entry has an image or a video.
        kind: "image" or "video". A video may have the mark of a video or of an image.

    Returns:
        The turns without marks, as in `Conversation`.

    Raises:
        ValueError: the messages are malformed, do not alternate, or do not end with an answer.
    """
    entries = field(json_object, "conversations", place, _is_nonempty_list, "a list of messages")
    message_places = [f"{place}: conversations[{i}]" for i in range(len(entries))]
    messages = list(map(as_object, entries, message_places))
    # Some of LLaVA's training conversations were split in the middle and begin with an answer.
    if messages[0].get("from") == "gpt":
        messages, message_places = messages[1:], message_places[1:]
    turns: list[str] = []
    for i, (message, message_place) in enumerate(zip(messages, message_places, strict=True)):
        role = ("human", "gpt")[i % 2]
        is_role = functools.partial(operator.eq, role)
        field(message, "from", message_place, is_role, f'"{role}" here')  # raises for another role
        text = words(message, "value", message_place)
        if kind == "video" and i % 2 == 0:
            text = text.replace(_VIDEO_MARK, IMAGE_MARK)
        _check_image_mark(text, message_place, turn_index=i, has_image=has_image)
        turns.append(_remove_image_marks(text, "value", message_place))
    if len(turns) % 2:
        raise UserError(f'{place}: "conversations" ends with a question that has no answer')
    return tuple(turns)


def _check_image_mark(text: str, place: str, turn_index: int, has_image: bool) -> None:
    """Raises an error if a turn has an image mark without an image that belongs there.

    Args:
        text: text of the turn.
        place: file, entry and message of the turn, for messages.
        turn_index: index of the turn. Even turns are the user's.
        has_image: whether the conversation has an image. It belongs to the first turn.
    """
    if IMAGE_MARK in text and has_image and turn_index % 2 == 0 and turn_index > 0:
        raise UserError(f'{place}: "value": {IMAGE_MARK} is allowed in the first question only')
    stripped = text.strip()
    # Inside a text the mark may be HTML. At the start or end it means that the image is missing.
    is_at_end = stripped.startswith(IMAGE_MARK) or stripped.endswith(IMAGE_MARK)
    if not has_image and turn_index == 0 and is_at_end:
        raise UserError(f'{place}: "value" has {IMAGE_MARK}, but the sample has no "image"')


def _remove_image_marks(text: str, name: str, place: str) -> str:
    """Returns a text without its image marks.

    Args:
        text: value of a text field.
        name: name of the field, for messages.
        place: file and line of the object with the field, for messages.

    Raises:
        ValueError: the text has a video mark, or is blank without image marks.
    """
    # Inside a text the video mark may be HTML.
    has_video = text.lstrip().startswith(_VIDEO_MARK) or text.rstrip().endswith(f"\n{_VIDEO_MARK}")
    require(not has_video, f'{place}: "{name}" has {_VIDEO_MARK}, but the sample has no "video"')
    if IMAGE_MARK not in text:
        return text
    unmarked = text.replace(IMAGE_MARK, "").strip()
    if not unmarked:
        raise UserError(f'{place}: "{name}" is empty except for {IMAGE_MARK}')
    return unmarked


def read_unique_id(record: Record, first_places: dict[str, str]) -> str:
    """Returns the "question_id" of an object.

    Args:
        record: the object.
        first_places: line of each earlier object of the file, by its id. The new id is added.

    Raises:
        ValueError: the object has no valid id, or an earlier object has the same id.
    """
    place, json_object = record
    question_id = identity(json_object, "question_id", place)
    if question_id in first_places:
        first_place = first_places[question_id]
        raise UserError(
            f'{place}: "question_id" {question_id!r} was already given at {first_place}'
        )
    first_places[question_id] = place.rpartition(": ")[2]
    return question_id
