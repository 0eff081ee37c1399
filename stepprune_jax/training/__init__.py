"""Training of a token selector in front of a frozen vision-language model."""

from stepprune_jax.training.run import train
from stepprune_jax.training.settings import Run, read_run

__all__ = ["Run", "read_run", "train"]
