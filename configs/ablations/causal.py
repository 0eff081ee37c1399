"""The shapes world, but the encoder sees image tokens in raster order only."""

from ml_collections import ConfigDict

from configs import shapes


def get_config(arg: str = "") -> ConfigDict:
    """As `configs/shapes.py`, with one thing changed."""
    c = shapes.get_config(arg)
    c.policy.encoder_attention = "causal"
    return c
