"""Shipped models and policies by name: a small LLaVA, a small Qwen2.5-VL, policies for each."""

from collections.abc import Iterable
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[1] / "assets"
# The small LLaVA and the small Qwen2.5-VL of the shapes world.
SHAPES_MODEL, SHAPES_QWEN = ASSETS / "shapes_llava", ASSETS / "shapes_qwen"
MODELS = {"shapes": SHAPES_MODEL, "shapes_qwen": SHAPES_QWEN}
POLICIES = ASSETS / "policies"  # each of the name of its model
_SUFFIX = ".safetensors"


def policy_names() -> list[str]:
    """Returns the names of the shipped policies."""
    return sorted(path.stem for path in POLICIES.glob(f"*{_SUFFIX}"))


def find_shipped_model(name: str | Path) -> Path | None:
    """Returns the folder of a shipped model, or None if there is none of that name."""
    return MODELS.get(str(name))


def find_shipped_policy(name: str | Path) -> Path | None:
    """Returns the file of a shipped policy, or None if there is none of that name."""
    return POLICIES / f"{name}{_SUFFIX}" if str(name) in policy_names() else None


def or_shipped(missing: str, given: str | Path, kind: str, names: Iterable[str]) -> str:
    """Adds the names of shipped ones to a message on a missing name, but not on a path or id."""
    if "/" in str(given) or ":" in str(given):
        return missing
    return f"{missing}, nor a shipped {kind} of that name ({', '.join(names)})"
