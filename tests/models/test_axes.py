"""A family whose tokens have three position ids and whose images have sizes of their own."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np

from stepprune_jax.models import vlm
from stepprune_jax.models.llava.config import ClipConfig, LlamaConfig, LlavaConfig

S = vlm.IMAGE_TOKEN


# The embedding of a token is its id, twice.
EMBEDDING = jnp.broadcast_to(jnp.arange(10.0)[:, None], (10, 2))
PARAMS = {"language": {"embed": {"embedding": EMBEDDING}}}


def image_positions(config, grid, place):
    """M-RoPE of one frame: (0, row, column), and text continues after the longer side."""
    del config
    columns = grid[..., 1:]
    offset = jnp.stack([jnp.zeros_like(place), place // columns, place % columns], axis=-2)
    return offset, grid.max(-1)


FAMILY = SimpleNamespace(POSITION_AXES=3, image_positions=image_positions)


class Config(LlavaConfig):
    @property
    def family(self) -> Any:
        return FAMILY


CONFIG = Config(ClipConfig(4, 4, 1, 1, 4, 2), LlamaConfig(10, 2, 4, 1, 1, 1, 2))


def rows(positions, visual_index):
    """Row 0: an image of 2 x 3 tokens and one of 4 x 1; row 1: one of 1 x 2 that comes first."""
    grid = jnp.array([[[2, 3], [4, 1]], [[1, 2], [0, 0]]])
    index, valid = visual_index
    tokens = jnp.broadcast_to(
        (100.0 * (1 + jnp.arange(2))[:, None] + index)[..., None], (2, 2, 6, 2)
    )
    visual = vlm.Visual(tokens, valid, index, index, grid)
    ids = jnp.array([[1, 2, S, 3, S, 4], [S, 5, 6, 0, 0, 0]])
    return vlm.assemble(PARAMS, CONFIG, ids, jnp.array([6, 3]), visual, positions)


def whole():
    """All tokens of every image, in order."""
    count = jnp.array([[6, 4], [2, 0]])
    index = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (2, 2, 6))
    return index, index < count[..., None]


def test_images_of_their_own_size_have_the_positions_of_m_rope():
    sequence = rows("original", whole())
    np.testing.assert_array_equal(sequence.length, [14, 4])
    # Text at 0 and 1; rows 2 and 3, columns 2 to 4; text at 5; rows 6 to 9; text at 10.
    np.testing.assert_array_equal(
        sequence.position[0, :, :14],
        [
            [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 6, 6, 10],
            [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10],
            [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 6, 6, 10],
        ],
    )
    np.testing.assert_array_equal(
        sequence.position[1, :, :5], [[0, 0, 2, 3, 0], [0, 0, 2, 3, 0], [0, 1, 2, 3, 0]]
    )
    np.testing.assert_array_equal(sequence.next_position, [11, 4])


def test_pruned_images_keep_the_positions_of_what_is_left():
    index = jnp.zeros((2, 2, 6), jnp.int32).at[0, 0, :2].set(jnp.array([1, 5])).at[0, 1, 0].set(2)
    valid = jnp.arange(6) < jnp.array([[2, 1], [0, 0]])[..., None]
    sequence = rows("original", (index, valid))
    np.testing.assert_array_equal(sequence.hidden[0, :7, 0], [1, 2, 101, 105, 3, 202, 4])
    np.testing.assert_array_equal(
        sequence.position[0, :, :7],
        [[0, 1, 2, 2, 5, 6, 10], [0, 1, 2, 3, 5, 8, 10], [0, 1, 3, 4, 5, 6, 10]],
    )
    # The image that is gone altogether still takes up its two columns.
    np.testing.assert_array_equal(sequence.position[1, :, :2], [[2, 3]] * 3)
    np.testing.assert_array_equal(sequence.next_position, [11, 4])
    compact = rows("compact", (index, valid))
    np.testing.assert_array_equal(compact.position[0, :, :7], [list(range(7))] * 3)
    np.testing.assert_array_equal(compact.next_position, [7, 2])


def test_rows_without_images_have_one_position_on_all_axes():
    sequence = vlm.from_embeddings(CONFIG, jnp.ones((2, 4, 2)), jnp.array([4, 2]))
    expected = [[[0, 1, 2, 3]] * 3, [[0, 1, 0, 0]] * 3]
    np.testing.assert_array_equal(sequence.position, expected)
    np.testing.assert_array_equal(sequence.next_position, [4, 2])
    assert (sequence.image == -1).all() and (sequence.index == -1).all()


def test_a_row_that_is_cut_continues_after_its_largest_position():
    index, valid = whole()
    grid = jnp.array([[[2, 3], [4, 1]], [[1, 2], [0, 0]]])
    visual = vlm.Visual(jnp.ones((2, 2, 6, 2)), valid, index, index, grid)
    ids = jnp.array([[1, 2, S, 3, S, 4], [S, 5, 6, 0, 0, 0]])
    sequence = vlm.assemble(PARAMS, CONFIG, ids, jnp.array([6, 3]), visual, capacity=5)
    # Tokens (2, 2), (2, 3), (2, 4) of the image remain.
    np.testing.assert_array_equal(sequence.length, [5, 4])
    np.testing.assert_array_equal(sequence.next_position, [5, 4])
