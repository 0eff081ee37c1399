"""Grids of noisy symbols, and questions that a few cells of a grid answer.

Each cell is empty or has a shape and a color. A cell is one visual token. The token is the sum of
fixed random vectors for shape, color, row and column, plus noise.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

NUM_SHAPES, NUM_COLORS, MAX_COUNT = 12, 8, 5
WIDTH = 64
NUM_WORDS = 4  # words per question, including padding
# Fraction of the cells that have a symbol, and the standard deviation of the noise of a token,
# relative to the symbol.
FILLED, NOISE = 0.4, 0.5
KINDS = ("place", "compare", "rare", "count", "higher", "majority")
# Cells of the named row that have the color of most of its symbols, and other symbols of that row.
MAJORITY, MINORITY = 4, 2


@dataclasses.dataclass(frozen=True)
class Grid:
    """Size of the grids of a world.

    Attributes:
        side: number of rows and of columns.
    """

    side: int = 12

    @property
    def num_tokens(self) -> int:
        """Number of cells of a grid."""
        return self.side**2

    @property
    def num_word_types(self) -> int:
        """Number of different words: one per kind of question, row, column and shape."""
        return len(KINDS) + 2 * self.side + NUM_SHAPES

    def row_word(self, row: Array) -> Array:
        """Returns the word that names a row."""
        return len(KINDS) + row

    def column_word(self, column: Array) -> Array:
        """Returns the word that names a column."""
        return len(KINDS) + self.side + column

    def shape_word(self, shape: Array) -> Array:
        """Returns the word that names a shape."""
        return len(KINDS) + 2 * self.side + shape


NUM_ANSWERS = NUM_SHAPES + NUM_COLORS + MAX_COUNT + 1


class Questions(NamedTuple):
    """A batch of questions, each about a grid of its own.

    Attributes:
        tokens: [b, n, d] visual tokens, one per cell.
        words: [b, l] words of the question; -1 in the padding.
        answer: [b] index of the answer, below `NUM_ANSWERS`.
        needed: [b, n] True at the cells that decide the answer, or suffice for it.
        filled: [b, n] True at cells with a symbol.
    """

    tokens: Float[Array, "b n d"]
    words: Int[Array, "b l"]
    answer: Int[Array, " b"]
    needed: Bool[Array, "b n"]
    filled: Bool[Array, "b n"]


def _vectors(seed: int, count: int) -> Float[Array, "count d"]:
    return jax.random.normal(jax.random.key(seed), (count, WIDTH)) / WIDTH**0.5


def sample_questions(key: Array, grid: Grid, num_rows: int, kinds: tuple[str, ...]) -> Questions:
    """Samples questions with their grids; each question has a kind out of `kinds`.

    Args:
        key: PRNG key; consumed.
        grid: size of the grids.
        num_rows: b, the number of questions.
        kinds: kinds of questions, see `KINDS`:
            "place" names a cell and asks for its shape.
            "compare" names two cells and asks for the shape with the larger number.
            "rare" names a shape that one cell has, and asks for the color of that cell.
            "count" names a shape and asks how many cells have it, at most `MAX_COUNT`.
            "higher" names two shapes, each of which one cell has, and asks which of them is in the
            higher row.
            "majority" names a row and asks for the color of most of its symbols: `MAJORITY` of
            them have that color, and `MINORITY` have other colors.
    """
    kind_key, row_key, noise_key = jax.random.split(key, 3)
    kind_numbers = jnp.array([KINDS.index(kind) for kind in kinds])
    kind = kind_numbers[jax.random.randint(kind_key, (num_rows,), 0, len(kinds))]
    sample_row = jax.vmap(lambda key, kind: _sample_symbols(key, grid, kind))
    shape, color, filled, words, answer, needed = sample_row(
        jax.random.split(row_key, num_rows), kind
    )
    cell = jnp.arange(grid.num_tokens)
    position = _vectors(2, grid.side)[cell // grid.side] + _vectors(3, grid.side)[cell % grid.side]
    symbol = _vectors(0, NUM_SHAPES)[shape] + _vectors(1, NUM_COLORS)[color]
    noise = jax.random.normal(noise_key, (num_rows, grid.num_tokens, WIDTH)) / WIDTH**0.5
    tokens = jnp.where(filled[..., None], symbol, 0) + position + NOISE * noise
    return Questions(3 + 8 * tokens, words, answer, needed, filled)


def _sample_symbols(key: Array, grid: Grid, kind: Array) -> tuple[Array, ...]:
    """Samples the symbols of one grid, and one question of a kind.

    Returns:
        A tuple (shape, color, filled, words, answer, needed), as in `Questions`.
    """
    n, side = grid.num_tokens, grid.side
    shape_key, color_key, fill_key, name_key, count_key, order_key = jax.random.split(key, 6)
    order = jax.random.permutation(order_key, n)
    named_shape = jax.random.randint(name_key, (), 0, NUM_SHAPES)
    # No cell has the named shape by chance: the cells that have it are placed below.
    other = jax.random.randint(shape_key, (n,), 0, NUM_SHAPES - 1)
    other = other + (other >= named_shape)
    any_shape = jax.random.randint(shape_key, (n,), 0, NUM_SHAPES)
    color = jax.random.randint(color_key, (n,), 0, NUM_COLORS)
    filled = jax.random.uniform(fill_key, (n,)) < FILLED
    first, second = order[0], order[1]
    # Distance from the named shape to a second one, and a cell in another row, for "higher".
    gap = 1 + any_shape[first] % (NUM_SHAPES - 1)
    row_shift = 1 + second // side % (side - 1)
    third = (first // side + row_shift) % side * side + second % side
    count = jax.random.randint(count_key, (), 0, MAX_COUNT + 1)
    rank = jnp.argsort(order)
    one_hot = jax.nn.one_hot(jnp.array([first, second, third]), n, dtype=bool)

    def word_pair(cell):
        return [grid.row_word(cell // side), grid.column_word(cell % side)]

    shape_words = jnp.array([0, 0, 0])

    def row_words(row):
        return jnp.concatenate([grid.row_word(row)[None], shape_words - 1])

    def place():
        words = jnp.array([*word_pair(first), -1, -1])
        return any_shape, color, filled | one_hot[0], words, any_shape[first], one_hot[0]

    def compare():
        words = jnp.array([*word_pair(first), *word_pair(second)])
        needed = one_hot[0] | one_hot[1]
        answer = jnp.maximum(any_shape[first], any_shape[second])
        return any_shape, color, filled | needed, words, answer, needed

    def name_words():
        return jnp.concatenate([grid.shape_word(named_shape)[None], shape_words - 1])

    def rare():
        shape = jnp.where(one_hot[0], named_shape, other)
        answer = NUM_SHAPES + color[first]
        return shape, color, filled | one_hot[0], name_words(), answer, one_hot[0]

    def counting():
        needed = rank < count
        shape = jnp.where(needed, named_shape, other)
        answer = NUM_SHAPES + NUM_COLORS + count
        return shape, color, filled | needed, name_words(), answer, needed

    def higher():
        needed = one_hot[0] | one_hot[2]
        # Distance of each cell's shape from the named shape; no other cell has a named shape.
        distance = jax.random.randint(shape_key, (n,), 1, NUM_SHAPES - 1)
        distance = distance + (distance >= gap)
        distance = jnp.where(one_hot[0], 0, jnp.where(one_hot[2], gap, distance))
        shape, other_shape = (named_shape + distance) % NUM_SHAPES, (named_shape + gap) % NUM_SHAPES
        words = jnp.array([grid.shape_word(named_shape), grid.shape_word(other_shape), -1, -1])
        answer = jnp.where(first // side < third // side, named_shape, other_shape)
        return shape, color, filled | needed, words, answer, needed

    def majority():
        row = first // side
        is_in_row = jnp.arange(n) // side == row
        # Ranks of the cells of the row, in random order; cells of other rows come after them.
        rank_in_row = jnp.argsort(jnp.argsort(jnp.where(is_in_row, rank, n + rank)))
        needed = is_in_row & (rank_in_row < MAJORITY)
        has_symbol = is_in_row & (rank_in_row < MAJORITY + MINORITY)
        majority_color = color[first]
        # Each other symbol of the row has another color.
        other_color = (majority_color + 1 + color % (NUM_COLORS - 1)) % NUM_COLORS
        row_color = jnp.where(needed, majority_color, jnp.where(has_symbol, other_color, color))
        row_filled = jnp.where(is_in_row, has_symbol, filled)
        answer = NUM_SHAPES + majority_color
        return any_shape, row_color, row_filled, row_words(row), answer, needed

    shape, color, filled, words, answer, needed = jax.lax.switch(
        kind, (place, compare, rare, counting, higher, majority)
    )
    # Several kinds of questions name one shape: the last word tells the kinds apart.
    words = jnp.where(
        jnp.arange(NUM_WORDS) == NUM_WORDS - 1, jnp.where(words < 0, kind, words), words
    )
    return shape, color, filled, words, answer.astype(jnp.int32), needed
