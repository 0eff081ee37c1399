"""Prompts as token ids with sentinels for images, for any prompt template.

A prompt is text with `IMAGE_MARK` at each image; as ids it has `IMAGE_TOKEN` there, which is not a
token of any vocabulary and is replaced by visual tokens inside the model.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from stepprune_jax.user_input import UserError

IMAGE_MARK = "<image>"
IMAGE_TOKEN = -200
# A call of a fast tokenizer first changes settings of the tokenizer, which all threads share.
TOKENIZER_LOCK = threading.Lock()


def tokenize_with_images(
    tokenizer: Callable[..., Any], prompt: str, num_images: int | None = None
) -> list[int]:
    """Converts a prompt to ids with `IMAGE_TOKEN` at each image mark.

    The text is split at the marks, and each piece is tokenised separately. With a Llama tokenizer
    the piece before an image therefore ends in a lone blank piece, and the piece after it starts
    with one. The prompt begins with the tokenizer's start token. A token that the tokenizer appends
    to every text is left out, as the end tokens of a prompt are part of its text.
    """
    pieces = split_at_images(prompt, num_images)
    with TOKENIZER_LOCK:
        encoded = [tokenizer(piece, add_special_tokens=False).input_ids for piece in pieces]
        return start_tokens(tokenizer) + join_at_images(encoded)


def check_ids(ids: Iterable[int], vocab_size: int) -> None:
    """Raises a ValueError if a tokenizer gave an id that the model has no embedding for."""
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise UserError(
            f"the tokenizer gives id {largest}, expected ids below {vocab_size}, the model's "
            "vocab_size: it is another model's"
        )


def check_marks(text: str, num_images: int) -> None:
    """Raises a ValueError unless the text has one `IMAGE_MARK` for each image."""
    marks = text.count(IMAGE_MARK)
    if marks != num_images:
        raise UserError(
            f"the prompt has {marks or 'no'} {IMAGE_MARK}, but {num_images} image(s) are given; "
            "expected one for each"
        )


def marks_in_front(message: str, num_images: int, mark: str = IMAGE_MARK) -> str:
    """Puts image marks in front of the message, as in the training data.

    The mark of a single image moves to the front. With several images and as many marks in the
    message, the marks keep their places.
    """
    marks = message.count(IMAGE_MARK)
    if marks:
        check_marks(message, num_images)
    if marks > 1:
        return message
    if marks == 1:
        message = message.replace(IMAGE_MARK, "").strip()
    return mark * num_images + message


def split_at_images(prompt: str, num_images: int | None = None) -> list[str]:
    """Splits a prompt at its image marks."""
    if num_images is not None:
        check_marks(prompt, num_images)
    return prompt.split(IMAGE_MARK)


def start_tokens(tokenizer: Callable[..., Any]) -> list[int]:
    """Returns the ids that a tokenizer prepends to every text, usually one or none."""
    return _added_tokens(tokenizer)[0]


def end_tokens(tokenizer: Callable[..., Any]) -> list[int]:
    """Returns the ids that a tokenizer appends to every text, usually none."""
    return _added_tokens(tokenizer)[1]


def begins_pieces_with_a_blank(tokenizer: Any) -> bool:
    """Returns whether a piece of text begins otherwise than the same text after a special token.

    A Llama tokenizer of `legacy: false` begins a piece with a blank, and omits that blank after a
    special token, such as the image token of `transformers`. Other tokenizers do not distinguish
    the two.
    """
    special = tokenizer.eos_token
    if special is None:
        return False
    piece, joined = (
        list(tokenizer(text, add_special_tokens=False).input_ids) for text in ("?", f"{special}?")
    )
    return joined[1:] != piece


def _added_tokens(tokenizer: Callable[..., Any]) -> tuple[list[int], list[int]]:
    """Returns the ids that a tokenizer prepends and appends to every text."""
    encoded = tokenizer("?", return_special_tokens_mask=True)
    ids, is_added = list(encoded.input_ids), list(encoded.special_tokens_mask)
    if all(is_added):  # a vocabulary without this character
        return ids, []
    start, stop = is_added.index(0), len(ids) - is_added[::-1].index(0)
    return ids[:start], ids[stop:]


def join_at_images(pieces: Sequence[Sequence[int]], image: int = IMAGE_TOKEN) -> list[int]:
    """Joins the ids of pieces that were split at the images."""
    joined = list(pieces[0])
    for piece in pieces[1:]:
        joined += [image, *piece]
    return joined


def question_ids(tokenizer: Any, turns: Sequence[str]) -> tuple[int, ...]:
    """Returns ids of the user's text, for the policy.

    They exclude the system prompt, role names, answers, image marks and a start token. All of the
    user's turns are included, since a later question may refer to an earlier one.
    """
    text = user_words(turns)
    if not text:
        return ()
    with TOKENIZER_LOCK:
        return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def user_words(turns: Sequence[str]) -> str:
    """Returns the user's turns of a conversation, one per line, without image marks."""
    said = [turn.replace(IMAGE_MARK, "").strip() for turn in turns[::2]]
    return "\n".join(filter(None, said))


def truncated_images(
    ids: Int[np.ndarray, " l"], kept: Int[np.ndarray, " j"], limit: int
) -> Int[np.ndarray, " j"]:
    """Counts the visual tokens of each image among the first embeddings of a prompt."""
    is_image = ids == IMAGE_TOKEN
    size = np.ones(len(ids), int)
    size[is_image] = kept
    before = np.cumsum(size) - size
    return np.clip(limit - before, 0, size)[is_image]


def pad_batch(
    rows: Sequence[Sequence[int] | Int[np.ndarray, " _"]],
    fill: int = 0,
    *,
    multiple: int = 1,
    width: int | None = None,
) -> tuple[Int[np.ndarray, "b l"], Int[np.ndarray, " b"]]:
    """Right-pads rows of numbers, such as the ids of prompts, to one width."""
    length = np.asarray([len(row) for row in rows], np.int32)
    if width is None:
        width = -(-max(1, int(length.max())) // multiple) * multiple
    padded = np.full((len(rows), width), fill, np.int32)
    for row, target in zip(rows, padded, strict=True):
        target[: len(row)] = row
    return padded, length
