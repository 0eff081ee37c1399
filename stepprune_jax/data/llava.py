"""Reads training conversations and questions in LLaVA's file formats.

A data folder holds ``images/``, ``train.json``, and for each split ``SPLIT.jsonl`` (questions) and
``SPLIT_answers.jsonl``.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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

# Fields of other programs' files that change what a sample is about or how it is asked. Ignoring
# them would train on the wrong samples.
_UNSUPPORTED_FIELDS = {
    **dict.fromkeys(("images", "video", "videos"), '"image" with the name of one image, or none'),
    **dict.fromkeys(("system", "system_prompt"), "the model's own system prompt"),
}
# Mark of a video in files of Video-LLaVA, LLaVA-Video and LLaMA-Factory.
_VIDEO_MARK = "<video>"


class Conversation(NamedTuple):
    """One entry of a training file.

    Attributes:
        image: name of the image as in the file, or None.
        turns: the turns without image marks, alternating from the user's first turn. Empty if the
            entry has only a first message of the assistant, which is dropped.
    """

    image: str | None
    turns: tuple[str, ...]


class Question(NamedTuple):
    """One question about an image.

    Attributes:
        question_id: unique in the question file.
        image: path of the image.
        text: the user's message without an image mark.
        category: kind of question, for tables.
    """

    question_id: str
    image: Path
    text: str
    category: str


def parse_conversation(entry: object, place: str) -> Conversation:
    """Parses one entry of a training file.

    A first message of the assistant is dropped, as in LLaVA's training. The image belongs to the
    first question, at any position of its mark.

    Args:
        entry: a value of the file's JSON list.
        place: file and number of the entry, for messages.

    Returns:
        The conversation.

    Raises:
        ValueError: the entry is malformed, or has fields of another format.
    """
    value = as_object(entry, place)
    _refuse_unsupported(value, place)
    image = image_name(value, place) if value.get("image") is not None else None
    return Conversation(image, _read_turns(value, place, image is not None))


def read_questions(file: str | Path, image_root: str | Path) -> list[Question]:
    """Reads a question file, one JSON object per line.

    Args:
        file: the file.
        image_root: folder that image names are relative to.

    Returns:
        The questions in the order of the file.

    Raises:
        FileNotFoundError: the file or an image is missing.
        ValueError: a question is malformed, or two questions have one id.
    """
    questions: list[Question] = []
    first_places: dict[str, str] = {}
    for record in read_json_lines(file):
        place, value = record
        question_id = _read_new_id(record, first_places)
        _refuse_unsupported(value, place)
        text = _remove_marks(words(value, "text", place), "text", place)
        category = words(value, "category", place) if "category" in value else "default"
        image = existing_image(image_root, image_name(value, place), place)
        questions.append(Question(question_id, image, text, category))
    return questions


def read_answers(file: str | Path, questions: Sequence[Question]) -> list[str]:
    """Reads the reference answers in the order of the questions."""
    return [words(value, "answer", place) for place, value in read_for(file, questions, "answer")]


def read_for(file: str | Path, questions: Sequence[Question], kind: str) -> list[Record]:
    """Reads a file with one JSON object for each question.

    Args:
        file: the file, in any order.
        questions: the questions.
        kind: name of the objects, for messages.

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
        question_id = _read_new_id(record, first_places)
        if question_id not in question_ids:
            raise UserError(f'{record.place}: "question_id" {question_id!r} belongs to no question')
        records[question_id] = record
    missing = [q.question_id for q in questions if q.question_id not in records]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{file}: no {kind} for question_id {missing[0]!r}{more}")
    return [records[question.question_id] for question in questions]


def _refuse_unsupported(value: Mapping[str, object], place: str) -> None:
    """Raises if a sample has a field of another format that changes its meaning."""
    for name, expected in _UNSUPPORTED_FIELDS.items():
        require(not value.get(name), f'{place}: "{name}" is not followed, expected {expected}')


def _is_nonempty_list(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0


def _read_turns(value: Mapping[str, object], place: str, has_image: bool) -> tuple[str, ...]:
    """Returns the checked turns of a sample, without marks."""
    messages = field(value, "conversations", place, _is_nonempty_list, "a list of messages")
    message_places = [f"{place}: conversations[{number}]" for number in range(len(messages))]
    messages = [as_object(*pair) for pair in zip(messages, message_places, strict=True)]
    # LLaVA's training data has conversations that were cut and begin with an answer.
    if messages[0].get("from") == "gpt":
        messages, message_places = messages[1:], message_places[1:]
    turns: list[str] = []
    for number, (message, message_place) in enumerate(zip(messages, message_places, strict=True)):
        role = ("human", "gpt")[number % 2]
        is_role = functools.partial(operator.eq, role)
        field(message, "from", message_place, is_role, f'"{role}" here')
        text = words(message, "value", message_place)
        _check_image_mark(text, message_place, number, has_image)
        turns.append(_remove_marks(text, "value", message_place))
    if len(turns) % 2:
        raise UserError(f'{place}: "conversations" ends with a question that has no answer')
    return tuple(turns)


def _check_image_mark(text: str, place: str, number: int, has_image: bool) -> None:
    """Raises if message `number` has an image mark that cannot be followed."""
    if IMAGE_MARK in text and has_image and number % 2 == 0 and number > 0:
        raise UserError(f'{place}: "value": {IMAGE_MARK} is allowed in the first question only')
    stripped = text.strip()
    # Inside a text the mark may be HTML. At the start or end it means that the image is missing.
    is_at_end = stripped.startswith(IMAGE_MARK) or stripped.endswith(IMAGE_MARK)
    if not has_image and number == 0 and is_at_end:
        raise UserError(f'{place}: "value" has {IMAGE_MARK}, but the sample has no "image"')


def _remove_marks(text: str, name: str, place: str) -> str:
    """Removes the image marks of a text.

    Args:
        text: value of a field.
        name: name of the field, for messages.
        place: file and object of the field, for messages.

    Raises:
        ValueError: the text has a video mark, or is blank without image marks.
    """
    # Inside a text the video mark may be HTML.
    has_video = text.lstrip().startswith(_VIDEO_MARK) or text.rstrip().endswith(f"\n{_VIDEO_MARK}")
    require(not has_video, f'{place}: "{name}" has {_VIDEO_MARK}, but videos are not supported')
    if IMAGE_MARK not in text:
        return text
    unmarked = text.replace(IMAGE_MARK, "").strip()
    if not unmarked:
        raise UserError(f'{place}: "{name}" is empty except for {IMAGE_MARK}')
    return unmarked


def _read_new_id(record: Record, first_places: dict[str, str]) -> str:
    """Reads the "question_id" of an object, and raises if an earlier object has the same one.

    Args:
        record: the object.
        first_places: line by id of the earlier objects; the new id is added.
    """
    place, value = record
    question_id = identity(value, "question_id", place)
    if question_id in first_places:
        first = first_places[question_id]
        raise UserError(f'{place}: "question_id" {question_id!r} was already given at {first}')
    first_places[question_id] = place.rpartition(": ")[2]
    return question_id
