"""Conversations to train on and questions to answer, in the file formats of LLaVA.

A data folder holds ``images/``, ``train.json``, and for each split ``SPLIT.jsonl`` (questions),
``SPLIT_answers.jsonl`` and, where the world is known, ``SPLIT_scenes.jsonl``.
"""

import os
from collections.abc import Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

from stepprune_jax.data.json_files import (
    Record,
    as_object,
    identity,
    read_json_lines,
    read_json_list,
    words,
)
from stepprune_jax.data.prompts import (
    IMAGE_MARK,
    place_images,
    question_ids,
    tokenize_with_images,
    vicuna_v1,
)
from stepprune_jax.models.vlm import IMAGE_TOKEN

# Label of a token that is not supervised.
IGNORE = -100


class Sample(NamedTuple):
    """One training conversation.

    Attributes:
        id: from the file, where it need not be unique.
        image: its picture, or None.
        turns: what was said, user first and then alternating, without image marks.
        index: place in the file, from 0.
    """

    id: str
    image: Path | None
    turns: tuple[str, ...]
    index: int


class Question(NamedTuple):
    """One question about a picture.

    Attributes:
        question_id: unique in its file.
        image: the picture.
        text: the user's whole message, without an image mark.
        category: kind of question, for tables.
    """

    question_id: str
    image: Path
    text: str
    category: str


class Scene(NamedTuple):
    """What is known of the picture behind a question.

    Attributes:
        complexity: number of objects.
        relevant: patches the answer depends on, row by row from 0.
    """

    complexity: int
    relevant: tuple[int, ...]


class Encoded(NamedTuple):
    """A conversation as token ids.

    Attributes:
        ids: with `IMAGE_TOKEN` where an image stands.
        labels: one per id: the id itself where it is supervised, `IGNORE` elsewhere. They are not
            shifted: the label of a token is the token.
        text: ids of the user's words alone, for the policy.
    """

    ids: list[int]
    labels: list[int]
    text: list[int]


def read_conversations(
    file: str | Path, image_root: str | Path, *, split_turns: bool = False
) -> list[Sample]:
    """Reads training conversations.

    A first message of the assistant is dropped, as in LLaVA's own training. The picture belongs to
    the first question, wherever in it the mark stands.

    Args:
        file: JSON list of {"id", "image", "conversations": [{"from", "value"}, ...]}; "from" is
            "human" or "gpt" in turn. Without "image" the sample is text only.
        image_root: folder that "image" is relative to.
        split_turns: make every question with its answer a sample of its own, with the same picture.
            A later question is then alone: words of an earlier one do not go with it.

    Returns:
        The samples in the file's order.

    Raises:
        FileNotFoundError: the file or a picture is missing.
        ValueError: the file is not such a list. The message names the file, the sample's index and
            the field.
    """
    samples = []
    for index, entry in enumerate(read_json_list(file, "sample")):
        where = f"{file}: sample {index}"
        value = as_object(entry, where)
        name = identity(value, "id", where) if value.get("id") is not None else str(index)
        image = None
        if value.get("image") is not None:
            image = _image(value, image_root, where)
        turns = _turns(value, where, image is not None)
        if not split_turns or len(turns) == 2:
            samples.append(Sample(name, image, turns, index))
            continue
        for number in range(0, len(turns), 2):
            pair = turns[number : number + 2]
            samples.append(Sample(f"{name}/{number // 2}", image, pair, index))
    return samples


def read_questions(file: str | Path, image_root: str | Path) -> list[Question]:
    """Reads a question file.

    Args:
        file: one object a line: {"question_id", "image", "text", "category"}; without "category"
            it is "default".
        image_root: folder that "image" is relative to.

    Returns:
        The questions in the file's order.

    Raises:
        FileNotFoundError: the file or a picture is missing.
        ValueError: a line is not such an object, or a "question_id" comes twice. The message names
            the file, the line and the field.
    """
    questions, seen = [], {}
    for record in read_json_lines(file):
        where, value = record
        name = _new_id(record, seen)
        text = words(value, "text", where)
        if IMAGE_MARK in text:
            text = text.replace(IMAGE_MARK, "").strip()
            if not text:
                raise ValueError(f'{where}: "text" is empty but for {IMAGE_MARK}')
        category = words(value, "category", where) if "category" in value else "default"
        questions.append(Question(name, _image(value, image_root, where), text, category))
    return questions


def read_answers(file: str | Path, questions: Sequence[Question]) -> list[str]:
    """Reads the answers to questions.

    Args:
        file: one object a line, in any order: {"question_id", "answer"}.
        questions: what was asked.

    Returns:
        The answers, in the order of `questions`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an answer is missing, comes twice, is empty or belongs to no question.
    """
    return [words(value, "answer", where) for where, value in _matched(file, questions, "answer")]


def read_scenes(file: str | Path, questions: Sequence[Question]) -> list[Scene]:
    """Reads what is known of the pictures behind questions.

    Args:
        file: one object a line, in any order: {"question_id", "complexity", "relevant"}.
        questions: what was asked.

    Returns:
        The scenes, in the order of `questions`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a scene is missing, comes twice, belongs to no question, or its fields are not
            a number and a list of numbers, none negative.
    """
    scenes = []
    for where, value in _matched(file, questions, "scene"):
        complexity, relevant = value.get("complexity"), value.get("relevant")
        if not _is_count(complexity):
            raise ValueError(
                f'{where}: "complexity" must be a whole number >= 0, got {complexity!r}'
            )
        if not isinstance(relevant, list) or not all(map(_is_count, relevant)):
            raise ValueError(
                f'{where}: "relevant" must be a list of patch numbers >= 0, got {relevant!r}'
            )
        scenes.append(Scene(complexity, tuple(relevant)))
    return scenes


def encode_conversation(tokenizer: Any, turns: Sequence[str], num_images: int) -> Encoded:
    """Turns a conversation into ids, and says which of them are to be learnt.

    The ids are those of `tokenize_with_images` on the ``vicuna_v1`` form. Supervised is what the
    assistant says: all that follows ``ASSISTANT:``, up to and with ``</s>``. What comes before the
    first supervised id is therefore the prompt of `generate`.

    Args:
        tokenizer: a fast `transformers` tokenizer.
        turns: user first, then alternating, the last one the assistant's.
        num_images: images that go with the conversation, in front unless marked.

    Returns:
        ids and labels of one length, and the ids of the user's words.

    Raises:
        ValueError: there is no turn, a turn is empty or has no answer, marks do not match the
            images, or the tokenizer does not say where its tokens stand.
    """
    turns = list(turns)
    if not turns or len(turns) % 2:
        raise ValueError(f"expected questions each with an answer, got {len(turns)} turn(s)")
    for number, turn in enumerate(turns):
        if not turn.replace(IMAGE_MARK, "").strip():
            raise ValueError(f"turn {number} of the conversation is empty")
    text = question_ids(tokenizer, turns)
    turns[0] = place_images(turns[0], num_images)
    prompt = vicuna_v1(turns)
    ids = tokenize_with_images(tokenizer, prompt, num_images)
    supervised = bytearray(len(prompt))
    for number in range(1, len(turns), 2):
        # A conversation that is open ends where the answer begins.
        start, end = len(vicuna_v1(turns[:number])), len(vicuna_v1(turns[: number + 1]))
        supervised[start:end] = b"\1" * (end - start)
    return Encoded(ids, _labels(tokenizer, prompt, ids, supervised), list(text))


def _labels(tokenizer: Any, prompt: str, ids: list[int], supervised: bytearray) -> list[int]:
    """Labels of `ids`: those that stand, even in part, on a supervised character of `prompt`."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            "the tokenizer does not say where its tokens stand in the text; expected a fast one "
            "(with tokenizer.json)"
        )
    labels: list[int] = []
    begin = 0
    for piece in prompt.split(IMAGE_MARK):
        end = len(labels)
        while end < len(ids) and ids[end] != IMAGE_TOKEN:
            end += 1
        own = ids[len(labels) : end]
        encoded = tokenizer(piece, return_offsets_mapping=True)
        # The start token of a later piece has no place among the ids.
        skip = len(encoded.input_ids) - len(own)
        if list(encoded.input_ids[skip:]) != own:
            raise ValueError("the tokenizer gives other ids when it is asked where they stand")
        for token, (first, last) in zip(own, encoded.offset_mapping[skip:], strict=True):
            said = any(supervised[begin + first : begin + last])
            labels.append(token if said else IGNORE)
        if end < len(ids):
            labels.append(IGNORE)
        begin += len(piece) + len(IMAGE_MARK)
    return labels


def _turns(value: dict[str, Any], where: str, has_image: bool) -> tuple[str, ...]:
    """The turns of a sample, checked and without marks."""
    messages = value.get("conversations")
    if not isinstance(messages, list) or not messages:
        problem = "is missing" if messages is None else "must be a list of messages"
        raise ValueError(f'{where}: "conversations" {problem}')
    places = [f"{where}: conversations[{number}]" for number in range(len(messages))]
    messages = [as_object(*pair) for pair in zip(messages, places, strict=True)]
    if messages[0].get("from") == "gpt":  # as in LLaVA's own training; some begin in the middle
        messages, places = messages[1:], places[1:]
    turns: list[str] = []
    for number, (message, place) in enumerate(zip(messages, places, strict=True)):
        expected = ("human", "gpt")[number % 2]
        if message.get("from") != expected:
            raise ValueError(
                f'{place}: "from" must be "{expected}" here, got {message.get("from")!r}'
            )
        turns.append(_without_marks(words(message, "value", place), place, number, has_image))
    if not turns or len(turns) % 2:
        raise ValueError(f'{where}: "conversations" ends with a question that has no answer')
    return tuple(turns)


def _without_marks(text: str, place: str, number: int, has_image: bool) -> str:
    """The words of message `number` without image marks; refuses marks that mean something else."""
    if IMAGE_MARK not in text:
        return text
    if has_image and number % 2 == 0 and number > 0:
        raise ValueError(f'{place}: "value": {IMAGE_MARK} may stand in the first question only')
    bare = text.strip()
    # In the midst of a text it may be talk about HTML; at an end it is a picture that got lost.
    if not has_image and number == 0 and (bare.startswith(IMAGE_MARK) or bare.endswith(IMAGE_MARK)):
        raise ValueError(f'{place}: "value" has {IMAGE_MARK}, but the sample has no "image"')
    text = text.replace(IMAGE_MARK, "").strip()
    if not text:
        raise ValueError(f'{place}: "value" is empty but for {IMAGE_MARK}')
    return text


def _image(value: dict[str, Any], root: str | Path, where: str) -> Path:
    """The picture of an object; must be a file below `root`."""
    name = words(value, "image", where)
    # Links inside the root may lead anywhere, as in the usual data folders; names may not.
    outside = os.path.normpath(name).split(os.sep)[0] == os.pardir
    if outside or os.path.isabs(name) or PureWindowsPath(name).drive:
        raise ValueError(f'{where}: "image" must be a path inside {root}, got {name!r}')
    path = Path(root) / name
    if not os.path.isfile(path):  # False as well for names that no file can have
        hint = "" if os.path.isdir(root) else ", and there is no such folder as the image folder"
        raise FileNotFoundError(f'{where}: "image": no file at {path}{hint}')
    return path


def _new_id(record: Record, seen: dict[str, str]) -> str:
    """The "question_id" of an object, which none in `seen` has; notes it there."""
    where, value = record
    name = identity(value, "question_id", where)
    if name in seen:
        raise ValueError(f'{where}: "question_id" {name!r} was already given at {seen[name]}')
    seen[name] = where.rpartition(": ")[2]
    return name


def _matched(file: str | Path, questions: Sequence[Question], kind: str) -> list[Record]:
    """The objects of a file in the order of the questions, exactly one for each."""
    known = {question.question_id for question in questions}
    seen: dict[str, str] = {}
    found: dict[str, Record] = {}
    for record in read_json_lines(file):
        name = _new_id(record, seen)
        if name not in known:
            raise ValueError(f'{record.where}: "question_id" {name!r} belongs to no question')
        found[name] = record
    missing = [q.question_id for q in questions if q.question_id not in found]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{file}: no {kind} for question_id {missing[0]!r}{others}")
    return [found[question.question_id] for question in questions]


def _is_count(value: Any) -> bool:
    """Whether a parsed value is a whole number that is not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
