"""Conversations as token ids, with labels that mark the supervised ones."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from stepprune_jax.data.prompts import (
    IMAGE_MARK,
    TOKENIZER_LOCK,
    check_ids,
    join_at_images,
    split_at_images,
    start_tokens,
    user_words,
)
from stepprune_jax.user_input import UserError

# Label of a token that is not supervised.
IGNORE = -100


class EncodedConversation(NamedTuple):
    """A conversation as token ids.

    Attributes:
        ids: ids with `IMAGE_TOKEN` instead of an image.
        labels: one per id: the id itself where it is supervised, `IGNORE` elsewhere. They are not
            shifted: the label of a token is the token.
        text: ids of the user's words alone, for the policy.
    """

    ids: list[int]
    labels: list[int]
    text: list[int]


def last_answer(labels: Sequence[int]) -> list[int]:
    """Restricts the labels of a conversation to its last answer.

    The policy reads all of the user's turns, so an earlier answer would teach it from a question
    that is asked later.
    """
    end = len(labels)
    while end and labels[end - 1] == IGNORE:
        end -= 1
    start = end
    while start and labels[start - 1] != IGNORE:
        start -= 1
    return [*[IGNORE] * start, *labels[start:]]


@dataclasses.dataclass(frozen=True)
class ConversationEncoder:
    """Converts conversations to ids, and marks the supervised ones.

    Attributes:
        tokenizer: a fast `transformers` tokenizer.
        place_images: (message, number of images) -> the first user turn with its image marks.
        conversation: turns -> the prompt in the family's template, with the prefix property of
            `models.backbone.Backbone.conversation`.
        vocab_size: vocabulary size of the model; ids are below it.
    """

    tokenizer: Any
    place_images: Callable[[str, int], str]
    conversation: Callable[[Sequence[str | None]], str]
    vocab_size: int = 1 << 31

    def check(self) -> None:
        """Raises a ValueError for a tokenizer that does not return the offsets of its tokens."""
        if not getattr(self.tokenizer, "is_fast", False):
            raise UserError(
                "the tokenizer does not return the offsets of its tokens in the text; expected a "
                "fast one (with tokenizer.json)"
            )

    def encode(self, turns: Sequence[str], num_images: int) -> EncodedConversation:
        """Encodes a conversation.

        The ids are those of `tokenize_with_images` on the family's prompt. The assistant's text is
        supervised: everything after its role, up to and including the end of its turn. The ids
        before the first supervised one are therefore the prompt of `generate`.

        Args:
            turns: user first, then alternating, the last one the assistant's.
            num_images: number of images of the conversation, in front unless marked.

        Returns:
            Ids and labels of equal length, and the ids of the user's words.

        Raises:
            ValueError: marks do not match the images, or the tokenizer does not return offsets or
                is another model's.
        """
        return self.encode_all([turns], num_images)[0]

    def encode_all(
        self, conversations: Sequence[Sequence[str]], num_images: int
    ) -> list[EncodedConversation]:
        """Encodes several conversations in one call of the tokenizer, which uses all processors."""
        self.check()
        written = [self._write(turns, num_images) for turns in conversations]
        pieces = [split_at_images(prompt, num_images) for prompt, _ in written]
        words = [user_words(turns) for turns in conversations]
        with TOKENIZER_LOCK:
            tokens = self.tokenizer(
                [piece for row in pieces for piece in row],
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_attention_mask=False,
            )
            text = self.tokenizer(
                words, add_special_tokens=False, return_attention_mask=False
            ).input_ids
            start = start_tokens(self.tokenizer)
        check_ids(itertools.chain.from_iterable(tokens.input_ids), self.vocab_size)
        encoded, size = [], num_images + 1
        for number, (_, supervised) in enumerate(written):
            part = slice(number * size, (number + 1) * size)
            ids = tokens.input_ids[part]
            labels = _labels(pieces[number], ids, tokens.offset_mapping[part], supervised)
            encoded.append(
                EncodedConversation(
                    start + join_at_images(ids),
                    [IGNORE] * len(start) + join_at_images(labels, IGNORE),
                    list(text[number]) if words[number] else [],
                )
            )
        return encoded

    def _write(self, turns: Sequence[str], num_images: int) -> tuple[str, bytearray]:
        """Returns a conversation's prompt and, per character, whether it is supervised."""
        turns = list(turns)
        turns[0] = self.place_images(turns[0], num_images)
        prompt = self.conversation(turns)
        supervised = bytearray(len(prompt))
        for number in range(1, len(turns), 2):
            # An open conversation ends where the answer begins.
            start = len(self.conversation(turns[:number]))
            end = len(self.conversation(turns[: number + 1]))
            supervised[start:end] = b"\1" * (end - start)
        return prompt, supervised


def _labels(
    pieces: Sequence[str],
    ids: Sequence[Sequence[int]],
    places: Sequence[Sequence[tuple[int, int]]],
    supervised: bytearray,
) -> list[list[int]]:
    """Labels tokens of each piece that overlap a supervised character."""
    before = np.concatenate([[0], np.cumsum(np.frombuffer(supervised, np.uint8), dtype=np.int64)])
    labels, begin = [], 0
    for piece, own, place in zip(pieces, ids, places, strict=True):
        first, last = begin + np.array(place, np.int64).reshape(-1, 2).T
        labels.append(np.where(before[last] > before[first], own, IGNORE).tolist())
        begin += len(piece) + len(IMAGE_MARK)
    return labels
