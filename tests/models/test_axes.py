"""Tokens with three position ids, in images that have sizes of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from stepprune_jax.models import vlm
from stepprune_jax.models.config import LlamaConfig
from stepprune_jax.models.qwen2_5_vl import QwenConfig
from stepprune_jax.models.qwen2_5_vl.config import QwenVisionConfig

S = vlm.IMAGE_TOKEN
CONFIG = QwenConfig(
    QwenVisionConfig(4, 4, 1, 1, full_blocks=(), out_size=2),
    LlamaConfig(10, 2, 4, 1, 1, 1, 6, rope_sections=(1, 1, 1)),
)
# The embedding of a token is its id, twice.
EMBEDDING = jnp.broadcast_to(jnp.arange(10.0)[:, None], (10, 2))
PARAMS = {"language": {"embed": {"embedding": EMBEDDING}}}


@functools.partial(jax.jit, static_argnums=(0, 3))
def rows(positions, index, valid, capacity=None):
    """Row 0: an image of 2 x 3 tokens and one of 4 x 1; row 1: one of 1 x 2 that comes first."""
    grid = jnp.array([[[2, 3], [4, 1]], [[1, 2], [0, 0]]])
    tokens = (100.0 * (1 + jnp.arange(2))[:, None] + index)[..., None]
    tokens = jnp.broadcast_to(tokens, (2, 2, 6, 2))
    visual = vlm.Visual(tokens, valid, index, index, grid)
    ids = jnp.array([[1, 2, S, 3, S, 4], [S, 5, 6, 0, 0, 0]])
    return vlm.assemble(PARAMS, CONFIG, ids, jnp.array([6, 3]), visual, positions, capacity)


def whole():
    """All tokens of every image, in order."""
    count = jnp.array([[6, 4], [2, 0]])
    index = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (2, 2, 6))
    return index, index < count[..., None]


def test_images_of_their_own_size_have_the_positions_of_m_rope():
    sequence = rows("original", *whole())
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
    # Cut after the tokens (2, 2), (2, 3) and (2, 4) of the image, a row continues after them.
    np.testing.assert_array_equal(rows("original", *whole(), 5).next_position, [5, 4])


def test_pruned_images_keep_the_positions_of_what_is_left():
    index = jnp.zeros((2, 2, 6), jnp.int32).at[0, 0, :2].set(jnp.array([1, 5])).at[0, 1, 0].set(2)
    valid = jnp.arange(6) < jnp.array([[2, 1], [0, 0]])[..., None]
    sequence = rows("original", index, valid)
    np.testing.assert_array_equal(sequence.hidden[0, :7, 0], [1, 2, 101, 105, 3, 202, 4])
    np.testing.assert_array_equal(
        sequence.position[0, :, :7],
        [[0, 1, 2, 2, 5, 6, 10], [0, 1, 2, 3, 5, 8, 10], [0, 1, 3, 4, 5, 6, 10]],
    )
    # The image that is gone altogether still takes up its two columns.
    np.testing.assert_array_equal(sequence.position[1, :, :2], [[2, 3]] * 3)
    np.testing.assert_array_equal(sequence.next_position, [11, 4])
    compact = rows("compact", index, valid)
    np.testing.assert_array_equal(compact.position[0, :, :7], [list(range(7))] * 3)
    np.testing.assert_array_equal(compact.next_position, [7, 2])
