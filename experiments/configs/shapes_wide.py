"""The shapes world with the policy that keeps most: twice as wide, trained twice as long.

    python train.py --config experiments/configs/shapes_wide.py
    python eval.py --config experiments/configs/shapes_wide.py

Training takes about three times as long as that of `configs/shapes.py`, and a choice three times as
many operations. experiments/RESULTS.md has the results of both.
"""

from stepprune_jax import configurations
from stepprune_jax.training import Run


def get_config() -> Run:
    """Returns the settings of `configs/shapes.py` with a larger policy, trained longer."""
    run = configurations.load("shapes")
    rates = run.optimizer
    return run.replace(
        {
            "steps": 1000,
            "policy.width": 128,
            "autoselect.width": 128,
            # Learned better, the same price would keep fewer tokens.
            "policy.length_weight": 0.08,
            "optimizer.lr": rates.lr / 2,
            "optimizer.final_lr": rates.final_lr / 2,
            "optimizer.muon_lr": rates.muon_lr / 2,
        }
    )
