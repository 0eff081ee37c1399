"""Targets of the tests, or the reason why there are none here."""

import jax
import pytest

from stepprune_jax.parallel import targets


def made(name):
    """A target, or a CPU; skips a test where the target's compiler is missing."""
    if name == "cpu":
        return targets.Target(name, tuple(jax.devices()[:1]), {})
    if problem := targets.missing(name):
        pytest.skip(problem)
    return targets.make_target(name)
