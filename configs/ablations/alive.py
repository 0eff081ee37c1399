"""The shapes world, but pointer steps count by the probability to be alive."""

from ml_collections import ConfigDict

from configs import shapes


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration of `configs/shapes.py` with one field changed."""
    c = shapes.get_config(arg)
    c.policy.aggregation = "alive"
    return c
