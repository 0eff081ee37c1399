"""Converts prompts with images to token ids, for any prompt template.

A prompt as text contains `IMAGE_MARK` at the position of each image. The prompt as ids contains
`IMAGE_TOKEN` there. This id is in no vocabulary. The model replaces it by visual tokens.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from stepprune_jax.user_input import UserError

IMAGE_MARK = "<image>"
IMAGE_TOKEN = -200
# Held during calls of a fast tokenizer. A call changes settings of the tokenizer, which all threads
# share.
TOKENIZER_LOCK = threading.Lock()


def tokenize_with_images(
    tokenizer: Callable[..., Any], prompt: str, num_images: int | None = None
) -> list[int]:
    """Converts a prompt to ids with `IMAGE_TOKEN` at each image mark.

    The text is split at the marks, and each piece is tokenized separately. A Llama tokenizer
    therefore writes a separate blank at the end of the piece before an image and at the start of
    the piece after it. The prompt begins with the tokenizer's start tokens. End tokens that the
    tokenizer appends to every text are omitted, because a prompt contains its end tokens as text.

    Args:
        tokenizer: a `transformers` tokenizer.
        prompt: text with `IMAGE_MARK` at each image.
        num_images: expected number of marks; None skips the check.

    Returns:
        The token ids.

    Raises:
        ValueError: the number of marks is not `num_images`.
    """
    pieces = split_at_images(prompt, num_images)
    with TOKENIZER_LOCK:
        encoded = [tokenizer(piece, add_special_tokens=False).input_ids for piece in pieces]
        return start_tokens(tokenizer) + join_at_images(encoded)


def check_ids(ids: Iterable[int], vocab_size: int) -> None:
    """Raises a ValueError if an id has no embedding in a vocabulary of `vocab_size` tokens."""
    largest = max(ids, default=0)
    if largest >= vocab_size:
        raise UserError(
            f"the tokenizer gives id {largest}, expected ids below {vocab_size}, the model's "
            "vocab_size: it is another model's"
        )


def check_marks(text: str, num_images: int) -> None:
    """Raises a ValueError unless the text has one `IMAGE_MARK` for each image."""
    num_marks = text.count(IMAGE_MARK)
    if num_marks != num_images:
        raise UserError(
            f"the prompt has {num_marks or 'no'} {IMAGE_MARK}, but {num_images} image(s) are "
            "given; expected one for each"
        )


def marks_in_front(message: str, num_images: int, mark: str = IMAGE_MARK) -> str:
    """Returns a message with one image mark per image, in front as in the training data.

    The mark of a single image moves to the front. Several marks keep their positions.

    Args:
        message: the user's message, with no image marks or with one per image.
        num_images: number of images.
        mark: text that is put in front of the message for each image.

    Raises:
        ValueError: the message has marks, but their number is not `num_images`.
    """
    num_marks = message.count(IMAGE_MARK)
    if num_marks:
        check_marks(message, num_images)
    if num_marks > 1:
        return message
    if num_marks == 1:
        message = message.replace(IMAGE_MARK, "").strip()
    return mark * num_images + message


def split_at_images(prompt: str, num_images: int | None = None) -> list[str]:
    """Splits a prompt at its image marks, and checks their number unless `num_images` is None."""
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
    """Returns whether a tokenizer writes a blank before a text, but not after a special token.

    A Llama tokenizer with `legacy: false` begins a text with a blank, and omits this blank after a
    special token such as the image token of `transformers`.
    """
    special_token = tokenizer.eos_token
    if special_token is None:
        return False

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    # Any short text shows the difference. The first id of the second text is the special token.
    return encode(f"{special_token}?")[1:] != encode("?")


def _added_tokens(tokenizer: Callable[..., Any]) -> tuple[list[int], list[int]]:
    """Returns the ids that a tokenizer prepends and appends to every text.

    Returns:
        Two lists: the ids before a text, and the ids after it.
    """
    encoded = tokenizer("?", return_special_tokens_mask=True)
    ids, is_added = list(encoded.input_ids), list(encoded.special_tokens_mask)
    if all(is_added):  # the vocabulary has no "?", so all ids are added ones
        return ids, []
    text_start, text_stop = is_added.index(0), len(ids) - is_added[::-1].index(0)
    return ids[:text_start], ids[text_stop:]


def join_at_images(pieces: Sequence[Sequence[int]], image: int = IMAGE_TOKEN) -> list[int]:
    """Joins the ids of a prompt's pieces, with the id `image` between two pieces."""
    first_piece, *other_pieces = pieces
    ids = list(first_piece)
    for piece in other_pieces:
        ids += [image, *piece]
    return ids


def question_ids(tokenizer: Any, turns: Sequence[str]) -> tuple[int, ...]:
    """Returns the ids of the user's text, which the policy reads.

    The text consists of all of the user's turns, because a question may refer to an earlier turn.
    It excludes system prompt, role names, answers, image marks and start tokens.

    Args:
        tokenizer: a `transformers` tokenizer.
        turns: texts of the user and the assistant in turn, from the user's first text.
    """
    text = user_words(turns)
    if not text:
        return ()
    with TOKENIZER_LOCK:
        return tuple(tokenizer(text, add_special_tokens=False).input_ids)


def word_ids(tokenizer: Any, words: Sequence[str]) -> tuple[int, ...]:
    """Returns the ids of words that are tokenized one by one, without start tokens.

    Args:
        tokenizer: a `transformers` tokenizer.
        words: words without blanks.
    """
    if not words:
        return ()
    with TOKENIZER_LOCK:
        encoded = tokenizer(list(words), is_split_into_words=True, add_special_tokens=False)
    return tuple(encoded.input_ids)


def user_words(turns: Sequence[str]) -> str:
    """Returns the user's turns of a conversation, one per line, without image marks."""
    texts = [turn.replace(IMAGE_MARK, "").strip() for turn in turns[::2]]
    return "\n".join(filter(None, texts))


def truncated_images(
    ids: Int[np.ndarray, " l"], kept: Int[np.ndarray, " j"], limit: int
) -> Int[np.ndarray, " j"]:
    """Returns how many visual tokens of each image remain in a truncated prompt.

    Args:
        ids: [l] ids of the prompt, with `IMAGE_TOKEN` at each of the j images.
        kept: [j] number of visual tokens of each image before truncation.
        limit: maximum number of embeddings of the prompt. Each text token has one embedding, and
            each visual token has one.

    Returns:
        [j] number of visual tokens of each image after truncation.
    """
    is_image = ids == IMAGE_TOKEN
    num_embeddings = np.ones(len(ids), int)
    num_embeddings[is_image] = kept
    num_before = np.cumsum(num_embeddings) - num_embeddings
    return np.clip(limit - num_before, 0, num_embeddings)[is_image]


def pad_batch(
    rows: Sequence[Sequence[int] | Int[np.ndarray, " _"]],
    fill: int = 0,
    *,
    multiple: int = 1,
    width: int | None = None,
) -> tuple[Int[np.ndarray, "b l"], Int[np.ndarray, " b"]]:
    """Right-pads rows of integers, such as the ids of prompts, to one width.

    Args:
        rows: b rows of any lengths.
        fill: value of the padding.
        multiple: without `width`, the width is rounded up to a multiple of this number.
        width: the width l; None selects the length of the longest row, at least 1.

    Returns:
        The padded rows [b, l] and their lengths [b], both int32.
    """
    lengths = np.asarray([len(row) for row in rows], np.int32)
    if width is None:
        num_multiples = -(-max(1, int(lengths.max())) // multiple)  # rounded up
        width = num_multiples * multiple
    padded = np.full((len(rows), width), fill, np.int32)
    for row, padded_row in zip(rows, padded, strict=True):
        padded_row[: len(row)] = row
    return padded, lengths
