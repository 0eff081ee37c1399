"""Models and policies that are part of the package, by name.

The models are a small LLaVA and a small Qwen2.5-VL, trained on drawings of shapes. Each has one
policy, which has the name of its model.
"""

from collections.abc import Iterable
from pathlib import Path

from stepprune_jax.data.json_files import JsonObject, read_json_object

ASSETS = Path(__file__).resolve().parents[1] / "assets"
SHAPES_MODEL, SHAPES_QWEN = ASSETS / "shapes_llava", ASSETS / "shapes_qwen"
MODELS = {"shapes": SHAPES_MODEL, "shapes_qwen": SHAPES_QWEN}
POLICIES = ASSETS / "policies"
# Published models whose configuration is in `assets/configs`, by hub id.
PUBLISHED_CONFIGS = {
    "llava-hf/llava-1.5-7b-hf": "llava-7b",
    "llava-hf/llava-1.5-13b-hf": "llava-13b",
    "llava-hf/llava-v1.6-vicuna-7b-hf": "llava-next-7b",
    "Qwen/Qwen2.5-VL-3B-Instruct": "qwen2.5-vl-3b",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2.5-vl-7b",
    "Qwen/Qwen3-VL-2B-Instruct": "qwen3-vl-2b",
    "Qwen/Qwen3-VL-4B-Instruct": "qwen3-vl-4b",
    "Qwen/Qwen3-VL-8B-Instruct": "qwen3-vl-8b",
}
_SUFFIX = ".safetensors"


def policy_names() -> list[str]:
    """Returns the names of the shipped policies in alphabetical order."""
    return sorted(path.stem for path in POLICIES.glob(f"*{_SUFFIX}"))


def find_shipped_model(name: str | Path) -> Path | None:
    """Returns the folder of a shipped model, or None if no model has this name."""
    return MODELS.get(str(name))


def read_shipped_config(name: str) -> JsonObject:
    """Reads the `config.json` of a model whose weights are not shipped, such as "llava-7b"."""
    return read_json_object(ASSETS / "configs" / f"{name}.json")


def find_shipped_policy(name: str | Path) -> Path | None:
    """Returns the file of a shipped policy, or None if no policy has this name."""
    return POLICIES / f"{name}{_SUFFIX}" if str(name) in policy_names() else None


def or_shipped(missing: str, text: str | Path, kind: str, names: Iterable[str]) -> str:
    """Extends a message about a missing file by the names of shipped models or policies.

    Args:
        missing: the message, such as "no folder NAME".
        text: the name that the user gave. For a path or a hub id, the message stays unchanged.
        kind: "model" or "policy".
        names: names of the shipped models or policies.
    """
    if "/" in str(text) or ":" in str(text):
        return missing
    return f"{missing}, nor a shipped {kind} of that name ({', '.join(names)})"
