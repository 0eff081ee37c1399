"""Special code paths for CPUs give exact values: cache writes and the head of a single row."""

import jax
import jax.numpy as jnp
import numpy as np

from stepprune_jax.models import decoder as llama
from stepprune_jax.models.attention import append_slots


def test_each_row_is_written_only_at_its_slots():
    layers, b, heads, capacity, s, c = 2, 3, 2, 5, 2, 4
    keys = jax.random.split(jax.random.key(0))
    buffer = jax.random.normal(keys[0], (layers, b, heads, capacity, c), jnp.bfloat16)
    new = jax.random.normal(keys[1], (layers, b, heads, s, c), jnp.bfloat16)
    # The slot of the last row's second token exceeds the capacity.
    slots = np.array([[0, 1], [3, 4], [4, 5]])
    expected = np.array(buffer)
    for row, i in np.ndindex(slots.shape):
        if slots[row, i] < capacity:
            expected[:, row, :, slots[row, i]] = np.asarray(new)[:, row, :, i]
    written = jax.jit(append_slots)(buffer, new, jnp.asarray(slots))
    np.testing.assert_array_equal(np.asarray(written), expected)


def test_logits_of_a_single_row_equal_logits_of_a_batch(llava):
    config = llava.config.text
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), llava.params["language"])
    hidden = jax.random.normal(jax.random.key(1), (3, 2, config.hidden_size), jnp.bfloat16)
    logits = jax.jit(llama.logits, static_argnums=1)
    batch_logits = logits(params, config, hidden)
    assert batch_logits.dtype == jnp.float32
    row_logits = logits(params, config, hidden[1, 0])
    np.testing.assert_allclose(row_logits, batch_logits[1, 0], rtol=1e-5, atol=1e-5)
