"""Names of targets, and the cases that once failed to compile for them."""

import pytest
from ml_collections import ConfigDict

import jax
import jax.numpy as jnp
from stepprune_jax import policy
from stepprune_jax.accelerators import ACCELERATORS, known_as
from stepprune_jax.aot import __main__ as table
from stepprune_jax.aot import targets
from stepprune_jax.aot.hlo import loops
from stepprune_jax.aot.programs import Programs, load_config, model_of
from stepprune_jax.compiling import usage
from stepprune_jax.policy import PolicyConfig
from stepprune_jax.sharding import build_mesh


def made(name):
    """A target, or the reason why there is none here."""
    lacking = targets.missing(name)
    if lacking:
        pytest.skip(lacking)
    return targets.target(name)
