"""Several continuations of one prefix in a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax.models import decoder as llama
from stepprune_jax.models.config import LlamaConfig
from stepprune_jax.models.sequence import Rows

CONFIG = LlamaConfig(32, 16, 24, 2, 4, 2, 4, max_positions=64)
PREFIX, PARTS = 3, (2, 4, 1)


@pytest.fixture(scope="module")
def params():
    return jax.jit(llama.init_language, static_argnums=1)(jax.random.key(0), CONFIG)


def row(seed):
    """(embeddings, position, segment) of a prefix, three continuations and two slots of padding."""
    segment = [0] * PREFIX + [n + 1 for n, size in enumerate(PARTS) for _ in range(size)] + [-1, -1]
    position = [*range(PREFIX), *(PREFIX + at for size in PARTS for at in range(size)), 0, 0]
    hidden = jax.random.normal(jax.random.key(seed), (len(segment), 16))
    return hidden, jnp.array(position), jnp.array(segment)


@jax.jit
def run(params, hidden, position, valid, segment=None):
    return llama.run_layers(params, CONFIG, Rows(hidden, position, valid, segment), (0, 2))


def test_segments_are_what_separate_runs_are(params):
    rows = [row(seed) for seed in (1, 2)]
    hidden, position, segment = map(jnp.stack, zip(*rows, strict=True))
    packed = run(params, hidden, position, segment >= 0, segment).hidden
    assert bool(jnp.isfinite(packed).all())
    for number in range(len(rows)):
        for part in range(1, len(PARTS) + 1):
            at = np.flatnonzero(np.isin(segment[number], (0, part)))
            valid = jnp.ones((1, len(at)), bool)
            alone = run(params, hidden[number, at][None], position[number, at][None], valid).hidden
            np.testing.assert_allclose(packed[number, at], alone[0], atol=1e-5)


def test_a_segment_does_not_feel_its_siblings(params):
    hidden, position, segment = (array[None] for array in row(4))
    sibling = segment == 2

    def of_others(hidden):
        result = run(params, hidden, position, segment >= 0, segment).hidden
        return jnp.sum(jnp.where(sibling[..., None], 0, result) ** 2)

    slope = jax.jit(jax.grad(of_others))(hidden)
    assert float(jnp.abs(slope[sibling]).max()) == 0
    assert float(jnp.abs(slope[segment == 0]).min()) > 0
