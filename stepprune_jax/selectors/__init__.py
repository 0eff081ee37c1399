"""Methods with weights, each of which is one object from training to use."""

from stepprune_jax.selectors.autoselect import AutoSelect, AutoSelectConfig
from stepprune_jax.selectors.base import Aux, Selector, SelectorConfig, TrainedPruner
from stepprune_jax.selectors.glimpseprune import GlimpsePrune, GlimpsePruneConfig
from stepprune_jax.selectors.policy import Policy
from stepprune_jax.selectors.rloo import (
    RlooSettings,
    SubsetGain,
    rloo_loss,
)
from stepprune_jax.selectors.stepprune import StepPrune
from stepprune_jax.selectors.visionselector import VisionSelector, VisionSelectorConfig

__all__ = [
    "AutoSelect",
    "AutoSelectConfig",
    "Aux",
    "GlimpsePrune",
    "GlimpsePruneConfig",
    "Policy",
    "RlooSettings",
    "Selector",
    "SelectorConfig",
    "StepPrune",
    "SubsetGain",
    "TrainedPruner",
    "VisionSelector",
    "VisionSelectorConfig",
    "rloo_loss",
]
