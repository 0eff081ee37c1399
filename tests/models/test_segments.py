"""Several continuations of one prefix in a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_reference import normal

from stepprune_jax.models import decoder as llama
from stepprune_jax.models.sequence import Rows

PREFIX, PARTS = 3, (2, 3)


def row(seed):
    """(embeddings, position, segment) of a prefix, two continuations and two slots of padding."""
    segment = [0] * PREFIX + [n + 1 for n, size in enumerate(PARTS) for _ in range(size)] + [-1, -1]
    position = [*range(PREFIX), *(PREFIX + at for size in PARTS for at in range(size)), 0, 0]
    return normal(seed, len(segment), 64), jnp.array(position), jnp.array(segment)


@pytest.fixture(scope="module")
def run(llava):
    @jax.jit
    def run(hidden, position, valid, segment=None):
        rows = Rows(hidden, position, valid, segment)
        return llama.run_layers(llava.params["language"], llava.config.text, rows, (0, 2)).hidden

    return run


def test_segments_are_what_separate_runs_are(run):
    rows = [row(seed) for seed in (1, 2)]
    hidden, position, segment = map(jnp.stack, zip(*rows, strict=True))
    packed = run(hidden, position, segment >= 0, segment)
    assert bool(jnp.isfinite(packed).all())
    for part in range(1, len(PARTS) + 1):
        at = np.flatnonzero(np.isin(segment[0], (0, part)))
        alone = run(hidden[:, at], position[:, at], jnp.ones((2, len(at)), bool))
        np.testing.assert_allclose(packed[:, at], alone, atol=1e-5)


def test_a_segment_does_not_feel_its_siblings(run):
    hidden, position, segment = (array[None] for array in row(4))
    sibling = segment == 2

    def of_others(hidden):
        result = run(hidden, position, segment >= 0, segment)
        return jnp.sum(jnp.where(sibling[..., None], 0, result) ** 2)

    slope = jax.jit(jax.grad(of_others))(hidden)
    assert float(jnp.abs(slope[sibling]).max()) == 0
    assert float(jnp.abs(slope[segment == 0]).min()) > 0
