"""The list of all pruners."""

from typing import Any

from stepprune_jax.pruning.all_tokens import AllTokens
from stepprune_jax.pruning.autoselect import AutoSelect
from stepprune_jax.pruning.base import Pruner
from stepprune_jax.pruning.cdpruner import CDPruner
from stepprune_jax.pruning.cls import Cls
from stepprune_jax.pruning.dart import Dart
from stepprune_jax.pruning.divprune import DivPrune
from stepprune_jax.pruning.downsample import Downsample
from stepprune_jax.pruning.fastv import FastV
from stepprune_jax.pruning.glimpseprune import GlimpsePrune
from stepprune_jax.pruning.grid import Grid
from stepprune_jax.pruning.holov import HoloV
from stepprune_jax.pruning.prumerge import PruMerge, PruMergePlus
from stepprune_jax.pruning.pyramiddrop import PyramidDrop
from stepprune_jax.pruning.random import Random
from stepprune_jax.pruning.sparsevlm import SparseVLM, SparseVLMv2
from stepprune_jax.pruning.stepprune import StepPrune
from stepprune_jax.pruning.topv import TopV
from stepprune_jax.pruning.trained import Learned, TrainedConfig, TrainedMethod
from stepprune_jax.pruning.visionselector import VisionSelector
from stepprune_jax.pruning.visionzip import VisionZip

# The only list of names, used by commands, configurations and tables.
PRUNERS: dict[str, type[Pruner]] = {
    kind.name: kind
    for kind in (
        AllTokens,
        Random,
        Grid,
        Downsample,
        Cls,
        FastV,
        SparseVLM,
        SparseVLMv2,
        PyramidDrop,
        Dart,
        TopV,
        VisionZip,
        PruMerge,
        PruMergePlus,
        HoloV,
        DivPrune,
        CDPruner,
        AutoSelect,
        VisionSelector,
        GlimpsePrune,
        StepPrune,
    )
}


def trained_methods() -> dict[str, type[TrainedMethod]]:
    """Returns those of `PRUNERS` that can be trained."""
    return {name: kind for name, kind in PRUNERS.items() if issubclass(kind, TrainedMethod)}


def learned_methods() -> dict[str, type[Learned]]:
    """Returns those of `PRUNERS` that have weights."""
    return {name: kind for name, kind in PRUNERS.items() if issubclass(kind, Learned)}


def method_of(config: TrainedConfig) -> Learned:
    """Returns the method with weights that a configuration belongs to."""
    kinds = learned_methods().values()
    kind: Any = next(kind for kind in kinds if kind.config_type is type(config))
    return kind(config=config)
