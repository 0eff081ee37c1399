"""StepPrune in JAX: a sequential policy that prunes the visual tokens of multimodal LLMs.

Public names are imported on first use, so that work without a model, such as scoring answers,
neither waits for jax nor needs an accelerator.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepprune_jax.checkpoints import VLM, Policy, load_policy, load_vlm, save_policy, save_vlm
    from stepprune_jax.inference import Answer, generate
    from stepprune_jax.policy import (
        POINTER,
        DecoderFns,
        FeatureStats,
        Gated,
        Inputs,
        Limits,
        Picks,
        PolicyConfig,
        Progress,
        Pruned,
        Trajectory,
        abstract_policy,
        calibrate_stop_bias,
        cast_weights,
        choose,
        encode,
        gate,
        gather,
        init_policy,
        noise_gate,
        partition_rules,
        policy_metrics,
        prune,
        rank,
        select,
        soft_topk,
        train_loss,
        trajectory_scores,
        update_stats,
    )

    __version__: str

__all__ = [
    "POINTER",
    "VLM",
    "Answer",
    "DecoderFns",
    "FeatureStats",
    "Gated",
    "Inputs",
    "Limits",
    "Picks",
    "Policy",
    "PolicyConfig",
    "Progress",
    "Pruned",
    "Trajectory",
    "abstract_policy",
    "calibrate_stop_bias",
    "cast_weights",
    "choose",
    "encode",
    "gate",
    "gather",
    "generate",
    "init_policy",
    "load_policy",
    "load_vlm",
    "noise_gate",
    "partition_rules",
    "policy_metrics",
    "prune",
    "rank",
    "save_policy",
    "save_vlm",
    "select",
    "soft_topk",
    "train_loss",
    "trajectory_scores",
    "update_stats",
]


def __getattr__(name: str) -> Any:
    """Finds a public name in the package that exports it."""
    if name in __all__:
        for package in ("policy", "checkpoints", "inference"):
            module = import_module(f"{__name__}.{package}")
            if name in module.__all__:
                return getattr(module, name)
    if name == "__version__":
        return import_module(f"{__name__}.version").version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


class _Package(ModuleType):
    """Keeps `stepprune_jax.generate` bound to the function.

    Python binds a module to its parent when it is imported; here the function of the same name is
    the public one, and the module is the command.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "generate" and isinstance(value, ModuleType):
            value = value.generate
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
