"""StepPrune in JAX: a sequential policy that prunes the visual tokens of multimodal LLMs.

Public names are imported on first use. Importing jax takes seconds, which scoring of answers does
not need, and the policies do not need the packages that the models need.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepprune_jax.checkpoints.load import VLM, load_vlm
    from stepprune_jax.checkpoints.policy import load_policy, save_policy
    from stepprune_jax.checkpoints.save import save_vlm
    from stepprune_jax.data.videos import Video
    from stepprune_jax.inference import Answer, Generator, RunOptions, Sampling, generate, stream
    from stepprune_jax.policy import *
    from stepprune_jax.selectors import Policy, RlooSettings, StepPrune

    __version__: str

__all__ = [
    "POINTER",
    "VLM",
    "Answer",
    "DecoderFns",
    "FeatureStats",
    "Gated",
    "Generator",
    "Inputs",
    "Limits",
    "Picks",
    "Policy",
    "PolicyConfig",
    "Progress",
    "Pruned",
    "RlooSettings",
    "RunOptions",
    "SampledSubsets",
    "Sampling",
    "StepPrune",
    "Trajectory",
    "Video",
    "abstract_policy",
    "calibrate_stop_bias",
    "cast_weights",
    "choose",
    "encode",
    "gate",
    "gather",
    "generate",
    "init_policy",
    "leave_one_out",
    "load_policy",
    "load_vlm",
    "noise_gate",
    "partition_rules",
    "policy_metrics",
    "prune",
    "rank",
    "sample",
    "save_policy",
    "save_vlm",
    "select",
    "soft_topk",
    "stream",
    "token_importance",
    "train_loss",
    "trajectory_scores",
    "update_stats",
    "warm_start_loss",
]


# Module of `checkpoints` that defines each name. Its package exports nothing.
_CHECKPOINT_MODULES = {
    "VLM": "load",
    "load_policy": "policy",
    "load_vlm": "load",
    "save_policy": "policy",
    "save_vlm": "save",
}
# Packages that export all remaining names.
_PACKAGES = ("policy", "selectors", "inference")


def __getattr__(name: str) -> Any:
    """Imports a public name from the module or package that defines it."""
    if name == "__version__":
        return import_module(f"{__name__}.version").version()
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name in _CHECKPOINT_MODULES:
            module = import_module(f"{__name__}.checkpoints.{_CHECKPOINT_MODULES[name]}")
            return getattr(module, name)
        packages = (import_module(f"{__name__}.{package}") for package in _PACKAGES)
        return next(getattr(package, name) for package in packages if name in package.__all__)
    except ModuleNotFoundError as error:
        from stepprune_jax.extras import explain

        raise ImportError(f"stepprune_jax.{name}: {explain(error)}", name=error.name) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
