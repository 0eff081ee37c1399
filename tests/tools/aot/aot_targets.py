"""Targets of the tests, or the reason why there are none here."""

import jax
import pytest

from stepprune_jax.parallel import aot_targets


def made(name):
    """A target, or a CPU; skips a test where the target's compiler is missing."""
    if name == "cpu":
        return aot_targets.Target(name, tuple(jax.devices()[:1]), {})
    if problem := aot_targets.missing(name):
        pytest.skip(problem)
    return aot_targets.make_target(name)
