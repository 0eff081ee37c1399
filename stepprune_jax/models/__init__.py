"""Frozen backbones: pure functions over plain trees of weights."""
