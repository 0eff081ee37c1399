"""Ways to prune visual tokens behind one interface; `PRUNERS` names them all."""

from stepprune_jax.pruning.all_tokens import AllTokens
from stepprune_jax.pruning.autoselect import AutoSelect, AutoSelectConfig
from stepprune_jax.pruning.base import (
    Budget,
    Kept,
    LayerCut,
    Pruner,
    Ranker,
    Ranking,
    Trained,
    View,
)
from stepprune_jax.pruning.cls import Cls
from stepprune_jax.pruning.dart import Dart
from stepprune_jax.pruning.fastv import FastV
from stepprune_jax.pruning.grid import Grid
from stepprune_jax.pruning.holov import HoloV
from stepprune_jax.pruning.method import PRUNERS, Method, make_method
from stepprune_jax.pruning.prumerge import PruMerge, PruMergePlus
from stepprune_jax.pruning.random import Random
from stepprune_jax.pruning.stepprune import StepPrune
from stepprune_jax.pruning.topv import TopV
from stepprune_jax.pruning.visionzip import VisionZip

__all__ = [
    "PRUNERS",
    "AllTokens",
    "AutoSelect",
    "AutoSelectConfig",
    "Budget",
    "Cls",
    "Dart",
    "FastV",
    "Grid",
    "HoloV",
    "Kept",
    "LayerCut",
    "Method",
    "PruMerge",
    "PruMergePlus",
    "Pruner",
    "Random",
    "Ranker",
    "Ranking",
    "StepPrune",
    "TopV",
    "Trained",
    "View",
    "VisionZip",
    "make_method",
]
