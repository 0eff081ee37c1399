"""Encodes conversations as token ids, with labels that mark the supervised tokens."""

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
        labels: one label per id: the id itself if it is supervised, otherwise `IGNORE`. The label
            of a token is the token, not the next token.
        text: ids of the user's text, which the policy reads.
    """

    ids: list[int]
    labels: list[int]
    text: list[int]


def last_answer(labels: Sequence[int]) -> list[int]:
    """Restricts the labels of a conversation to its last answer.

    The policy reads all of the user's turns. An earlier answer would train it with a question that
    the user asked after that answer.
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
    """Converts conversations to ids and labels.

    Attributes:
        tokenizer: a fast `transformers` tokenizer.
        place_images: (message, number of images) -> the first user turn with its image marks.
        conversation: turns -> the prompt in the family's template. The prompt of the first turns
            must be a prefix of the prompt of all turns, as for
            `models.backbone.Backbone.conversation`.
        vocab_size: vocabulary size of the model, the limit of all ids.
    """

    tokenizer: Any
    place_images: Callable[[str, int], str]
    conversation: Callable[[Sequence[str | None]], str]
    vocab_size: int = 1 << 31

    def check(self) -> None:
        """Raises a ValueError if the tokenizer does not return the offsets of its tokens."""
        if not getattr(self.tokenizer, "is_fast", False):
            raise UserError(
                "the tokenizer does not return the offsets of its tokens in the text; expected a "
                "fast one (with tokenizer.json)"
            )

    def encode(self, turns: Sequence[str], num_images: int) -> EncodedConversation:
        """Encodes a conversation.

        The ids equal the ids of `tokenize_with_images` for the family's prompt. The text of each
        assistant turn is supervised, from the end of its role name to the end of the turn. The ids
        before the first supervised id are therefore the prompt that `generate` uses.

        Args:
            turns: turns that alternate from the user's first to the assistant's last.
            num_images: number of images. They come first unless the turns have image marks.

        Returns:
            The encoded conversation.

        Raises:
            ValueError: the number of image marks is wrong, or the tokenizer returns no offsets or
                belongs to another model.
        """
        return self.encode_all([turns], num_images)[0]

    def encode_all(
        self, conversations: Sequence[Sequence[str]], num_images: int
    ) -> list[EncodedConversation]:
        """Encodes several conversations with one parallel call of the tokenizer.

        Arguments and result are as in `encode`, for a list of conversations with equal numbers of
        images.
        """
        self.check()
        written = [self._write(turns, num_images) for turns in conversations]
        pieces = [split_at_images(prompt, num_images) for prompt, _ in written]
        texts = [user_words(turns) for turns in conversations]
        with TOKENIZER_LOCK:
            tokens = self.tokenizer(
                [piece for row in pieces for piece in row],
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_attention_mask=False,
            )
            text_ids = self.tokenizer(
                texts, add_special_tokens=False, return_attention_mask=False
            ).input_ids
            start_ids = start_tokens(self.tokenizer)
        check_ids(itertools.chain.from_iterable(tokens.input_ids), self.vocab_size)
        encoded, num_pieces = [], num_images + 1
        for number, (_, mask) in enumerate(written):
            part = slice(number * num_pieces, (number + 1) * num_pieces)
            ids = tokens.input_ids[part]
            labels = _label_tokens(pieces[number], ids, tokens.offset_mapping[part], mask)
            encoded.append(
                EncodedConversation(
                    start_ids + join_at_images(ids),
                    [IGNORE] * len(start_ids) + join_at_images(labels, IGNORE),
                    list(text_ids[number]) if texts[number] else [],
                )
            )
        return encoded

    def _write(self, turns: Sequence[str], num_images: int) -> tuple[str, bytearray]:
        """Writes a conversation as text.

        Returns:
            The prompt, and a mask with one byte per character: 1 if it is supervised, otherwise 0.
        """
        turns = list(turns)
        turns[0] = self.place_images(turns[0], num_images)
        prompt = self.conversation(turns)
        mask = bytearray(len(prompt))
        for number in range(1, len(turns), 2):
            # The prompt of the turns before an answer ends where the answer starts.
            start = len(self.conversation(turns[:number]))
            end = len(self.conversation(turns[: number + 1]))
            mask[start:end] = b"\1" * (end - start)
        return prompt, mask


def _label_tokens(
    pieces: Sequence[str],
    ids: Sequence[Sequence[int]],
    offsets: Sequence[Sequence[tuple[int, int]]],
    mask: bytearray,
) -> list[list[int]]:
    """Labels the tokens that overlap a supervised character.

    Args:
        pieces: pieces of a prompt between its image marks.
        ids: token ids of each piece.
        offsets: start and end of each token in its piece, in characters.
        mask: 1 for each supervised character of the prompt.

    Returns:
        Labels of each piece: the token id, or `IGNORE`.
    """
    # Prefix sums: supervised characters between two positions are a difference of two entries.
    count = np.concatenate([[0], np.cumsum(np.frombuffer(mask, np.uint8), dtype=np.int64)])
    labels, piece_start = [], 0
    for piece, piece_ids, piece_offsets in zip(pieces, ids, offsets, strict=True):
        start, end = piece_start + np.array(piece_offsets, np.int64).reshape(-1, 2).T
        # A tokenizer that trims offsets gives a token of blanks an empty span at the end of the
        # blanks. Such a token starts where the token before it ends.
        previous_end = np.maximum.accumulate(np.concatenate([[piece_start], end]))[:-1]
        start = np.where(start < end, start, previous_end)
        labels.append(np.where(count[end] > count[start], piece_ids, IGNORE).tolist())
        piece_start += len(piece) + len(IMAGE_MARK)
    return labels
