"""A small model from scratch: first a tower from patch labels, then the language model."""

from experiments.pretrain.run import pretrain

__all__ = ["pretrain"]
