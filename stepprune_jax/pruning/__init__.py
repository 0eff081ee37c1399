"""Methods of pruning visual tokens behind one interface; `PRUNERS` lists them all."""

from stepprune_jax.pruning.all_tokens import AllTokens
from stepprune_jax.pruning.autoselect import AutoSelect, AutoSelectConfig
from stepprune_jax.pruning.base import (
    POSITIONS,
    Kept,
    LayerCut,
    LayerPruner,
    Pruner,
    Ranker,
    Ranking,
    Survivors,
    Trained,
    View,
)
from stepprune_jax.pruning.budget import Budget
from stepprune_jax.pruning.cdpruner import CDPruner
from stepprune_jax.pruning.cls import Cls
from stepprune_jax.pruning.dart import Dart
from stepprune_jax.pruning.divprune import DivPrune
from stepprune_jax.pruning.downsample import Downsample
from stepprune_jax.pruning.fastv import FastV
from stepprune_jax.pruning.glimpseprune import GlimpsePrune, GlimpsePruneConfig
from stepprune_jax.pruning.grid import Grid
from stepprune_jax.pruning.holov import HoloV
from stepprune_jax.pruning.method import Method, make_method, read_options
from stepprune_jax.pruning.policy import Policy
from stepprune_jax.pruning.policy_gradient import PolicyGradientSettings, policy_gradient_loss
from stepprune_jax.pruning.prumerge import PruMerge, PruMergePlus
from stepprune_jax.pruning.pyramiddrop import PyramidDrop
from stepprune_jax.pruning.random import Random
from stepprune_jax.pruning.registry import PRUNERS, learned_methods, method_of, trained_methods
from stepprune_jax.pruning.sparsevlm import SparseVLM, SparseVLMv2
from stepprune_jax.pruning.stepprune import StepPrune
from stepprune_jax.pruning.topv import TopV
from stepprune_jax.pruning.trained import Learned, TrainedConfig, TrainedMethod
from stepprune_jax.pruning.visionselector import VisionSelector, VisionSelectorConfig
from stepprune_jax.pruning.visionzip import VisionZip

__all__ = [
    "POSITIONS",
    "PRUNERS",
    "AllTokens",
    "AutoSelect",
    "AutoSelectConfig",
    "Budget",
    "CDPruner",
    "Cls",
    "Dart",
    "DivPrune",
    "Downsample",
    "FastV",
    "GlimpsePrune",
    "GlimpsePruneConfig",
    "Grid",
    "HoloV",
    "Kept",
    "LayerCut",
    "LayerPruner",
    "Learned",
    "Method",
    "Policy",
    "PolicyGradientSettings",
    "PruMerge",
    "PruMergePlus",
    "Pruner",
    "PyramidDrop",
    "Random",
    "Ranker",
    "Ranking",
    "SparseVLM",
    "SparseVLMv2",
    "StepPrune",
    "Survivors",
    "TopV",
    "Trained",
    "TrainedConfig",
    "TrainedMethod",
    "View",
    "VisionSelector",
    "VisionSelectorConfig",
    "VisionZip",
    "learned_methods",
    "make_method",
    "method_of",
    "policy_gradient_loss",
    "read_options",
    "trained_methods",
]
