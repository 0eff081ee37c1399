"""Packs all questions about an image into one row with a single copy of the image."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from experiments.pretrain.conversations import Sample
from stepprune_jax.data.encoding import ConversationEncoder, EncodedConversation
from stepprune_jax.data.prompts import IMAGE_TOKEN, pad_batch


class Packed(NamedTuple):
    """The texts of all samples, with several exchanges in each row.

    An exchange is a question and its answer. The model sees each exchange as a separate prompt: its
    tokens attend to the prefix, the image and the exchange, and positions restart after the image.

    Attributes:
        prefix: [p] ids before the image, which all samples share.
        ids: [i, l] ids after the image; 0 for padding.
        segment: [i, l] number of the exchange, from 1; -1 for padding.
        offset: [i, l] position within the exchange, from 0.
        target: [i, a] position in `ids` of the predecessor of each supervised token.
        label: [i, a] the supervised tokens; -1 for padding.
    """

    prefix: Int[np.ndarray, "p"]
    ids: Int[np.ndarray, "i l"]
    segment: Int[np.ndarray, "i l"]
    offset: Int[np.ndarray, "i l"]
    target: Int[np.ndarray, "i a"]
    label: Int[np.ndarray, "i a"]


class _Row(NamedTuple):
    """The columns of `Packed` for one sample."""

    ids: list[int]
    segment: list[int]
    offset: list[int]
    target: list[int]
    label: list[int]


def _pack_row(
    encode: Callable[[tuple[str, str]], EncodedConversation], sample: Sample, token_limit: int
) -> tuple[list[int], _Row]:
    """Returns the prefix, and the first exchanges of a sample within `token_limit` tokens."""
    row, prefix = _Row([], [], [], [], []), []
    for number in range(0, len(sample.turns), 2):
        encoded = encode(sample.turns[number : number + 2])
        image_index = encoded.ids.index(IMAGE_TOKEN)
        prefix, ids, labels = (
            encoded.ids[:image_index],
            encoded.ids[image_index + 1 :],
            encoded.labels[image_index + 1 :],
        )
        start = len(row.ids)
        if start and start + len(ids) > token_limit:
            break
        row.ids.extend(ids)
        row.segment.extend([number // 2 + 1] * len(ids))
        row.offset.extend(range(len(ids)))
        for position, label in enumerate(labels):
            if label >= 0:
                row.target.append(start + position - 1)
                row.label.append(label)
    return prefix, row


def pack(encoder: ConversationEncoder, samples: Sequence[Sample], token_limit: int = 512) -> Packed:
    """Packs the exchanges of each sample, up to `token_limit` tokens."""
    # Many images have the same question with the same answer.
    encode = functools.cache(lambda turns: encoder.encode(turns, 1))
    rows, prefix = [], []
    for sample in samples:
        prefix, row = _pack_row(encode, sample, token_limit)
        rows.append(row)
    padding = _Row(ids=0, segment=-1, offset=0, target=0, label=-1)
    columns = zip(*rows, strict=True)
    padded = (pad_batch(*column, multiple=8)[0] for column in zip(columns, padding, strict=True))
    return Packed(np.asarray(prefix, np.int32), *padded)
