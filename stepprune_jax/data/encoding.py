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
from stepprune_jax.data.videos import ClipShape
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
    """Returns labels with only the last answer of a conversation supervised.

    The policy prunes once for all answers of a conversation, and it reads all of the user's turns.
    An earlier answer would train the policy with questions that the user asked later.

    Args:
        labels: labels of a conversation, as in `EncodedConversation`.

    Returns:
        The labels, with `IGNORE` before the last answer.
    """
    stop = len(labels)
    while stop and labels[stop - 1] == IGNORE:
        stop -= 1
    start = stop
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
        place_videos: (prompt, shape of the video of each image mark, None for an image) -> the
            prompt with the marks of the temporal patches, as `models.backbone.Backbone`.
    """

    tokenizer: Any
    place_images: Callable[[str, int], str]
    conversation: Callable[[Sequence[str | None]], str]
    vocab_size: int = 1 << 31
    place_videos: Callable[[str, Sequence[Any]], str] | None = None

    def check(self) -> None:
        """Raises a ValueError if the tokenizer does not return the offsets of its tokens."""
        if not getattr(self.tokenizer, "is_fast", False):
            raise UserError(
                "the tokenizer does not return the offsets of its tokens in the text; expected a "
                "fast one (with tokenizer.json)"
            )

    def encode(
        self, turns: Sequence[str], num_images: int, clip: ClipShape | None = None
    ) -> EncodedConversation:
        """Encodes a conversation.

        The ids equal the ids of `tokenize_with_images` for the family's prompt. The text of each
        assistant turn is supervised, from the end of its role name to the end of the turn. The ids
        before the first supervised id are therefore the prompt that `generate` uses.

        Args:
            turns: turns that alternate from the user's first to the assistant's last.
            num_images: number of images. They come first unless the turns have image marks.
            clip: the shape of the video that the only image mark stands for; None for images.

        Returns:
            The encoded conversation. A video of Qwen3-VL has an `IMAGE_TOKEN` for each temporal
            patch.

        Raises:
            ValueError: the number of image marks is wrong, or the tokenizer returns no offsets or
                belongs to another model.
        """
        return self.encode_all([turns], num_images, [clip])[0]

    def encode_all(
        self,
        conversations: Sequence[Sequence[str]],
        num_images: int,
        clips: Sequence[ClipShape | None] | None = None,
    ) -> list[EncodedConversation]:
        """Encodes several conversations with one parallel call of the tokenizer.

        Args:
            conversations: turns of each conversation, as in `encode`.
            num_images: number of images of each conversation.
            clips: for each conversation the shape of its video, None for images; None if no
                conversation has a video.

        Returns:
            The encoded conversations, as in `encode`.

        Raises:
            ValueError: as in `encode`.
        """
        self.check()
        clips = clips or [None] * len(conversations)
        prompts_and_masks = [
            self._write_prompt(turns, num_images, clip)
            for turns, clip in zip(conversations, clips, strict=True)
        ]
        # Each prompt is split at its marks into one more piece of text than it has marks.
        prompt_pieces = [
            split_at_images(prompt, num_images if clip is None else None)
            for (prompt, _), clip in zip(prompts_and_masks, clips, strict=True)
        ]
        user_texts = [user_words(turns) for turns in conversations]
        with TOKENIZER_LOCK:
            tokens = self.tokenizer(
                [piece for pieces in prompt_pieces for piece in pieces],
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_attention_mask=False,
            )
            user_text_ids = self.tokenizer(
                user_texts, add_special_tokens=False, return_attention_mask=False
            ).input_ids
            start_ids = start_tokens(self.tokenizer)
        check_ids(itertools.chain.from_iterable(tokens.input_ids), self.vocab_size)
        encoded, first_piece = [], 0
        for i, (pieces, (_, mask)) in enumerate(zip(prompt_pieces, prompts_and_masks, strict=True)):
            span = slice(first_piece, first_piece + len(pieces))
            first_piece += len(pieces)
            piece_ids = tokens.input_ids[span]
            piece_labels = _label_tokens(pieces, piece_ids, tokens.offset_mapping[span], mask)
            encoded.append(
                EncodedConversation(
                    ids=start_ids + join_at_images(piece_ids),
                    labels=[IGNORE] * len(start_ids) + join_at_images(piece_labels, IGNORE),
                    # Some tokenizers give ids even for an empty text.
                    text=list(user_text_ids[i]) if user_texts[i] else [],
                )
            )
        return encoded

    def _write_prompt(
        self, turns: Sequence[str], num_images: int, clip: ClipShape | None
    ) -> tuple[str, bytearray]:
        """Writes a conversation as a prompt.

        Args:
            turns: turns that alternate from the user's first to the assistant's last.
            num_images: number of images.
            clip: the shape of the video that the only image mark stands for; None for images.

        Returns:
            The prompt with its image marks, and a mask with one byte per character: 1 for the
            characters of answers, which are supervised, and 0 for all other characters.
        """

        def write(turns: Sequence[str]) -> str:
            prompt = self.conversation(turns)
            if clip is None or self.place_videos is None:
                return prompt
            return self.place_videos(prompt, [clip])

        first_turn, *other_turns = turns
        turns = [self.place_images(first_turn, num_images), *other_turns]
        prompt = write(turns)
        mask = bytearray(len(prompt))
        for turn_index in range(1, len(turns), 2):
            # The prompt of the turns before an answer ends where the answer starts.
            start = len(write(turns[:turn_index]))
            stop = len(write(turns[: turn_index + 1]))
            mask[start:stop] = b"\1" * (stop - start)
        return prompt, mask


def _label_tokens(
    pieces: Sequence[str],
    ids: Sequence[Sequence[int]],
    offsets: Sequence[Sequence[tuple[int, int]]],
    mask: bytearray,
) -> list[list[int]]:
    """Labels the tokens of a prompt. A token that overlaps a supervised character is supervised.

    Args:
        pieces: text of the prompt between its image marks.
        ids: token ids of each piece.
        offsets: start and stop of each token in its piece, in characters.
        mask: one byte per character of the prompt, 1 if the character is supervised.

    Returns:
        Labels of each piece. The label of a token is its id if the token is supervised, otherwise
        `IGNORE`.
    """
    # Entry i counts the supervised characters before position i, so the number of supervised
    # characters in a span is the difference of two entries.
    num_before = np.concatenate([[0], np.cumsum(np.frombuffer(mask, np.uint8), dtype=np.int64)])
    labels, piece_start = [], 0
    for piece, piece_ids, piece_offsets in zip(pieces, ids, offsets, strict=True):
        start, stop = piece_start + np.array(piece_offsets, np.int64).reshape(-1, 2).T
        # A tokenizer that trims offsets gives a token of blanks an empty span at the end of the
        # blanks. Such a token starts where the token before it stops.
        previous_stop = np.maximum.accumulate(np.concatenate([[piece_start], stop]))[:-1]
        start = np.where(start < stop, start, previous_stop)
        is_supervised = num_before[stop] > num_before[start]
        labels.append(np.where(is_supervised, piece_ids, IGNORE).tolist())
        piece_start += len(piece) + len(IMAGE_MARK)
    return labels
