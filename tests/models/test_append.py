"""Writing into the cache and the head of a single row: the ways taken for a CPU change no value."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax.models import decoder as llama
from stepprune_jax.models.attention import append_slots
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.testing import tiny_hf_config

CONFIG = LlavaConfig.from_hf(tiny_hf_config()).text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_row_is_written_at_its_own_slots_and_nowhere_else(dtype):
    layers, b, heads, capacity, s, c = 2, 3, 2, 5, 2, 4
    keys = jax.random.split(jax.random.key(0))
    buffer = jax.random.normal(keys[0], (layers, b, heads, capacity, c), dtype)
    new = jax.random.normal(keys[1], (layers, b, heads, s, c), dtype)
    # The last row's second token lies beyond the capacity.
    slots = np.array([[0, 1], [3, 4], [4, 5]])
    expected = np.array(buffer)
    for row in range(b):
        for i, slot in enumerate(slots[row]):
            if slot < capacity:
                expected[:, row, :, slot] = np.asarray(new)[:, row, :, i]
    written = jax.jit(append_slots)(buffer, new, jnp.asarray(slots))
    assert written.dtype == buffer.dtype
    np.testing.assert_array_equal(np.asarray(written), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_one_row_are_those_of_a_batch(tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params = jax.jit(llama.init_language, static_argnums=1)(jax.random.key(0), config)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    hidden = jax.random.normal(jax.random.key(1), (3, 2, config.hidden_size), jnp.bfloat16)
    logits = jax.jit(llama.logits, static_argnums=1)
    whole = logits(params, config, hidden)
    assert whole.shape == (3, 2, config.vocab_size) and whole.dtype == jnp.float32
    one = logits(params, config, hidden[1, 0])
    np.testing.assert_allclose(one, whole[1, 0], rtol=1e-5, atol=1e-5)
