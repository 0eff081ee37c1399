"""Segments pack several continuations of one prefix into a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_reference import normal

from stepprune_jax.models import decoder as llama
from stepprune_jax.models.sequence import Rows

PREFIX_LENGTH, CONTINUATION_LENGTHS = 3, (2, 3)


def row(seed):
    """Returns embeddings, positions and segments of a prefix, two continuations and padding."""
    segment, position = [0] * PREFIX_LENGTH, [*range(PREFIX_LENGTH)]
    for number, length in enumerate(CONTINUATION_LENGTHS, 1):
        segment += [number] * length
        position += range(PREFIX_LENGTH, PREFIX_LENGTH + length)
    segment, position = [*segment, -1, -1], [*position, 0, 0]
    return normal(seed, len(segment), 64), jnp.array(position), jnp.array(segment)


@pytest.fixture(scope="module")
def run(llava):
    @jax.jit
    def run(hidden, position, valid, segment=None):
        rows = Rows(hidden, position, valid, segment)
        return llama.run_layers(llava.params["language"], llava.config.text, rows, (0, 2)).hidden

    return run


def test_a_packed_continuation_equals_a_separate_run(run):
    rows = [row(seed) for seed in (1, 2)]
    hidden, position, segment = map(jnp.stack, zip(*rows, strict=True))
    packed = run(hidden, position, segment >= 0, segment)
    assert bool(jnp.isfinite(packed).all())
    for number in range(1, len(CONTINUATION_LENGTHS) + 1):
        slots = np.flatnonzero(np.isin(segment[0], (0, number)))
        separate = run(hidden[:, slots], position[:, slots], jnp.ones((2, len(slots)), bool))
        np.testing.assert_allclose(packed[:, slots], separate, atol=1e-5)


def test_a_segment_does_not_influence_its_siblings(run):
    hidden, position, segment = (array[None] for array in row(4))
    in_sibling = segment == 2

    def loss_outside_sibling(hidden):
        result = run(hidden, position, segment >= 0, segment)
        return jnp.sum(jnp.where(in_sibling[..., None], 0, result) ** 2)

    gradient = jax.jit(jax.grad(loss_outside_sibling))(hidden)
    assert float(jnp.abs(gradient[in_sibling]).max()) == 0
    assert float(jnp.abs(gradient[segment == 0]).min()) > 0
