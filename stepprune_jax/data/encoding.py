"""Conversations as token ids, with labels that say which of them are to be learnt."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stepprune_jax.data.prompts import (
    IMAGE_MARK,
    join_at_images,
    split_at_images,
    start_tokens,
    user_words,
)
from stepprune_jax.models.llava.prompts import conversation, place_images

# Label of a token that is not supervised.
IGNORE = -100


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


def check_fast(tokenizer: Any) -> None:
    """Refuses, with a ValueError, a tokenizer that does not say where its tokens stand."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            "the tokenizer does not say where its tokens stand in the text; expected a fast one "
            "(with tokenizer.json)"
        )


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
    return encode_conversations(tokenizer, [turns], num_images)[0]


def encode_conversations(
    tokenizer: Any, conversations: Sequence[Sequence[str]], num_images: int
) -> list[Encoded]:
    """`encode_conversation` of several, tokenised in one call, which uses all processors.

    Args:
        tokenizer: as there.
        conversations: the turns of each.
        num_images: images that go with each.

    Returns:
        The conversations in their order.

    Raises:
        ValueError: as there.
    """
    check_fast(tokenizer)
    written = [_write(turns, num_images) for turns in conversations]
    pieces = [split_at_images(prompt, num_images) for prompt, _ in written]
    tokenized = tokenizer(
        [piece for row in pieces for piece in row],
        return_offsets_mapping=True,
        return_attention_mask=False,
    )
    words = [user_words(turns) for turns in conversations]
    text = tokenizer(words, add_special_tokens=False, return_attention_mask=False).input_ids
    encoded, size = [], num_images + 1
    for number, (_, supervised) in enumerate(written):
        part = slice(number * size, (number + 1) * size)
        ids = tokenized.input_ids[part]
        labels = _labels(pieces[number], ids, tokenized.offset_mapping[part], supervised)
        skip = start_tokens(tokenizer, ids[0])
        whole = join_at_images(ids, skip), join_at_images(labels, skip, IGNORE)
        encoded.append(Encoded(*whole, list(text[number]) if words[number] else []))
    return encoded


def _write(turns: Sequence[str], num_images: int) -> tuple[str, bytearray]:
    """The prompt of a conversation, and for each of its characters whether it is supervised."""
    turns = list(turns)
    if not turns or len(turns) % 2:
        raise ValueError(f"expected questions each with an answer, got {len(turns)} turn(s)")
    for number, turn in enumerate(turns):
        if not turn.replace(IMAGE_MARK, "").strip():
            raise ValueError(f"turn {number} of the conversation is empty")
    turns[0] = place_images(turns[0], num_images)
    prompt = conversation(turns)
    supervised = bytearray(len(prompt))
    for number in range(1, len(turns), 2):
        # A conversation that is open ends where the answer begins.
        start, end = len(conversation(turns[:number])), len(conversation(turns[: number + 1]))
        supervised[start:end] = b"\1" * (end - start)
    return prompt, supervised


def _labels(
    pieces: Sequence[str],
    ids: Sequence[Sequence[int]],
    places: Sequence[Sequence[tuple[int, int]]],
    supervised: bytearray,
) -> list[list[int]]:
    """Labels of each piece: tokens that stand, even in part, on a supervised character."""
    before = np.concatenate([[0], np.cumsum(np.frombuffer(supervised, np.uint8), dtype=np.int64)])
    labels, begin = [], 0
    for piece, own, place in zip(pieces, ids, places, strict=True):
        first, last = begin + np.array(place, np.int64).reshape(-1, 2).T
        labels.append(np.where(before[last] > before[first], own, IGNORE).tolist())
        begin += len(piece) + len(IMAGE_MARK)
    return labels
