"""The shapes world, but the encoder sees image tokens in raster order only."""

from ml_collections import ConfigDict

from configs import shapes


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration of `configs/shapes.py` with one field changed."""
    c = shapes.get_config(arg)
    c.policy.encoder_attention = "causal"
    return c
