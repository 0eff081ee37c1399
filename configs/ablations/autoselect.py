"""The shapes world, with a one-shot scorer instead of the sequential policy."""

from ml_collections import ConfigDict

from stepprune_jax import configurations


def get_config() -> ConfigDict:
    """Returns the configuration of `configs/shapes.py` with another method and its text gate."""
    c = configurations.load("shapes")
    c.method = "autoselect"
    c.text_gate_anneal = 0.1
    return c
