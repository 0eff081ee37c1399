"""Conversations about one image, packed after a single copy of it."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from experiments.pretrain.conversations import Sample
from stepprune_jax.data.encoding import ConversationEncoder, EncodedConversation
from stepprune_jax.data.prompts import IMAGE_TOKEN, pad_batch


class Packed(NamedTuple):
    """The text after the image, for all samples: several exchanges side by side.

    Every exchange is a separate prompt to the model: its tokens see the image, the prefix, and each
    other; positions restart after the image.

    Attributes:
        prefix: ids before the image, the same everywhere.
        ids: ids after it; 0 in the padding.
        segment: number of the exchange from 1; -1 in the padding.
        offset: place within the exchange from 0.
        target: slot, in `ids`, of each supervised token's predecessor; 0 where `label` is padding.
        label: the supervised tokens; -1 in the padding.
    """

    prefix: Int[np.ndarray, "p"]
    ids: Int[np.ndarray, "i l"]
    segment: Int[np.ndarray, "i l"]
    offset: Int[np.ndarray, "i l"]
    target: Int[np.ndarray, "i a"]
    label: Int[np.ndarray, "i a"]


class _Row(NamedTuple):
    ids: list[int]
    segment: list[int]
    offset: list[int]
    target: list[int]
    label: list[int]


def _pack_row(
    encode: Callable[[tuple[str, str]], EncodedConversation], sample: Sample, token_limit: int
) -> tuple[list[int], _Row]:
    """Returns prefix and packed exchanges of a sample, as many as fit into `token_limit` tokens."""
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
        for place, label in enumerate(labels):
            if label >= 0:
                row.target.append(start + place - 1)
                row.label.append(label)
    return prefix, row


def pack(encoder: ConversationEncoder, samples: Sequence[Sample], token_limit: int = 512) -> Packed:
    """Packs the exchanges of each sample after its image."""
    # The same question with the same answer occurs for many images.
    encode = functools.cache(lambda turns: encoder.encode(turns, 1))
    rows, prefix = [], []
    for sample in samples:
        prefix, row = _pack_row(encode, sample, token_limit)
        rows.append(row)
    fills = _Row(ids=0, segment=-1, offset=0, target=0, label=-1)
    columns = zip(*rows, strict=True)
    padded = (pad_batch(*column, multiple=8)[0] for column in zip(columns, fills, strict=True))
    return Packed(np.asarray(prefix, np.int32), *padded)
