"""Tokens with three position ids, in pruned images that have sizes of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from stepprune_jax.models import vlm
from stepprune_jax.models.config import LlamaConfig
from stepprune_jax.models.qwen2_5_vl import Qwen2_5_VL, QwenConfig
from stepprune_jax.models.qwen2_5_vl.config import QwenVisionConfig

S = vlm.IMAGE_TOKEN
CONFIG = QwenConfig(
    QwenVisionConfig(4, 4, 1, 1, full_blocks=(), out_size=2),
    LlamaConfig(10, 2, 4, 1, 1, 1, 6, rope_sections=(1, 1, 1)),
)
# The embedding of a token is its id, twice.
EMBEDDING = jnp.broadcast_to(jnp.arange(10.0)[:, None], (10, 2))
PARAMS = {"language": {"embed": {"embedding": EMBEDDING}}}


@functools.partial(jax.jit, static_argnums=(0, 1))
def rows(positions, capacity=None):
    """Row 0: an image of 2 x 3 tokens and one of 4 x 1; row 1: one of 1 x 2 that comes first.

    Left are tokens 1 and 5 of the first image and token 2 of the second, none of the third.
    """
    grid = jnp.array([[[2, 3], [4, 1]], [[1, 2], [0, 0]]])
    index = jnp.array([[[1, 5], [2, 0]], [[0, 0], [0, 0]]])
    valid = jnp.array([[[1, 1], [1, 0]], [[0, 0], [0, 0]]], bool)
    tokens = (100.0 * (1 + jnp.arange(2))[:, None] + index)[..., None]
    tokens = jnp.broadcast_to(tokens, (2, 2, 2, 2))
    visual = vlm.Visual(tokens, valid, index, index, grid)
    ids = jnp.array([[1, 2, S, 3, S, 4], [S, 5, 6, 0, 0, 0]])
    lengths = jnp.array([6, 3])
    return vlm.assemble(PARAMS, Qwen2_5_VL(CONFIG), ids, lengths, visual, positions, capacity)


def test_pruned_images_keep_the_positions_of_what_is_left():
    sequence = rows("original")
    np.testing.assert_array_equal(sequence.hidden[0, :7, 0], [1, 2, 101, 105, 3, 202, 4])
    np.testing.assert_array_equal(
        sequence.position[0, :, :7],
        [[0, 1, 2, 2, 5, 6, 10], [0, 1, 2, 3, 5, 8, 10], [0, 1, 3, 4, 5, 6, 10]],
    )
    # The image that is gone altogether still takes up its two columns.
    np.testing.assert_array_equal(sequence.position[1, :, :2], [[2, 3]] * 3)
    np.testing.assert_array_equal(sequence.next_position, [11, 4])
    # Cut after the token at (2, 3, 4) of the first image, a row continues after it.
    np.testing.assert_array_equal(rows("original", 4).next_position, [5, 4])
    compact = rows("compact")
    np.testing.assert_array_equal(compact.position[0, :, :7], [list(range(7))] * 3)
    np.testing.assert_array_equal(compact.next_position, [7, 2])
