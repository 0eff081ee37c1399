"""Rows of text and visual tokens between layers, in plain jax.

Rows differ in length; padding is at the right end only and never changes a result.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from stepprune_jax.models.config import ModelConfig


class Rows(NamedTuple):
    """Rows of tokens that enter a stage of layers.

    Attributes:
        hidden: [b, s, e] the residual stream.
        position: [b, s] int32 position ids, or [b, p, s] where a token has p of them.
        valid: [b, s] True = token. Must be a prefix of each row when a cache is created or extended
            and for the fused kernels, which apply the causal mask only.
        segment: [b, s] packs several continuations of one prefix into a row: tokens see segment 0
            and their own. Needs attention "matmul" and no cache.
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


class Sequence(NamedTuple):
    """Rows of text and visual tokens before some layer of the language model.

    Attributes:
        hidden: [b, s, e] the residual stream: embeddings before the first layer. Zeros in the
            padding.
        position: [b, p, s] int32 position ids; 0 in the padding.
        length: [b] int32 number of tokens, a prefix of each row.
        next_position: [b] int32 position id of the first generated token.
        image: [b, s] int32 number of a token's image in its row; -1 for text and padding.
        index: [b, s] int32 index of a visual token in its image; -1 for merged ones, text and
            padding.
        note: [b, s, ...] per-token values for cuts, which visual tokens bring along or an earlier
            cut records; None if there are none.
        grid: [b, j, 2] int32 rows and columns of each unpruned image; None without images.
        deep: [b, s, L, e] features that visual tokens add to the residual stream after each of the
            first L layers, zeros at others; None for a model without them.
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


def split_deep(
    config: ModelConfig, whole: Float[Array, "*b w"]
) -> tuple[Float[Array, "*b d"], Float[Array, "*b D"] | None]:
    """Splits tokens from the deep features behind them, before or after the projector."""
    width = config.deepstack_width
    return (whole[..., :-width], whole[..., -width:]) if width else (whole, None)


def from_embeddings(
    config: ModelConfig, hidden: Float[Array, "b s e"], length: Int[Array, "b"]
) -> Sequence:
    """Builds rows of `length` embeddings without visual tokens, at positions 0, 1, 2, ..."""
    b, s = hidden.shape[:2]
    position = jnp.where(jnp.arange(s) < length[:, None], jnp.arange(s, dtype=jnp.int32), 0)
    position = jnp.broadcast_to(position[:, None], (b, config.position_axes, s))
    none = jnp.full((b, s), -1, jnp.int32)
    return Sequence(hidden, position, length, length, none, none)


def compress(sequence: Sequence, keep: Bool[Array, "b s"], slots: int) -> Sequence:
    """Moves the kept tokens of each row to its left end, in rows of `slots`; longer ones are cut.

    Position ids are unchanged. Padding is never kept.
    """
    b = keep.shape[0]
    source, filled = remaining(sequence, keep, slots)

    def taken(part: Array, axis: int, padding: int) -> Array:
        shape = [1] * part.ndim
        shape[0], shape[axis] = b, slots
        moved = jnp.take_along_axis(part, source.reshape(shape), axis=axis)
        return jnp.where(filled.reshape(shape), moved, padding)

    return Sequence(
        taken(sequence.hidden, 1, 0),
        taken(sequence.position, 2, 0),
        filled.sum(1, dtype=jnp.int32),
        sequence.next_position,
        taken(sequence.image, 1, -1),
        taken(sequence.index, 1, -1),
        None if sequence.note is None else taken(sequence.note, 1, 0),
        sequence.grid,
        None if sequence.deep is None else taken(sequence.deep, 1, 0),
    )


def remaining(
    sequence: Sequence, keep: Bool[Array, "b s"], slots: int
) -> tuple[Int[Array, "b t"], Bool[Array, "b t"]]:
    """Returns the slots of each row's kept tokens, and which of the first `slots` they fill."""
    s = keep.shape[1]
    keep &= jnp.arange(s) < sequence.length[:, None]
    source = jnp.sort(jnp.where(keep, jnp.arange(s), s), axis=1)[:, :slots]
    return jnp.minimum(source, s - 1), source < s


def with_probe(sequence: Sequence, probe: Float[Array, "layers e"]) -> Rows:
    """Appends a token to each row, at the next position, that is the sum of a probe's vectors."""
    slots = jnp.arange(sequence.hidden.shape[1] + 1)
    last = slots == sequence.length[:, None]
    padded = [((0, 0), (0, 1), (0, 0)), ((0, 0), (0, 0), (0, 1))]
    hidden, position = map(jnp.pad, (sequence.hidden, sequence.position), padded)
    following = sequence.next_position[:, None, None]
    deep = sequence.deep
    return Rows(
        jnp.where(last[..., None], 0, hidden),
        jnp.where(last[:, None], following, position),
        slots <= sequence.length[:, None],
        probe=probe,
        deep=None if deep is None else jnp.pad(deep, ((0, 0), (0, 1), (0, 0), (0, 0))),
    )


def renumber(sequence: Sequence) -> Sequence:
    """Gives the tokens of each row the position ids 0, 1, 2, ..., and the next token the next."""
    slots = jnp.arange(sequence.position.shape[2], dtype=jnp.int32)
    position = jnp.where(slots < sequence.length[:, None], slots, 0)[:, None]
    position = jnp.broadcast_to(position, sequence.position.shape)
    return sequence._replace(position=position, next_position=sequence.length)


def last_slots(sequence: Sequence, count: int) -> Int[Array, "b q"]:
    """Returns slots of the last `count` tokens of each row; 0 in front of a shorter row's."""
    return jnp.maximum(sequence.length[:, None] - count + jnp.arange(count), 0)
