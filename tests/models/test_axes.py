"""Rows of tokens with three position ids, with pruned images of several sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from visual import kept_at

from stepprune_jax.data.prompts import IMAGE_TOKEN
from stepprune_jax.models.assembly import assemble
from stepprune_jax.models.config import LlamaConfig
from stepprune_jax.models.qwen2_5_vl import Qwen2_5_VL, QwenConfig
from stepprune_jax.models.qwen2_5_vl.config import QwenVisionConfig

S = IMAGE_TOKEN
CONFIG = QwenConfig(
    QwenVisionConfig(4, 4, 1, 1, full_blocks=(), out_size=2),
    LlamaConfig(10, 2, 4, 1, 1, 1, 6, rope_sections=(1, 1, 1)),
)
# The embedding of a token is its id, twice.
EMBEDDING = jnp.broadcast_to(jnp.arange(10.0)[:, None], (10, 2))
PARAMS = {"language": {"embed": {"embedding": EMBEDDING}}}


@functools.partial(jax.jit, static_argnums=(0, 1))
def rows(positions, capacity=None):
    """Assembles two rows of pruned images.

    Row 0 has an image of 2 x 3 tokens, whose tokens 1 and 5 are kept, and an image of 4 x 1 tokens,
    whose token 2 is kept. Row 1 begins with an image of 1 x 2 tokens without kept tokens.
    """
    grid = jnp.array([[[2, 3], [4, 1]], [[1, 2], [0, 0]]])
    index = jnp.array([[[1, 5], [2, 0]], [[0, 0], [0, 0]]])
    valid = jnp.array([[[1, 1], [1, 0]], [[0, 0], [0, 0]]], bool)
    tokens = (100.0 * (1 + jnp.arange(2))[:, None] + index)[..., None]
    tokens = jnp.broadcast_to(tokens, (2, 2, 2, 2))
    kept = kept_at(tokens, valid, index)
    ids = jnp.array([[1, 2, S, 3, S, 4], [S, 5, 6, 0, 0, 0]])
    lengths = jnp.array([6, 3])
    backbone = Qwen2_5_VL(CONFIG)
    return assemble(
        PARAMS, backbone, ids, lengths, kept, grid, positions=positions, capacity=capacity
    )


def test_kept_tokens_keep_their_positions_in_the_unpruned_image():
    sequence = rows("original")
    np.testing.assert_array_equal(sequence.hidden[0, :7, 0], [1, 2, 101, 105, 3, 202, 4])
    np.testing.assert_array_equal(
        sequence.position[0, :, :7],
        [[0, 1, 2, 2, 5, 6, 10], [0, 1, 2, 3, 5, 8, 10], [0, 1, 3, 4, 5, 6, 10]],
    )
    # An image without kept tokens still takes up the positions of its two columns.
    np.testing.assert_array_equal(sequence.position[1, :, :2], [[2, 3]] * 3)
    np.testing.assert_array_equal(sequence.next_position, [11, 4])
    # A row that is truncated after the token at (2, 3, 4) continues after this token.
    np.testing.assert_array_equal(rows("original", 4).next_position, [5, 4])
    compact = rows("compact")
    np.testing.assert_array_equal(compact.position[0, :, :7], [list(range(7))] * 3)
    np.testing.assert_array_equal(compact.next_position, [7, 2])
