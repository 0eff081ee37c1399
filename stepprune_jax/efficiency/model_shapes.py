"""Shapes of the models of the efficiency table, by name, and of any folder or config.json.

"mid" and "qwen-mid" are made up. The language model of "mid" has some fifteen times the operations
of its tower at 640 tokens, where that of LLaVA-7B has twenty; 576 tokens an image as there, and
1.6 GB in float32. "qwen-mid" is the same with grouped key heads, and a tower of its widths.
"""

import pathlib

from stepprune_jax.checkpoints.shipped import ASSETS
from stepprune_jax.data.json_files import JsonObject, read_json_object
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.families import find_family
from stepprune_jax.user_input import naming, require


def _read(*names: str) -> dict[str, JsonObject]:
    """Reads what a config.json must have of each model."""
    return {name: read_json_object(ASSETS / "configs" / f"{name}.json") for name in names}


MODELS = _read("llava-7b", "llava-13b", "mid")
QWEN_MODELS = _read(
    "qwen-mid", "qwen2.5-vl-7b", "qwen2.5-vl-3b", "qwen3-vl-8b", "qwen3-vl-4b", "qwen3-vl-2b"
)
TILED_MODELS = _read("llava-next-7b")
KNOWN = MODELS | QWEN_MODELS | TILED_MODELS


def find_backbone(name: str) -> Backbone:
    """Returns a known model, or that of a folder or file in the Hugging Face layout."""
    path = pathlib.Path(name)
    path = path / "config.json" if path.is_dir() else path
    given = name in KNOWN or path.is_file()
    require(given, f"--model {name!r} is neither a file nor one of {', '.join(KNOWN)}")
    raw = KNOWN[name] if name in KNOWN else read_json_object(path)
    with naming(f"--model {name!r}"):
        return find_family(raw, f"--model {name!r}").read(raw, None)
