"""The shapes world, with an encoder that is causal over image tokens in raster order."""

from ml_collections import ConfigDict

from stepprune_jax import configurations


def get_config(arg: str = "") -> ConfigDict:
    """Returns the configuration of `configs/shapes.py` with one field changed."""
    c = configurations.load("shapes", arg)
    c.policy.encoder_attention = "causal"
    return c
