"""The shapes world, with the paper read to the letter."""

from ml_collections import ConfigDict

from configs import shapes


def get_config() -> ConfigDict:
    """As `configs/shapes.py:literal`."""
    return shapes.get_config("literal")
