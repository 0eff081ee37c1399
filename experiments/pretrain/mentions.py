"""Teaches the language model to find the shapes that a question mentions.

"Is the red circle left of the blue cross?" requires three skills: finding two places, and comparing
them. The answer teaches nothing until the model has all three skills. Linear heads on the hidden
state of a mention's last word therefore predict place and number of the mentioned shapes. The heads
are discarded after training.
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
from stepprune_jax.user_input import UserError

MENTIONS_FILE = "train_mentions.npz"
_FIELDS = {"sample": 1, "exchange": 1, "word": 1, "number": 1, "value": 2}
_KINDS = {"word": TEXT, **dict.fromkeys(("sample", "exchange", "number"), INTEGERS)}


class Mentions(NamedTuple):
    """Labels of the file `train_mentions.npz`, in the order of the conversations.

    Attributes:
        sample: [m] index of the conversation.
        exchange: [m] number of the question in its conversation, from 0.
        word: [m] last word of the mention.
        number: [m] number of mentioned shapes.
        value: [m, c] place of a single shape, or other numbers; NaN where undefined.
    """

    sample: Int[np.ndarray, "m"]
    exchange: Int[np.ndarray, "m"]
    word: np.ndarray
    number: Int[np.ndarray, "m"]
    value: Float[np.ndarray, "m c"]


class PlacedMentions(NamedTuple):
    """Mentions of each sample, with the positions of their words in `Packed`.

    Attributes:
        slot: [i, t] position in `Packed.ids` of the mention's last word.
        number: [i, t] number of mentioned shapes; -1 for padding.
        value: [i, t, c] standardized values; NaN where undefined.
    """

    slot: Int[np.ndarray, "i t"]
    number: Int[np.ndarray, "i t"]
    value: Float[np.ndarray, "i t c"]


def read_mentions(path: Path, samples: int) -> Mentions | None:
    """Reads and checks the labels; returns None without a file."""
    if not path.is_file():
        return None
    arrays = read_arrays(path, lambda name: _KINDS.get(name, NUMBERS))
    axes = {name: array.ndim for name, array in arrays.items()}
    is_valid = axes == _FIELDS and len({*map(len, arrays.values())}) == 1
    expected = f"expected {', '.join(_FIELDS)} with a row for each mention"
    if not is_valid:
        raise UserError(f"{path}: {expected}, got {axes}")
    mentions = Mentions(**arrays)
    order = np.lexsort((mentions.exchange, mentions.sample))
    in_range = ((mentions.sample >= 0) & (mentions.sample < samples)).all()
    is_valid = bool(in_range and (np.diff(order) >= 0).all() and (mentions.number >= 0).all())
    expected = f"expected rows by sample, 0 to {samples - 1}, and exchange, with numbers from 0"
    if not is_valid:
        raise UserError(f"{path}: {expected}")
    return mentions


def place_mentions(tokenizer: Any, packed: Packed, mentions: Mentions) -> PlacedMentions:
    """Finds the words of the mentions in the packed tokens.

    Raises:
        UserError: a word is not in its question, or not after the word of the previous mention.
    """
    rows: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in packed.ids]
    words = np.unique(mentions.word)
    tokens = {word: tokenizer.convert_tokens_to_ids(str(word)) for word in words}
    values = mentions.value.astype(np.float32)
    if len(values):
        values = (values - np.nanmean(values, axis=0)) / np.nanstd(values, axis=0)
    previous = (-1, -1, -1)  # Sample, exchange and slot of the previous mention.
    for sample, exchange, word, number, value in zip(*mentions[:4], values, strict=True):
        min_slot = previous[2] + 1 if previous[:2] == (sample, exchange) else 0
        is_inside = packed.segment[sample] == exchange + 1
        if not is_inside.any():  # The question was truncated.
            continue
        match = np.flatnonzero(is_inside & (packed.ids[sample] == tokens[word]))
        match = match[match >= min_slot]
        if not match.size:
            raise UserError(
                f"sample {sample}: {str(word)!r} is not in question {exchange}, or not after the "
                "previous mention"
            )
        previous = (sample, exchange, int(match[0]))
        rows[sample].append((previous[2], int(number), value))
    width = max(1, *map(len, rows)) if len(rows) > 1 else max(1, len(rows[0]))
    positions = PlacedMentions(
        np.zeros((len(rows), width), np.int32),
        np.full((len(rows), width), -1, np.int32),
        np.full((len(rows), width, values.shape[1]), np.nan, np.float32),
    )
    for index, row in enumerate(rows):
        for column, entry in enumerate(row):
            for array, item in zip(positions, entry, strict=True):
                array[index, column] = item
    return positions


def init_mention_heads(mentions: PlacedMentions, width: int) -> dict[str, Array]:
    """Returns zero heads for the number of shapes, as classes, and for the values."""
    return {
        "number": jnp.zeros((width + 1, int(mentions.number.max()) + 1)),
        "value": jnp.zeros((width + 1, mentions.value.shape[-1])),
    }


def mention_loss(
    heads: dict[str, Array], hidden: Float[Array, "i t e"], mentions: PlacedMentions
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Computes the cross-entropy of the numbers plus the mean squared error of the values.

    The squared error is multiplied by c / 3, so that additional values do not reduce the weight of
    the three values of a place.

    Args:
        heads: result of `init_mention_heads`.
        hidden: [i, t, e] hidden states of the mentions' last words.
        mentions: the labels.

    Returns:
        The loss, and scalars for the log.
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
