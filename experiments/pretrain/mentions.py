"""Mentions of questions, read out inside the language model.

"Is the red circle left of the blue cross?" requires three skills at once: finding two places, and
comparing them, and the answer's single bit teaches nothing until all three work. With the place and
the number of mentioned things as labels, linear heads on the hidden state of the mention's last
word teach finding separately. The heads are discarded afterwards.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from experiments.pretrain.array_files import INTEGERS, NUMBERS, TEXT, read_arrays
from experiments.pretrain.packing import Packed
from experiments.pretrain.tower import linear_head
from stepprune_jax.user_input import UserError, require

MENTIONS_FILE = "train_mentions.npz"
_FIELDS = {"sample": 1, "exchange": 1, "word": 1, "number": 1, "value": 2}
_KINDS = {"word": TEXT, **dict.fromkeys(("sample", "exchange", "number"), INTEGERS)}


class Mentions(NamedTuple):
    """Labels of the file `train_mentions.npz`, in the order of the conversations.

    Attributes:
        sample: index of the conversation.
        exchange: number of the question in it, from 0.
        word: last word of the mention.
        number: number of things it refers to.
        value: their places, or other numbers; NaN where undefined.
    """

    sample: Int[np.ndarray, "m"]
    exchange: Int[np.ndarray, "m"]
    word: np.ndarray
    number: Int[np.ndarray, "m"]
    value: Float[np.ndarray, "m c"]


class PlacedMentions(NamedTuple):
    """Mentions of each sample, at their places in `Packed`.

    Attributes:
        slot: place in `Packed.ids` of the mention's last word.
        number: number of things it refers to; -1 in the padding.
        value: standardised values; NaN where there is none.
    """

    slot: Int[np.ndarray, "i t"]
    number: Int[np.ndarray, "i t"]
    value: Float[np.ndarray, "i t c"]


def read_mentions(path: Path, samples: int) -> Mentions | None:
    """Reads and checks the labels; None if there is no such file."""
    if not path.is_file():
        return None
    arrays = read_arrays(path, lambda name: _KINDS.get(name, NUMBERS))
    axes = {name: array.ndim for name, array in arrays.items()}
    is_valid = axes == _FIELDS and len({*map(len, arrays.values())}) == 1
    expected = f"expected {', '.join(_FIELDS)} with a row for each mention"
    require(is_valid, f"{path}: {expected}, got {axes}")
    mentions = Mentions(**arrays)
    order = np.lexsort((mentions.exchange, mentions.sample))
    in_range = ((mentions.sample >= 0) & (mentions.sample < samples)).all()
    is_valid = bool(in_range and (np.diff(order) >= 0).all() and (mentions.number >= 0).all())
    expected = f"expected rows by sample, 0 to {samples - 1}, and exchange, with numbers from 0"
    require(is_valid, f"{path}: {expected}")
    return mentions


def place_mentions(tokenizer: Any, packed: Packed, mentions: Mentions) -> PlacedMentions:
    """Finds the words of the mentions among the packed tokens."""
    rows: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in packed.ids]
    tokens = {w: tokenizer.convert_tokens_to_ids(str(w)) for w in np.unique(mentions.word)}
    values = mentions.value.astype(np.float32)
    spread = np.nanstd(values, axis=0) if len(values) else 1.0
    values = (values - np.nanmean(values, axis=0)) / spread if len(values) else values
    before = (-1, -1, -1)
    for sample, exchange, word, number, value in zip(*mentions[:4], values, strict=True):
        after = before[2] if before[:2] == (sample, exchange) else -1
        inside = packed.segment[sample] == exchange + 1
        if not inside.any():
            continue
        match = np.flatnonzero(inside & (packed.ids[sample] == tokens[word]))
        match = match[match > after]
        if not match.size:
            raise UserError(
                f"sample {sample}: {str(word)!r} is not in question {exchange}, or not after the "
                "mention before it"
            )
        before = (sample, exchange, int(match[0]))
        rows[sample].append((before[2], int(number), value))
    width = max(1, *map(len, rows)) if len(rows) > 1 else max(1, len(rows[0]))
    positions = PlacedMentions(
        np.zeros((len(rows), width), np.int32),
        np.full((len(rows), width), -1, np.int32),
        np.full((len(rows), width, values.shape[1]), np.nan, np.float32),
    )
    for number, row in enumerate(rows):
        for place, entry in enumerate(row):
            for array, item in zip(positions, entry, strict=True):
                array[number, place] = item
    return positions


def init_mention_heads(mentions: PlacedMentions, width: int) -> dict[str, Array]:
    """Returns zero heads for the number, as classes, and for the values."""
    return {
        "number": jnp.zeros((width + 1, int(mentions.number.max()) + 1)),
        "value": jnp.zeros((width + 1, mentions.value.shape[-1])),
    }


def mention_loss(
    heads: dict[str, Array], hidden: Float[Array, "i t e"], mentions: PlacedMentions
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Computes the cross-entropy of the numbers plus the squared error of the values.

    It is summed over the values of a mention and divided by three, the numbers of a place, so that
    further values take nothing from it.
    """
    is_mention = mentions.number >= 0
    label = jnp.where(is_mention, mentions.number, 0)
    logits = linear_head(heads["number"], hidden)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    count = jnp.maximum(jnp.sum(is_mention), 1)
    accuracy = jnp.sum((jnp.argmax(logits, -1) == label) & is_mention) / count
    has_value = jnp.isfinite(mentions.value)
    value = linear_head(heads["value"], hidden)
    error = jnp.where(has_value, value - jnp.where(has_value, mentions.value, 0), 0)
    square = jnp.sum(error**2) / jnp.maximum(jnp.sum(has_value), 1)
    total = jnp.sum(jnp.where(is_mention, losses, 0)) / count + square * has_value.shape[-1] / 3
    return total, {"mention_number": accuracy, "mention_error": jnp.sqrt(square)}
