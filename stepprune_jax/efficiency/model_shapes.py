"""Model shapes for efficiency tables, by name or from any folder or config.json.

"mid" and "qwen-mid" are synthetic shapes. "mid" has 576 tokens per image, as LLaVA-7B has, and
1.6 GB of weights in float32. At 640 tokens, its language model has about 15 times the operations of
its tower; the ratio of LLaVA-7B is 20. "qwen-mid" is "mid" with grouped key heads and a Qwen tower.
"""

import pathlib

from stepprune_jax.checkpoints.shipped import read_shipped_config
from stepprune_jax.data.json_files import JsonObject, read_json_object
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.families import find_family
from stepprune_jax.user_input import UserError, naming


def _read_configs(*names: str) -> dict[str, JsonObject]:
    """Reads the config.json files that are shipped for the named models."""
    return {name: read_shipped_config(name) for name in names}


MODELS = _read_configs("llava-7b", "llava-13b", "mid")
KNOWN = MODELS | _read_configs(
    *("qwen-mid", "qwen2.5-vl-7b", "qwen2.5-vl-3b", "qwen3-vl-8b", "qwen3-vl-4b", "qwen3-vl-2b"),
    "llava-next-7b",
)


def find_backbone(name: str) -> Backbone:
    """Returns a model without weights, from the value of --model.

    Args:
        name: a name in `KNOWN`, a config.json, or a folder with a config.json.

    Raises:
        UserError: there is no such model, or its configuration is not supported.
    """
    path = pathlib.Path(name)
    config_file = path / "config.json" if path.is_dir() else path
    if name not in KNOWN and not config_file.is_file():
        raise UserError(f"--model {name!r} is neither a file nor one of {', '.join(KNOWN)}")
    config_fields = KNOWN[name] if name in KNOWN else read_json_object(config_file)
    with naming(f"--model {name!r}"):
        return find_family(config_fields, f"--model {name!r}").read(config_fields, None)
