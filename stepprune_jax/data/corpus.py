"""A training file as rows, each tokenised on demand."""

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
    """Limits on the length of a row.

    Attributes:
        image_tokens: visual tokens of the largest image.
        context: embeddings of a conversation including its image; the end is truncated.
        policy_text: tokens of the user's words that the policy reads; the end is truncated.
    """

    image_tokens: int
    context: int
    policy_text: int

    @property
    def ids(self) -> int:
        """Ids of a conversation, counting the image as one."""
        return self.context - self.image_tokens + 1


class TrainingRow(NamedTuple):
    """One conversation as numbers; its image is read on demand.

    Attributes:
        ids: ids with `IMAGE_TOKEN` at the image.
        text: ids of the human words.
        place: indices of the ids before the supervised ones, where these are predicted.
        target: the supervised tokens.
    """

    ids: Int[np.ndarray, " l"]
    text: Int[np.ndarray, " t"]
    place: Int[np.ndarray, " k"]
    target: Int[np.ndarray, " k"]


def make_row(encoded: EncodedConversation, limits: LengthLimits) -> TrainingRow:
    """Truncates a conversation with one image, and finds its supervised tokens: the last answer."""
    ids = np.array(encoded.ids[: limits.ids], np.int32)
    labels = np.array(last_answer(encoded.labels)[: limits.ids], np.int32)
    at = np.flatnonzero(labels[1:] != IGNORE) + 1
    text = np.array(encoded.text[: limits.policy_text], np.int32)
    return TrainingRow(ids, text, (at - 1).astype(np.int32), labels[at])


class Lengths(NamedTuple):
    """Token counts of each row after truncation: ids, the user's words, supervised tokens."""

    ids: Int[np.ndarray, " u"]
    text: Int[np.ndarray, " u"]
    targets: Int[np.ndarray, " u"]


class Corpus:
    """Rows of a training file by number. May be used by several threads."""

    def __init__(
        self,
        index: Index,
        used: Int[np.ndarray, " u"],
        samples: Samples,
        root: Path,
        encoder: ConversationEncoder,
        limits: LengthLimits,
    ):
        """Builds a corpus from the index of a file."""
        self._samples, self._names, self._root = samples, index.names, root
        self._sample, self._pair = index.sample[used], index.pair[used]
        self._first = index.first[used]
        self._image = index.image[used]
        self._encoder, self._limits = encoder, limits
        self.lengths = Lengths(
            np.minimum(index.ids[used], limits.ids),
            np.minimum(index.text[used], limits.policy_text),
            index.targets[used],
        )
        self.identity = hashlib.sha256(used.astype(np.int64).tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._sample)

    def rows(self, numbers: Sequence[int]) -> list[TrainingRow]:
        """Tokenises some rows."""
        parts = np.stack([self._sample, self._first, self._pair], axis=1)[list(numbers)]
        turns = [self._samples.turns(*part) for part in parts.tolist()]
        return [make_row(row, self._limits) for row in self._encoder.encode_all(turns, 1)]

    @property
    def file(self) -> Path:
        """The training file."""
        return self._samples.file

    def image(self, number: int) -> Path:
        """Returns the image of a row."""
        return self._root / self._names[self._image[number]]

    def describe(self, number: int) -> dict[str, object]:
        """Describes a row: number and id of its sample, number of its question, image."""
        sample = int(self._sample[number])
        return {
            "sample": sample,
            "id": self._samples.entries[sample].get("id"),
            "question": int(self._pair[number]),
            "image": self._names[self._image[number]],
        }

    def where(self, number: int) -> str:
        """Returns file and sample of a row, for messages."""
        return self._samples.where(int(self._sample[number]))
