"""Methods of pruning visual tokens behind one interface; see `selectors` for trained methods."""

from stepprune_jax.pruning.all_tokens import AllTokens
from stepprune_jax.pruning.base import (
    POSITIONS,
    Kept,
    LayerCut,
    LayerPruner,
    Pruner,
    PrunerInputs,
    Ranker,
    Ranking,
    Schedule,
    Survivors,
)
from stepprune_jax.pruning.budget import Budget
from stepprune_jax.pruning.cdpruner import CDPruner
from stepprune_jax.pruning.cls import Cls
from stepprune_jax.pruning.clse import Clse
from stepprune_jax.pruning.dart import Dart
from stepprune_jax.pruning.divprune import DivPrune
from stepprune_jax.pruning.downsample import Downsample
from stepprune_jax.pruning.evs import Evs
from stepprune_jax.pruning.fastv import FastV
from stepprune_jax.pruning.frames import Frames
from stepprune_jax.pruning.grid import Grid
from stepprune_jax.pruning.hiprune import HiPrune
from stepprune_jax.pruning.holov import HoloV
from stepprune_jax.pruning.mmtok import MMTok
from stepprune_jax.pruning.prumerge import PruMerge, PruMergePlus
from stepprune_jax.pruning.pyramiddrop import PyramidDrop
from stepprune_jax.pruning.random import Random
from stepprune_jax.pruning.sparsevlm import SparseVLM, SparseVLMv2
from stepprune_jax.pruning.topv import TopV
from stepprune_jax.pruning.vcast import VCast
from stepprune_jax.pruning.vidcom2 import VidCom2
from stepprune_jax.pruning.visionzip import VisionZip

__all__ = [
    "POSITIONS",
    "AllTokens",
    "Budget",
    "CDPruner",
    "Cls",
    "Clse",
    "Dart",
    "DivPrune",
    "Downsample",
    "Evs",
    "FastV",
    "Frames",
    "Grid",
    "HiPrune",
    "HoloV",
    "Kept",
    "LayerCut",
    "LayerPruner",
    "MMTok",
    "PruMerge",
    "PruMergePlus",
    "Pruner",
    "PrunerInputs",
    "PyramidDrop",
    "Random",
    "Ranker",
    "Ranking",
    "Schedule",
    "SparseVLM",
    "SparseVLMv2",
    "Survivors",
    "TopV",
    "VCast",
    "VidCom2",
    "VisionZip",
]
