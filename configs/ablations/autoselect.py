"""The shapes world, with a one-shot scorer instead of the sequential policy."""

from ml_collections import ConfigDict

from stepprune_jax import configurations


def get_config() -> ConfigDict:
    """Returns the configuration of `configs/shapes.py` with another method and what suits it."""
    c = configurations.load("shapes")
    c.method = "autoselect"
    # Both from trials on other questions, docs/experiments.md: a text gate that opens slowly, and
    # half the learning rates.
    c.text_gate_anneal = 0.1
    for rate in ("lr", "final_lr", "muon_lr"):
        c.optimizer[rate] *= 0.5
    return c
