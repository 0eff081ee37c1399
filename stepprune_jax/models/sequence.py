"""Rows of text and visual tokens between layers, in plain jax.

Rows differ in length; padding is at the right end only and never changes a result.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.config import ModelConfig


class Rows(NamedTuple):
    """Inputs of `decoder.run_layers`: rows of tokens, without what only pruning reads.

    Attributes:
        hidden: [b, s, e] the residual stream.
        position: [b, s] int32 position ids, or [b, p, s] where a token has p of them.
        valid: [b, s] True = token. Must be a prefix of each row when a cache is created or extended
            and for the fused kernels, which apply the causal mask only.
        segment: [b, s] number of a token's segment, for several continuations of one prefix in a
            row. A token sees segment 0 and its own segment. Needs attention "matmul" and no cache.
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


class Kept(NamedTuple):
    """The visual tokens of images that enter the language model, padded to a static size k.

    A pruner returns one row per (image, prompt) pair, and `assembly.assemble` reads one row per
    image of each prompt: the leading axes `*r` are [r] or [b, j]. The valid tokens of a row are a
    prefix of it.

    Attributes:
        index: [*r, k] int32 index of each token among the n tokens of its image; -1 for merged and
            added tokens, and in the padding.
        place: [*r, k] int32 index of the image token whose position ids each token has.
        tokens: [*r, k, w] the tokens, before or after the projector, each with its deep features
            appended; zeros in the padding.
        valid: [*r, k] True = token.
        count: [*r] int32 number of tokens.
        order: [*r, t] int32 indices of the tokens in the order of selection, -1 in the padding;
            None for a method that selects a set.
        note: [*r, k, w] values of each token for cuts between layers; None if no cut reads any.
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
        """Returns the sequence as the input of a layer."""
        valid = jnp.arange(self.hidden.shape[1]) < self.length[:, None]
        return Rows(self.hidden, self.position, valid, deep=self.deep)

    def without_values(self) -> "Sequence":
        """Returns the places of the tokens: image, index, position and length; else None."""
        return self._replace(hidden=None, next_position=None, note=None, grid=None, deep=None)


def split_deep(
    config: ModelConfig, joined: Float[Array, "*b w"]
) -> tuple[Float[Array, "*b d"], Float[Array, "*b D"] | None]:
    """Splits visual tokens from the deep features that are appended to their channels."""
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
    """Moves the kept tokens of each row to the left end of a row of `num_slots`.

    Tokens beyond `num_slots` are dropped, and so is padding. Position ids are unchanged.
    """
    b = keep.shape[0]
    source, is_filled = kept_slots(sequence, keep, num_slots)

    def gather(part: Array, axis: int, padding: int) -> Array:
        shape = [1] * part.ndim
        shape[0], shape[axis] = b, num_slots
        moved = jnp.take_along_axis(part, source.reshape(shape), axis=axis)
        return jnp.where(is_filled.reshape(shape), moved, padding)

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
    """Returns the slot of each kept token, and a mask of the `num_slots` slots that it fills."""
    s = keep.shape[1]
    keep &= jnp.arange(s) < sequence.length[:, None]
    source = jnp.sort(jnp.where(keep, jnp.arange(s), s), axis=1)[:, :num_slots]
    return jnp.minimum(source, s - 1), source < s


def with_probe(sequence: Sequence, probe: Float[Array, "layers e"]) -> Rows:
    """Appends a token to each row, at the next position, that is the sum of a probe's vectors."""
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
    """Returns the slots of the last `count` tokens of each row; a shorter row repeats slot 0."""
    return jnp.maximum(sequence.length[:, None] - count + jnp.arange(count), 0)
