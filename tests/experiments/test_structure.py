"""The initial tower: its heads attend to neighbors."""

import jax
import numpy as np
import pytest

from experiments.pretrain.structure import AROUND, init_tower
from stepprune_jax.models.llava import tower as clip
from stepprune_jax.models.llava.config import ClipConfig

# Slow: shipped models are already trained, so these tests run only when pretraining changes.
pytestmark = pytest.mark.slow

CONFIG = ClipConfig(128, 16, 3, 8, 48, 8)


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
