"""The shapes world, but the score of a token is that of the last pointer step."""

from ml_collections import ConfigDict

from configs import shapes


def get_config(arg: str = "") -> ConfigDict:
    """As `configs/shapes.py`, with one thing changed."""
    c = shapes.get_config(arg)
    c.policy.aggregation = "last"
    return c
