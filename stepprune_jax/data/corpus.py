"""Gives access to the rows of a training file, and tokenises each row on demand.

A row is one training example: the turns of a conversation up to a question, and the answer to this
question, whose tokens are supervised.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from stepprune_jax.data.encoding import (
    IGNORE,
    ConversationEncoder,
    EncodedConversation,
    last_answer,
)
from stepprune_jax.data.index import Index, Samples
from stepprune_jax.data.llava import Question


class LengthLimits(NamedTuple):
    """Limits on the length of a row. Longer rows are truncated at the end.

    Attributes:
        image_tokens: number of visual tokens of the largest image.
        context: maximum number of embeddings of a conversation, with one for each text token and
            for each visual token.
        policy_text: maximum number of tokens of the user's text that the policy reads.
    """

    image_tokens: int
    context: int
    policy_text: int

    @property
    def ids(self) -> int:
        """Maximum number of ids of a conversation. The image has one id, `IMAGE_TOKEN`."""
        return self.context - self.image_tokens + 1


class TrainingRow(NamedTuple):
    """Token ids of one training example, without its image. Batches are built from these.

    Attributes:
        ids: [l] ids of the prompt and its answer, with `IMAGE_TOKEN` at the image.
        text: [t] ids of the user's text, which the policy reads.
        place: [k] index into `ids` of the token before each supervised token. The model predicts
            the supervised token there.
        target: [k] ids of the supervised tokens.
    """

    ids: Int[np.ndarray, " l"]
    text: Int[np.ndarray, " t"]
    place: Int[np.ndarray, " k"]
    target: Int[np.ndarray, " k"]


def make_row(encoded: EncodedConversation, limits: LengthLimits) -> TrainingRow:
    """Builds a training row whose supervised tokens are the last answer of a conversation.

    Args:
        encoded: ids and labels of a conversation with one image.
        limits: maximum lengths. Longer conversations and user's texts are truncated.

    Returns:
        The row.
    """
    ids = np.array(encoded.ids[: limits.ids], np.int32)
    labels = np.array(last_answer(encoded.labels)[: limits.ids], np.int32)
    # The first id has no token before it that could predict it, so it is never supervised.
    previous_index = np.flatnonzero(labels[1:] != IGNORE).astype(np.int32)
    text = np.array(encoded.text[: limits.policy_text], np.int32)
    return TrainingRow(ids, text, previous_index, labels[previous_index + 1])


class Lengths(NamedTuple):
    """Token counts of the u usable rows after truncation.

    Attributes:
        ids: [u] number of ids, with one id for the image.
        text: [u] number of ids of the user's text.
        targets: [u] number of supervised tokens.
    """

    ids: Int[np.ndarray, " u"]
    text: Int[np.ndarray, " u"]
    targets: Int[np.ndarray, " u"]


class Corpus:
    """The u usable rows of a training file, indexed from 0 to u - 1. Threads may share a corpus.

    Attributes:
        lengths: token counts of the rows.
        identity: hash that changes if other rows of the training file become usable.
    """

    def __init__(
        self,
        index: Index,
        usable_rows: Int[np.ndarray, " u"],
        *,
        samples: Samples,
        root: Path,
        encoder: ConversationEncoder,
        limits: LengthLimits,
    ):
        """Builds a corpus from an index.

        Args:
            index: index of the training file, with token counts.
            usable_rows: [u] indices of the usable rows in `index`.
            samples: the training file.
            root: folder that image names are relative to.
            encoder: the model's encoder of conversations.
            limits: limits on the length of a row.
        """
        self._samples, self._image_names, self._root = samples, index.names, root
        self._sample_index = index.sample[usable_rows]
        self._first_pair, self._last_pair = index.first[usable_rows], index.pair[usable_rows]
        self._image_index = index.image[usable_rows]
        self._encoder, self._limits = encoder, limits
        self.lengths = Lengths(
            np.minimum(index.ids[usable_rows], limits.ids),
            np.minimum(index.text[usable_rows], limits.policy_text),
            index.targets[usable_rows],
        )
        self.identity = hashlib.sha256(usable_rows.astype(np.int64).tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._sample_index)

    def rows(self, row_indices: Sequence[int]) -> list[TrainingRow]:
        """Tokenises some rows of the corpus, in the order of `row_indices`."""
        conversations = [
            self._samples.turns(
                int(self._sample_index[row]), int(self._first_pair[row]), int(self._last_pair[row])
            )
            for row in row_indices
        ]
        encoded = self._encoder.encode_all(conversations, num_images=1)
        return [make_row(conversation, self._limits) for conversation in encoded]

    @property
    def file(self) -> Path:
        """The training file."""
        return self._samples.file

    def image(self, row_index: int) -> Path:
        """Returns the path of a row's image."""
        return self._root / self._image_names[self._image_index[row_index]]

    def question(self, row_index: int) -> Question:
        """Returns the last question of a row, without the turns before it.

        The id of the question is "SAMPLE/QUESTION": the index of the sample in the training file,
        and the index of the question in the sample.
        """
        sample_index, pair = int(self._sample_index[row_index]), int(self._last_pair[row_index])
        text = self._samples.turns(sample_index, pair, pair)[0]
        return Question(f"{sample_index}/{pair}", self.image(row_index), text, "")

    def describe(self, row_index: int) -> dict[str, object]:
        """Describes a row for a report on bad training steps.

        Returns:
            "sample": index of the row's sample in the training file. "id": the field "id" of the
            sample. "question": index of the row's question among the questions of the sample.
            "image": name of the image.
        """
        sample_index = int(self._sample_index[row_index])
        return {
            "sample": sample_index,
            "id": self._samples.entries[sample_index].get("id"),
            "question": int(self._last_pair[row_index]),
            "image": self._image_names[self._image_index[row_index]],
        }

    def where(self, row_index: int) -> str:
        """Returns the file and the sample of a row as text, for messages."""
        return self._samples.place(int(self._sample_index[row_index]))
