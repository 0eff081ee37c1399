"""Training of a token selector in front of a frozen vision-language model."""

from stepprune_jax.training.run import train

__all__ = ["train"]
