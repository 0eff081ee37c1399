"""StepPrune in JAX: a sequential policy that prunes the visual tokens of multimodal LLMs.

Public names are imported on first use: importing jax takes seconds, and scoring answers, for one,
does not need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepprune_jax.checkpoints import VLM, Policy, load_policy, load_vlm, save_policy, save_vlm
    from stepprune_jax.inference import Answer, RunOptions, Sampling, generate, stream
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
    from stepprune_jax.pruning import make_method

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
    "RunOptions",
    "Sampling",
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
    "make_method",
    "noise_gate",
    "partition_rules",
    "policy_metrics",
    "prune",
    "rank",
    "save_policy",
    "save_vlm",
    "select",
    "soft_topk",
    "stream",
    "train_loss",
    "trajectory_scores",
    "update_stats",
]


def __getattr__(name: str) -> Any:
    """Finds a public name in the package that exports it."""
    if name in __all__:
        for package in ("policy", "pruning", "checkpoints", "inference"):
            module = import_module(f"{__name__}.{package}")
            if name in module.__all__:
                return getattr(module, name)
    if name == "__version__":
        return import_module(f"{__name__}.version").version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
