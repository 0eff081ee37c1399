"""Methods with weights, each of which is one object from training to use."""

from stepprune_jax.trained.autoselect import AutoSelect, AutoSelectConfig
from stepprune_jax.trained.base import Aux, Selector, SelectorConfig, Weighted
from stepprune_jax.trained.glimpseprune import GlimpsePrune, GlimpsePruneConfig
from stepprune_jax.trained.policy import Policy
from stepprune_jax.trained.policy_gradient import (
    PolicyGradientSettings,
    SetSignal,
    policy_gradient_loss,
)
from stepprune_jax.trained.stepprune import StepPrune
from stepprune_jax.trained.visionselector import VisionSelector, VisionSelectorConfig

__all__ = [
    "AutoSelect",
    "AutoSelectConfig",
    "Aux",
    "GlimpsePrune",
    "GlimpsePruneConfig",
    "Policy",
    "PolicyGradientSettings",
    "Selector",
    "SelectorConfig",
    "SetSignal",
    "StepPrune",
    "VisionSelector",
    "VisionSelectorConfig",
    "Weighted",
    "policy_gradient_loss",
]
