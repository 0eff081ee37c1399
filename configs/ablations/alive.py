"""The shapes world, with pointer steps weighted by the probability of being alive."""

from ml_collections import ConfigDict

from stepprune_jax import configurations


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration of `configs/shapes.py` with one field changed."""
    c = configurations.load("shapes", arg)
    c.policy.aggregation = "alive"
    return c
