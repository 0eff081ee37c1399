"""Writing into the cache and the head of a single row: the ways taken for a CPU change no value."""

import jax
import jax.numpy as jnp
import numpy as np

from stepprune_jax.models import decoder as llama
from stepprune_jax.models.attention import append_slots


def test_each_row_is_written_at_its_own_slots_and_nowhere_else():
    layers, b, heads, capacity, s, c = 2, 3, 2, 5, 2, 4
    keys = jax.random.split(jax.random.key(0))
    buffer = jax.random.normal(keys[0], (layers, b, heads, capacity, c), jnp.bfloat16)
    new = jax.random.normal(keys[1], (layers, b, heads, s, c), jnp.bfloat16)
    # The last row's second token lies beyond the capacity.
    slots = np.array([[0, 1], [3, 4], [4, 5]])
    expected = np.array(buffer)
    for row, i in np.ndindex(slots.shape):
        if slots[row, i] < capacity:
            expected[:, row, :, slots[row, i]] = np.asarray(new)[:, row, :, i]
    written = jax.jit(append_slots)(buffer, new, jnp.asarray(slots))
    np.testing.assert_array_equal(np.asarray(written), expected)


def test_logits_of_one_row_are_those_of_a_batch(llava):
    config = llava.config.text
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), llava.params["language"])
    hidden = jax.random.normal(jax.random.key(1), (3, 2, config.hidden_size), jnp.bfloat16)
    logits = jax.jit(llama.logits, static_argnums=1)
    whole = logits(params, config, hidden)
    assert whole.dtype == jnp.float32
    one = logits(params, config, hidden[1, 0])
    np.testing.assert_allclose(one, whole[1, 0], rtol=1e-5, atol=1e-5)
