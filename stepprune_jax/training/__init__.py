"""Training of a token selector in front of a frozen vision-language model."""

from stepprune_jax.checkpoints.model_settings import ModelSettings
from stepprune_jax.data.source import DataSettings
from stepprune_jax.evaluation.settings import EvalSettings
from stepprune_jax.training.optimizer import OptimizerSettings
from stepprune_jax.training.run import train
from stepprune_jax.training.settings import (
    AcceleratorSettings,
    Run,
    ValidationSettings,
    rloo_run,
)

__all__ = [
    "AcceleratorSettings",
    "DataSettings",
    "EvalSettings",
    "ModelSettings",
    "OptimizerSettings",
    "Run",
    "ValidationSettings",
    "rloo_run",
    "train",
]
