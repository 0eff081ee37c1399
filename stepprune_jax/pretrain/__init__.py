"""A small model from scratch: a tower by labels of patches, then the language model on top."""

from stepprune_jax.pretrain.run import pretrain

__all__ = ["pretrain"]
