"""The shapes world with the policy that keeps most: twice as wide, trained twice as long.

    python train.py --config experiments/configs/shapes_wide.py
    python eval.py --config experiments/configs/shapes_wide.py

Training takes about three times as long as that of `configs/shapes.py`, and a choice three times as
many operations. experiments/RESULTS.md has the results of both.
"""

from ml_collections import ConfigDict

from stepprune_jax import configurations


def get_config() -> ConfigDict:
    """Returns the configuration of `configs/shapes.py` with a larger policy, trained longer."""
    c = configurations.load("shapes")
    c.steps = 1000
    c.policy.width = 128
    c.autoselect.width = 128
    # Learned better, the same price would keep fewer tokens.
    c.policy.length_weight = 0.08
    for rate in ("lr", "final_lr", "muon_lr"):
        c.optimizer[rate] *= 0.5
    return c
