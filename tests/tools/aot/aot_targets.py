"""Targets of tests."""

import jax
import pytest

from stepprune_jax.parallel import aot_targets


def find_target(name):
    """Returns a target or the CPU. Skips the test if the target's compiler is missing."""
    if name == "cpu":
        return aot_targets.Target(name, tuple(jax.devices()[:1]), {})
    if problem := aot_targets.missing(name):
        pytest.skip(problem)
    return aot_targets.make_target(name)
