"""The shapes world, with equal weights for all pointer steps."""

from ml_collections import ConfigDict

from stepprune_jax import configurations


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration of `configs/shapes.py` with one field changed."""
    c = configurations.load("shapes", arg)
    c.policy.aggregation = "uniform"
    return c
