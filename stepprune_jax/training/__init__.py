"""Training of a token selector in front of a frozen vision-language model."""

from stepprune_jax.checkpoints.model_settings import ModelSettings
from stepprune_jax.data.source import DataSettings
from stepprune_jax.evaluation.settings import EvalSettings
from stepprune_jax.training.optimizer import OptimizerSettings
from stepprune_jax.training.recipes import RlooTraining
from stepprune_jax.training.run import train
from stepprune_jax.training.settings import (
    AcceleratorSettings,
    Run,
    ValidationSettings,
)
from stepprune_jax.user_input import UserError

__all__ = [
    "AcceleratorSettings",
    "DataSettings",
    "EvalSettings",
    "ModelSettings",
    "OptimizerSettings",
    "RlooTraining",
    "Run",
    "ValidationSettings",
    "train",
]


def __getattr__(name: str) -> object:
    if name == "sampled_sets":  # the name in configurations of earlier versions
        raise UserError("training.sampled_sets(run) is now run.replace({'recipe': 'rloo'})")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
