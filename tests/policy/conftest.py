"""Fixtures of the tests of the policy."""

import jax
import numpy as np
import pytest


@pytest.fixture
def x64():
    """Double precision, for comparisons with finite differences and with the oracle."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def rng():
    return np.random.default_rng(30)
