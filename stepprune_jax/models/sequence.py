"""Rows of text and visual tokens between layers, in plain jax.

Rows differ in length; padding is at the right end only and never changes a result.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.config import ModelConfig


class Rows(NamedTuple):
    """Rows of tokens as inputs of `decoder.run_layers`, without the fields that only pruning reads.

    Attributes:
        hidden: [b, s, e] the residual stream.
        position: [b, s] int32 position ids, or [b, p, s] for a model with p position ids per token.
        valid: [b, s] True = token. The valid tokens must be a prefix of each row if a cache is
            created or extended. The fused kernels require the same, because they apply only the
            causal mask.
        segment: [b, s] segment number of each token. Segment 0 is a common prefix, and each other
            segment is a continuation of the prefix. A token attends to segment 0 and to its own
            segment. Needs attention "matmul" and no cache.
        probe: [layers, e] vectors added to the last token of each row, one before each layer.
        deep: [b, s, L, e] vectors added to each token, one after each of the first L layers.
    """

    hidden: Float[Array, "b s e"]
    position: Int[Array, "b *p s"]
    valid: Bool[Array, "b s"]
    segment: Int[Array, "b s"] | None = None
    probe: Float[Array, "layers e"] | None = None
    deep: Float[Array, "b s L e"] | None = None


POSITIONS = ("original", "compact")


class Clips(NamedTuple):
    """Temporal patches of images and videos; an image has one. See `models.images.Clip`.

    Attributes:
        frames: [...] int32 number of temporal patches; 0 in the padding.
        interval: [...] float32 number of temporal position ids between two temporal patches.
        is_video: [...] True = video, also with a single temporal patch.
    """

    frames: Int[Array | np.ndarray, "*i"]
    interval: Float[Array | np.ndarray, "*i"]
    is_video: Bool[Array | np.ndarray, "*i"]

    @classmethod
    def of_images(cls, count: int) -> "Clips":
        """Returns the clips of `count` images, on the host."""
        return cls(np.ones(count, np.int32), np.zeros(count, np.float32), np.zeros(count, bool))

    def take(self, rows: Int[np.ndarray, "*k"]) -> "Clips":
        """Returns the clips at the given rows."""
        return Clips(self.frames[rows], self.interval[rows], self.is_video[rows])

    def patch_rows(self, rows: Int[np.ndarray, "k"]) -> Int[np.ndarray, "p"]:
        """Returns the rows of the temporal patches of some clips, if all patches are numbered."""
        frames = np.asarray(self.frames)
        first_rows = np.cumsum(frames) - frames
        return np.concatenate([first_rows[row] + np.arange(int(frames[row])) for row in rows])


class Kept(NamedTuple):
    """The visual tokens of images that enter the language model, padded to a static size k.

    The leading axes `...` are [r] for the (image, prompt) pairs that a pruner returns, and [b, j]
    for the j images of each of b prompts that `assembly.assemble` reads. The valid tokens are a
    prefix of each row.

    Attributes:
        index: [..., k] int32 index of each token among the n tokens of its image; -1 for merged and
            added tokens, and in the padding.
        place: [..., k] int32 index of the image token whose position ids each token has.
        tokens: [..., k, w] the tokens, before or after the projector, each with its deep features
            appended; zeros in the padding.
        valid: [..., k] True = token.
        count: [...] int32 number of tokens.
        order: [..., t] int32 indices of the tokens in the order of selection, -1 in the padding;
            None for a method that selects a set.
        note: [..., k, w] values of each token for cuts between layers; None if no cut reads any.
    """

    index: Int[Array, "*r k"]
    place: Int[Array, "*r k"]
    tokens: Float[Array, "*r k w"]
    valid: Bool[Array, "*r k"]
    count: Int[Array, "*r"]
    order: Int[Array, "*r t"] | None = None
    note: Float[Array, "*r k w"] | None = None


class Sequence(NamedTuple):
    """Rows of text and visual tokens before a layer of the language model.

    `assembly.assemble` creates the rows before the first layer; `compress` creates the rows after a
    cut.

    Attributes:
        hidden: [b, s, e] the residual stream: embeddings before the first layer. Zeros in the
            padding.
        position: [b, p, s] int32 position ids; 0 in the padding.
        length: [b] int32 number of tokens, a prefix of each row.
        next_position: [b] int32 position id of the first generated token.
        image: [b, s] int32 number of a token's image in its row; -1 for text and padding.
        index: [b, s] int32 index of a visual token in its image; -1 for merged tokens, text and
            padding.
        note: [b, s, ...] values of each token for cuts, from `Kept.note` or from an earlier cut;
            None if no cut reads any.
        grid: [b, j, 2] int32 rows and columns of each unpruned image; None without images.
        deep: [b, s, L, e] features that visual tokens add to the residual stream after each of the
            first L layers, zeros at text; None for a model without deep features.
    """

    hidden: Float[Array, "b s e"]
    position: Int[Array, "b p s"]
    length: Int[Array, "b"]
    next_position: Int[Array, "b"]
    image: Int[Array, "b s"]
    index: Int[Array, "b s"]
    note: Array | None = None
    grid: Int[Array, "b j 2"] | None = None
    deep: Float[Array, "b s L e"] | None = None

    @property
    def rows(self) -> Rows:
        """The sequence as input of `decoder.run_layers`."""
        valid = jnp.arange(self.hidden.shape[1]) < self.length[:, None]
        return Rows(self.hidden, self.position, valid, deep=self.deep)

    def without_values(self) -> "Sequence":
        """Returns a copy with only `position`, `length`, `image` and `index`; None elsewhere."""
        return self._replace(hidden=None, next_position=None, note=None, grid=None, deep=None)


def split_deep(
    config: ModelConfig, joined: Float[Array, "*b w"]
) -> tuple[Float[Array, "*b d"], Float[Array, "*b D"] | None]:
    """Splits visual tokens into their channels and the deep features after these channels.

    Deep features are the DeepStack inputs of the first layers of the language model.

    Args:
        config: configuration of the model, with the number of appended channels.
        joined: [..., d + D] visual tokens, each with its D deep features appended.

    Returns:
        The tokens [..., d], and the deep features [..., D]; None for a model without deep features.
    """
    width = config.deepstack_width
    return (joined[..., :-width], joined[..., -width:]) if width else (joined, None)


def from_embeddings(
    config: ModelConfig, hidden: Float[Array, "b s e"], length: Int[Array, "b"]
) -> Sequence:
    """Builds rows of `length` embeddings without visual tokens, at positions 0, 1, 2, ..."""
    b, s = hidden.shape[:2]
    position = jnp.where(jnp.arange(s) < length[:, None], jnp.arange(s, dtype=jnp.int32), 0)
    position = jnp.broadcast_to(position[:, None], (b, config.position_axes, s))
    no_image = jnp.full((b, s), -1, jnp.int32)
    return Sequence(hidden, position, length, length, no_image, no_image)


def compress(sequence: Sequence, keep: Bool[Array, "b s"], num_slots: int) -> Sequence:
    """Packs the kept tokens of each row into rows of `num_slots` slots.

    Position ids do not change. Kept tokens beyond `num_slots` are dropped.

    Args:
        sequence: rows of s slots.
        keep: [b, s] True = token that remains; ignored at padding.
        num_slots: static length of the new rows.

    Returns:
        The rows of the kept tokens, in the same order, with padding at the right end.
    """
    b = keep.shape[0]
    source, is_filled = kept_slots(sequence, keep, num_slots)

    def gather(values: Array, axis: int, padding: int) -> Array:
        # `source` needs the rank of `values`, with axes of size 1 where it is broadcast.
        shape = [1] * values.ndim
        shape[0], shape[axis] = b, num_slots
        kept_values = jnp.take_along_axis(values, source.reshape(shape), axis=axis)
        return jnp.where(is_filled.reshape(shape), kept_values, padding)

    return Sequence(
        hidden=gather(sequence.hidden, 1, 0),
        position=gather(sequence.position, 2, 0),
        length=is_filled.sum(1, dtype=jnp.int32),
        next_position=sequence.next_position,
        image=gather(sequence.image, 1, -1),
        index=gather(sequence.index, 1, -1),
        note=None if sequence.note is None else gather(sequence.note, 1, 0),
        grid=sequence.grid,
        deep=None if sequence.deep is None else gather(sequence.deep, 1, 0),
    )


def kept_slots(
    sequence: Sequence, keep: Bool[Array, "b s"], num_slots: int
) -> tuple[Int[Array, "b t"], Bool[Array, "b t"]]:
    """Finds the kept tokens of each row, from left to right.

    Args:
        sequence: rows of s slots.
        keep: [b, s] True = token that remains; ignored at padding.
        num_slots: static number t of slots after the tokens are packed.

    Returns:
        source: [b, t] slot before packing of the token that fills each slot after packing.
        is_filled: [b, t] False = no token fills the slot; its source is arbitrary.
    """
    s = keep.shape[1]
    keep &= jnp.arange(s) < sequence.length[:, None]
    # Sorting moves the slots of kept tokens to the left, and s, which is no slot, to the right.
    source = jnp.sort(jnp.where(keep, jnp.arange(s), s), axis=1)[:, :num_slots]
    return jnp.minimum(source, s - 1), source < s


def with_probe(sequence: Sequence, probe: Float[Array, "layers e"]) -> Rows:
    """Appends one probe token to each row, at the next position.

    The new token has a hidden state of zeros. The layers add the vectors of the probe to it.

    Args:
        sequence: rows of s slots.
        probe: [layers, e] vector that is added to the token before each layer.

    Returns:
        Rows of s + 1 slots for `decoder.run_layers`.
    """
    slots = jnp.arange(sequence.hidden.shape[1] + 1)
    is_probe = slots == sequence.length[:, None]
    hidden = jnp.pad(sequence.hidden, ((0, 0), (0, 1), (0, 0)))
    position = jnp.pad(sequence.position, ((0, 0), (0, 0), (0, 1)))
    next_position = sequence.next_position[:, None, None]
    deep = sequence.deep
    return Rows(
        jnp.where(is_probe[..., None], 0, hidden),
        jnp.where(is_probe[:, None], next_position, position),
        slots <= sequence.length[:, None],
        probe=probe,
        deep=None if deep is None else jnp.pad(deep, ((0, 0), (0, 1), (0, 0), (0, 0))),
    )


def renumber(sequence: Sequence) -> Sequence:
    """Replaces the position ids of each row by 0, 1, 2, ..."""
    slots = jnp.arange(sequence.position.shape[2], dtype=jnp.int32)
    position = jnp.where(slots < sequence.length[:, None], slots, 0)[:, None]
    position = jnp.broadcast_to(position, sequence.position.shape)
    return sequence._replace(position=position, next_position=sequence.length)


def last_slots(sequence: Sequence, count: int) -> Int[Array, "b q"]:
    """Returns the slots of the last `count` tokens of each row; shorter rows repeat slot 0."""
    return jnp.maximum(sequence.length[:, None] - count + jnp.arange(count), 0)
