"""A training file as rows to train on, each tokenised when it is asked for."""

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from stepprune_jax.data.encoding import IGNORE, ConversationEncoder, Encoded, last_answer
from stepprune_jax.data.index import Index, row_turns
from stepprune_jax.data.json_array import JsonEntries

# A fast tokenizer must not be asked by two threads at once.
_TOKENIZER = threading.Lock()


class Limits(NamedTuple):
    """How long a row may be.

    Attributes:
        image_tokens: visual tokens of the largest image.
        context: embeddings of a conversation with those of its image; the end is cut off.
        policy_text: tokens of the user's words that the policy sees; the end is cut off.
    """

    image_tokens: int
    context: int
    policy_text: int

    @property
    def ids(self) -> int:
        """Ids of a conversation, of which the image is one."""
        return self.context - self.image_tokens + 1


class Row(NamedTuple):
    """One conversation as numbers; its image is read when it is needed.

    Attributes:
        ids: with `IMAGE_TOKEN` at the image.
        text: ids of the human words.
        place: indices of the ids before the supervised ones, at which these are predicted.
        target: the supervised tokens.
    """

    ids: Int[np.ndarray, " l"]
    text: Int[np.ndarray, " t"]
    place: Int[np.ndarray, " k"]
    target: Int[np.ndarray, " k"]


def make_row(encoded: Encoded, limits: Limits) -> Row:
    """Cuts a conversation with one image, and finds what is supervised in it: the last answer.

    Args:
        encoded: the conversation.
        limits: what it is cut to.

    Returns:
        The row; without targets if the answer begins beyond the limit.
    """
    ids = np.array(encoded.ids[: limits.ids], np.int32)
    labels = np.array(last_answer(encoded.labels)[: limits.ids], np.int32)
    at = np.flatnonzero(labels[1:] != IGNORE) + 1
    text = np.array(encoded.text[: limits.policy_text], np.int32)
    return Row(ids, text, (at - 1).astype(np.int32), labels[at])


class Lengths(NamedTuple):
    """Tokens of each row, as it is trained on: ids, the user's words, supervised ones."""

    ids: Int[np.ndarray, " u"]
    text: Int[np.ndarray, " u"]
    targets: Int[np.ndarray, " u"]


class Corpus:
    """Rows of a training file by number. May be used by threads and sent to another process."""

    def __init__(
        self,
        index: Index,
        used: Int[np.ndarray, " u"],
        file: Path,
        root: Path,
        encoder: ConversationEncoder,
        limits: Limits,
    ):
        """Takes what was read from the file.

        Args:
            index: of the file.
            used: numbers of its rows that are trained on; the corpus counts these from 0.
            file: the training file.
            root: the image folder.
            encoder: the model's.
            limits: what rows are cut to.
        """
        self._entries = JsonEntries(file, index.start, index.end)
        self._names, self._root = index.names, root
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

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """Rows, tokenised now.

        Args:
            numbers: which.

        Returns:
            The rows in that order.

        Raises:
            ValueError: the training file is not what it was.
        """
        parts = np.stack([self._sample, self._first, self._pair], axis=1)[list(numbers)]
        turns = [row_turns(self._entries, *part) for part in parts.tolist()]
        with _TOKENIZER:
            encoded = self._encoder.encode_all(turns, 1)
        return [make_row(row, self._limits) for row in encoded]

    @property
    def file(self) -> Path:
        """The training file."""
        return self._entries.file

    def image(self, number: int) -> Path:
        """The image of a row."""
        return self._root / self._names[self._image[number]]

    def describe(self, number: int) -> dict[str, Any]:
        """A row as its file has it: number and id of its sample, number of its question, image."""
        sample = int(self._sample[number])
        return {
            "sample": sample,
            "id": self._entries[sample].get("id"),
            "question": int(self._pair[number]),
            "image": self._names[self._image[number]],
        }

    def where(self, number: int) -> str:
        """File and sample of a row, for messages."""
        return f"{self.file}: sample {self._sample[number]}"
