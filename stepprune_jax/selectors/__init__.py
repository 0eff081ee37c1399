"""Methods with weights. Each method is a single object in training, storage and use."""

from stepprune_jax.selectors.autoselect import AutoSelect, AutoSelectConfig
from stepprune_jax.selectors.base import Aux, Selector, SelectorConfig, TrainedPruner
from stepprune_jax.selectors.glimpseprune import GlimpsePrune, GlimpsePruneConfig
from stepprune_jax.selectors.policy import LossOptions, Masks, Policy, SelectOptions
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
    "LossOptions",
    "Masks",
    "Policy",
    "RlooSettings",
    "SelectOptions",
    "Selector",
    "SelectorConfig",
    "StepPrune",
    "SubsetGain",
    "TrainedPruner",
    "VisionSelector",
    "VisionSelectorConfig",
    "rloo_loss",
]
