"""Training conversations and questions in LLaVA's file formats.

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

# Fields of other programs' files that change what a sample is about, or how it is asked.
_FOREIGN = {
    **dict.fromkeys(("images", "video", "videos"), '"image" with the name of one image, or none'),
    **dict.fromkeys(("system", "system_prompt"), "the model's own system prompt"),
}
# The mark of a video, as in the files of Video-LLaVA, LLaVA-Video and LLaMA-Factory.
_VIDEO_MARK = "<video>"


class Conversation(NamedTuple):
    """One entry of a training file.

    Attributes:
        image: name of its image as in the file, or None.
        turns: the turns, user first and then alternating, without image marks; empty if there is
            only a first message of the assistant, which is dropped.
    """

    image: str | None
    turns: tuple[str, ...]


class Question(NamedTuple):
    """One question about an image.

    Attributes:
        question_id: unique in its file.
        image: the image.
        text: the user's whole message, without an image mark.
        category: kind of question, for tables.
    """

    question_id: str
    image: Path
    text: str
    category: str


def parse_conversation(entry: object, where: str) -> Conversation:
    """Reads one entry of a training file.

    A first message of the assistant is dropped, as in LLaVA's own training. The image belongs to
    the first question, wherever its mark is.
    """
    value = as_object(entry, where)
    _refuse_foreign(value, where)
    image = image_name(value, where) if value.get("image") is not None else None
    return Conversation(image, _turns(value, where, image is not None))


def read_questions(file: str | Path, image_root: str | Path) -> list[Question]:
    """Reads a question file."""
    questions, seen = [], {}
    for record in read_json_lines(file):
        where, value = record
        name = _new_id(record, seen)
        _refuse_foreign(value, where)
        text = _bare(words(value, "text", where), "text", where)
        category = words(value, "category", where) if "category" in value else "default"
        image = existing_image(image_root, image_name(value, where), where)
        questions.append(Question(name, image, text, category))
    return questions


def read_answers(file: str | Path, questions: Sequence[Question]) -> list[str]:
    """Reads the answers to questions."""
    return [words(value, "answer", where) for where, value in read_for(file, questions, "answer")]


def read_for(file: str | Path, questions: Sequence[Question], kind: str) -> list[Record]:
    """Reads the objects of a file in the order of the questions, exactly one for each."""
    known = {question.question_id for question in questions}
    seen: dict[str, str] = {}
    matched: dict[str, Record] = {}
    for record in read_json_lines(file):
        name = _new_id(record, seen)
        if name not in known:
            raise UserError(f'{record.where}: "question_id" {name!r} belongs to no question')
        matched[name] = record
    missing = [q.question_id for q in questions if q.question_id not in matched]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{file}: no {kind} for question_id {missing[0]!r}{others}")
    return [matched[question.question_id] for question in questions]


def _refuse_foreign(value: Mapping[str, object], where: str) -> None:
    """Raises if a sample has a field of another format that changes its meaning."""
    for name, expected in _FOREIGN.items():
        require(not value.get(name), f'{where}: "{name}" is not followed, expected {expected}')


def _are_some(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0


def _turns(value: Mapping[str, object], where: str, has_image: bool) -> tuple[str, ...]:
    """Returns the checked turns of a sample, without marks."""
    messages = field(value, "conversations", where, _are_some, "a list of messages")
    places = [f"{where}: conversations[{number}]" for number in range(len(messages))]
    messages = [as_object(*pair) for pair in zip(messages, places, strict=True)]
    if messages[0].get("from") == "gpt":  # as in LLaVA's own training; some begin in the middle
        messages, places = messages[1:], places[1:]
    turns: list[str] = []
    for number, (message, place) in enumerate(zip(messages, places, strict=True)):
        role = ("human", "gpt")[number % 2]
        field(message, "from", place, functools.partial(operator.eq, role), f'"{role}" here')
        turns.append(_without_marks(words(message, "value", place), place, number, has_image))
    if len(turns) % 2:
        raise UserError(f'{where}: "conversations" ends with a question that has no answer')
    return tuple(turns)


def _without_marks(text: str, place: str, number: int, has_image: bool) -> str:
    """Returns message `number` without image marks; raises for misplaced marks."""
    if IMAGE_MARK in text and has_image and number % 2 == 0 and number > 0:
        raise UserError(f'{place}: "value": {IMAGE_MARK} is allowed in the first question only')
    ends = text.strip()
    # In the middle of a text it may be about HTML; at an end it is a missing image.
    if not has_image and number == 0 and (ends.startswith(IMAGE_MARK) or ends.endswith(IMAGE_MARK)):
        raise UserError(f'{place}: "value" has {IMAGE_MARK}, but the sample has no "image"')
    return _bare(text, "value", place)


def _bare(text: str, name: str, where: str) -> str:
    """Returns the text of a field without image marks; raises if nothing else is in it."""
    # In the middle of a text it may be about HTML.
    marked = text.lstrip().startswith(_VIDEO_MARK) or text.rstrip().endswith(f"\n{_VIDEO_MARK}")
    require(not marked, f'{where}: "{name}" has {_VIDEO_MARK}, but videos are not supported')
    if IMAGE_MARK not in text:
        return text
    bare = text.replace(IMAGE_MARK, "").strip()
    if not bare:
        raise UserError(f'{where}: "{name}" is empty except for {IMAGE_MARK}')
    return bare


def _new_id(record: Record, seen: dict[str, str]) -> str:
    """Returns the "question_id" of an object, which must be new, and adds it to `seen`."""
    where, value = record
    name = identity(value, "question_id", where)
    if name in seen:
        raise UserError(f'{where}: "question_id" {name!r} was already given at {seen[name]}')
    seen[name] = where.rpartition(": ")[2]
    return name
