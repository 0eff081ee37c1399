"""The shapes world, but all pointer steps count alike."""

from ml_collections import ConfigDict

from configs import shapes


def get_config(arg: str = "") -> ConfigDict:
    """As `configs/shapes.py`, with one thing changed."""
    c = shapes.get_config(arg)
    c.policy.aggregation = "uniform"
    return c
