"""Double precision, for comparisons with finite differences and with the oracle."""

import jax
import pytest


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
