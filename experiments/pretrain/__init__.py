"""A small model from scratch: first a tower from patch labels, then the language model."""
