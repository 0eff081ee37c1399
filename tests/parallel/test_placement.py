"""How many programs a process keeps."""

import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax.parallel import placement


@pytest.fixture
def double(monkeypatch):
    monkeypatch.setattr(placement, "_on_cpu", [])
    return placement.jit_for_weights(lambda params, x: params["w"] * x, ())


def test_programs_on_cpus_are_bounded_and_all_are_counted(double, monkeypatch):
    monkeypatch.setattr(placement, "MOST_PROGRAMS", 3)
    (program,) = placement._on_cpu
    weights, held = {"w": jnp.full((), 2.0)}, []
    for size in range(1, 11):
        np.testing.assert_array_equal(double(weights, jnp.ones(size)), np.full(size, 2.0))
        held.append(program._cache_size())
    assert max(held) == 3 and double.num_compiled() == 10
    double(weights, jnp.ones(10))
    assert double.num_compiled() == 10  # the last ones are still there
