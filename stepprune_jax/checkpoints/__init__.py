"""Reading and writing of checkpoints: model folders and policy files."""

from stepprune_jax.checkpoints.load import VLM, load_params, load_vlm
from stepprune_jax.checkpoints.policy import load_policy, save_policy
from stepprune_jax.checkpoints.save import save_vlm
from stepprune_jax.pruning import Policy

__all__ = [
    "VLM",
    "Policy",
    "load_params",
    "load_policy",
    "load_vlm",
    "save_policy",
    "save_vlm",
]
