"""Trains a small model from scratch: a tower from patch labels, and then the language model."""
