"""Shapes of the models of the efficiency table, by name, and of any folder or config.json."""

import pathlib

from stepprune_jax.data.json_files import read_json_object
from stepprune_jax.models.config import ModelConfig
from stepprune_jax.models.families import find_family
from stepprune_jax.models.images import naming
from stepprune_jax.user_input import check

_VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_TEXT = {"vocab_size": 32064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
_WIDE = {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
}

# The language model has some fifteen times the operations of the tower at 640 tokens, where that of
# LLaVA-7B has twenty; 576 tokens an image as there, and 1.6 GB in float32.
_SMALL_VISION = _VISION | {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
}
_SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}

MODELS = {
    "llava-7b": {"model_type": "llava", "vision_config": _VISION, "text_config": _TEXT},
    "llava-13b": {"model_type": "llava", "vision_config": _VISION, "text_config": _TEXT | _WIDE},
    "mid": {"model_type": "llava", "vision_config": _SMALL_VISION, "text_config": _TEXT | _SMALL},
}
_QWEN_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
}
_QWEN = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": _QWEN_VISION,
    "vocab_size": 152064,
}
_QWEN_SMALL = {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vision_config": _QWEN_VISION | {"out_hidden_size": 2048},
    "vocab_size": 151936,
}
_QWEN_LARGE = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vision_config": _QWEN_VISION | {"intermediate_size": 3456, "out_hidden_size": 8192},
}
# The text part of "mid" with grouped key heads, and a tower of its widths.
_QWEN_MID = {
    **{key: value for key, value in _SMALL.items() if key != "num_attention_heads"},
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vision_config": _QWEN_VISION
    | {"depth": 12, "hidden_size": 384, "intermediate_size": 1024, "num_heads": 6}
    | {"fullatt_block_indexes": [2, 5, 8, 11], "out_hidden_size": 1024},
    "vocab_size": 32064,
    "image_token_id": 32063,
}
QWEN_MODELS = {
    "qwen-mid": _QWEN | _QWEN_MID,
    "qwen2.5-vl-7b": _QWEN,
    "qwen2.5-vl-3b": _QWEN | _QWEN_SMALL,
    "qwen2.5-vl-72b": _QWEN | _QWEN_LARGE,
}


def model_config(name: str) -> ModelConfig:
    """Returns the config of a known model, or of a folder or file in the Hugging Face layout."""
    known = MODELS | QWEN_MODELS
    path = pathlib.Path(name)
    path = path / "config.json" if path.is_dir() else path
    given = name in known or path.is_file()
    check((given, f"--model {name!r} is neither a file nor one of {', '.join(known)}"))
    raw = known[name] if name in known else read_json_object(path)
    with naming(f"--model {name!r}"):
        return find_family(raw, f"--model {name!r}").read_config(raw, None)
