"""The initial tower: its position code, and heads that attend to neighbors."""

import math

import jax
import numpy as np
import pytest

from experiments.pretrain.structure import AROUND, fourier_code, init_tower, shift
from stepprune_jax.models.llava import tower as clip
from stepprune_jax.models.llava.config import ClipConfig

# Slow: shipped models are already trained, so these tests run only when pretraining changes.
pytestmark = pytest.mark.slow

CONFIG = ClipConfig(128, 16, 3, 8, 48, 8)


def test_the_code_has_cosines_and_sines_of_odd_multiples_of_the_position():
    # Two rows and two columns, one frequency each: pi / 2 a step.
    expected = [[1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 0, 1]]
    np.testing.assert_allclose(fourier_code(2, 4), expected, atol=1e-7)
    code = fourier_code(4, 8)[4 * 1 + 3]  # row 1 and column 3 of 4, frequencies 1 and 3
    angles = [math.pi / 4, 3 * math.pi / 4, 3 * math.pi / 4, 9 * math.pi / 4]
    expected = [function(angle) for angle in angles for function in (math.cos, math.sin)]
    np.testing.assert_allclose(code, expected, atol=1e-7)


@pytest.mark.parametrize("offset", [(1, -1), (-2, 0)])
def test_a_shift_maps_a_code_to_the_code_of_the_neighbor(offset):
    side, width = 6, 16
    code, matrix = fourier_code(side, width), shift(offset, side, width)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(width), atol=1e-6)
    shifted = (code @ matrix).reshape(side, side, width)
    neighbors = np.roll(code.reshape(side, side, width), (-offset[0], -offset[1]), (0, 1))
    interior = np.s_[2:-2, 2:-2]  # Patches whose neighbors are in the image.
    np.testing.assert_allclose(shifted[interior], neighbors[interior], atol=1e-6)


def test_initial_heads_of_the_first_block_attend_to_one_neighbor():
    side, heads, width = 6, CONFIG.num_heads, 16
    params = init_tower(jax.random.key(3), CONFIG)
    pixels = jax.random.normal(jax.random.key(4), (1, 3, 8 * side, 8 * side))
    x = np.asarray(jax.jit(clip.embed_patches, static_argnums=1)(params, CONFIG, pixels)[0])
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    attention = jax.tree.map(lambda leaf: np.asarray(leaf[0]), params["layers"]["attention"])
    query, key = (
        (x @ attention[name]["kernel"]).reshape(-1, heads, width) for name in ("query", "key")
    )
    attended = np.einsum("qhc,khc->hqk", query, key)[:, 1:].argmax(-1)
    row, column = np.divmod(np.arange(side**2), side)
    is_interior = (np.minimum(row, column) > 0) & (np.maximum(row, column) < side - 1)
    is_correct = [
        attended[head] == 1 + (row + row_step) * side + column + column_step
        for head, (row_step, column_step) in enumerate(AROUND)
    ]
    assert np.mean(np.array(is_correct)[:, is_interior]) > 0.98


def test_half_of_the_heads_of_later_blocks_are_not_local():
    random_tower, local_tower = (
        make(jax.random.key(0), CONFIG) for make in (clip.init_vision, init_tower)
    )
    for name in ("query", "key"):
        before, after = (
            tower["layers"]["attention"][name]["kernel"] for tower in (random_tower, local_tower)
        )
        is_changed = (before != after).reshape(3, -1, 8, 16).any((1, 3))
        assert is_changed.tolist() == [[True] * 8, [True] * 8, [True] * 4 + [False] * 4]
