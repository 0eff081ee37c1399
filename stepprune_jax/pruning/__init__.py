"""Other ways to choose tokens: a one-shot learned scorer and training-free orders."""

from stepprune_jax.pruning.autoselect import AutoSelectConfig
from stepprune_jax.pruning.heuristics import (
    cls_order,
    cls_tap,
    grid_indices,
    grid_order,
    random_order,
)

__all__ = [
    "AutoSelectConfig",
    "cls_order",
    "cls_tap",
    "grid_indices",
    "grid_order",
    "random_order",
]
