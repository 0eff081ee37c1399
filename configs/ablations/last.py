"""The shapes world, with token scores from the last pointer step only."""

from ml_collections import ConfigDict

from stepprune_jax import configurations


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration of `configs/shapes.py` with one field changed."""
    c = configurations.load("shapes", arg)
    c.policy.aggregation = "last"
    return c
