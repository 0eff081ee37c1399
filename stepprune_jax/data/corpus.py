"""Gives access to the rows of a training file, and tokenises each row on demand."""

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


class LengthLimits(NamedTuple):
    """Limits on the length of a row. What exceeds a limit is cut off at the end.

    Attributes:
        image_tokens: visual tokens of the largest image.
        context: embeddings of a conversation, including visual tokens.
        policy_text: tokens of the user's text that the policy reads.
    """

    image_tokens: int
    context: int
    policy_text: int

    @property
    def ids(self) -> int:
        """Ids of a conversation, with one id for the image."""
        return self.context - self.image_tokens + 1


class TrainingRow(NamedTuple):
    """Token ids of one training example, without its image.

    Attributes:
        ids: [l] ids with `IMAGE_TOKEN` at the image.
        text: [t] ids of the user's text.
        place: [k] indices into `ids` of the positions that predict the supervised tokens.
        target: [k] the supervised tokens.
    """

    ids: Int[np.ndarray, " l"]
    text: Int[np.ndarray, " t"]
    place: Int[np.ndarray, " k"]
    target: Int[np.ndarray, " k"]


def make_row(encoded: EncodedConversation, limits: LengthLimits) -> TrainingRow:
    """Truncates a conversation with one image. The tokens of its last answer are supervised."""
    ids = np.array(encoded.ids[: limits.ids], np.int32)
    labels = np.array(last_answer(encoded.labels)[: limits.ids], np.int32)
    target_index = np.flatnonzero(labels[1:] != IGNORE) + 1
    text = np.array(encoded.text[: limits.policy_text], np.int32)
    return TrainingRow(ids, text, (target_index - 1).astype(np.int32), labels[target_index])


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
    """The usable rows of a training file by number. Threads may share a corpus.

    Attributes:
        lengths: token counts of the rows.
        identity: hash of the numbers of the usable rows.
    """

    def __init__(
        self,
        index: Index,
        usable: Int[np.ndarray, " u"],
        *,
        samples: Samples,
        root: Path,
        encoder: ConversationEncoder,
        limits: LengthLimits,
    ):
        """Builds a corpus from an index.

        Args:
            index: index of the training file, with token counts.
            usable: [u] numbers of the rows in the index that are used.
            samples: the training file.
            root: folder that image names are relative to.
            encoder: the model's encoder of conversations.
            limits: limits on the length of a row.
        """
        self._samples, self._names, self._root = samples, index.names, root
        self._sample, self._pair = index.sample[usable], index.pair[usable]
        self._first = index.first[usable]
        self._image = index.image[usable]
        self._encoder, self._limits = encoder, limits
        self.lengths = Lengths(
            np.minimum(index.ids[usable], limits.ids),
            np.minimum(index.text[usable], limits.policy_text),
            index.targets[usable],
        )
        self.identity = hashlib.sha256(usable.astype(np.int64).tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._sample)

    def rows(self, numbers: Sequence[int]) -> list[TrainingRow]:
        """Tokenises the rows with these numbers."""
        keys = np.stack([self._sample, self._first, self._pair], axis=1)[list(numbers)]
        turns = [self._samples.turns(*key) for key in keys.tolist()]
        return [make_row(row, self._limits) for row in self._encoder.encode_all(turns, 1)]

    @property
    def file(self) -> Path:
        """The training file."""
        return self._samples.file

    def image(self, number: int) -> Path:
        """Returns the path of a row's image."""
        return self._root / self._names[self._image[number]]

    def describe(self, number: int) -> dict[str, object]:
        """Describes a row for a report.

        Returns:
            The fields "sample" and "id" of the sample, the number of the "question", and the name
            of the "image".
        """
        sample = int(self._sample[number])
        return {
            "sample": sample,
            "id": self._samples.entries[sample].get("id"),
            "question": int(self._pair[number]),
            "image": self._names[self._image[number]],
        }

    def where(self, number: int) -> str:
        """Returns file and sample of a row, for messages."""
        return self._samples.place(int(self._sample[number]))
