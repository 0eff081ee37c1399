"""Writes tiny checkpoints in further layouts, besides `stepprune_jax.testing` and `tiny_qwen`."""

import json
from pathlib import Path

import numpy as np
from shards import to_shards
from tiny_llava_next import MISTRAL, SIZES, tiny_llava_next
from tiny_qwen import tiny_qwen

from stepprune_jax import testing
from stepprune_jax.checkpoints import safetensors
from stepprune_jax.checkpoints.weight_files import read_folder
from stepprune_jax.models.llava import Llava
from stepprune_jax.models.weights import replace_prefix

# Prefixes of the published weight names, and their replacements in other layouts.
_NEW_NAMES = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model.language_model."),
    ("vision_tower.vision_model.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
_ORIGINAL_NAMES = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model."),
    ("multi_modal_projector.linear_1.", "model.mm_projector.0."),
    ("multi_modal_projector.linear_2.", "model.mm_projector.2."),
)
_NEW_QWEN_NAMES = (("model.", "model.language_model."), ("visual.", "model.visual."))
_ORIGINAL_FIELDS = {
    "architectures": ["LlavaLlamaForCausalLM"],
    "model_type": "llava_llama",
    "mm_vision_tower": "clip",
    "mm_projector_type": "mlp2x_gelu",
    "mm_vision_select_layer": -2,
    "mm_vision_select_feature": "patch",
    "image_aspect_ratio": "pad",
}


def rename(folder, names):
    """Renames a folder's weights by prefix, or removes them without names; returns the weights."""
    entries = read_folder(folder)
    tensors = {
        replace_prefix(name, names): safetensors.read_tensor(entry)
        for name, entry in entries.items()
    }
    for path in Path(folder).glob("*.safetensors*"):
        path.unlink()
    if names:
        testing.write_tensors(folder, tensors)
    return tensors


def new_llava(folder, **options):
    """Writes a LLaVA with the weight names of newer `transformers`."""
    testing.tiny_llava(folder, **options)
    rename(folder, _NEW_NAMES)
    return Path(folder)


def new_qwen(folder, **options):
    """Writes a Qwen2.5-VL with the weight names of newer `transformers`, in shards."""
    tiny_qwen(folder, **options)
    rename(folder, _NEW_QWEN_NAMES)
    to_shards(Path(folder), 3)
    return Path(folder)


def original_llava(folder, text=None, **options):
    """Writes a LLaVA-1.5 in the original layout, with its tower in the subfolder ``clip``."""
    folder, tokenizer = Path(folder), testing.tiny_tokenizer(image_token=False)
    clip = folder / "clip"
    testing.tiny_llava(folder, text={"vocab_size": len(tokenizer), **(text or {})}, **options)
    tensors = rename(folder, ())
    clip.mkdir()
    tower = {name: tensors.pop(name) for name in list(tensors) if Llava.is_vision_name(name)}
    testing.write_tensors(
        clip, {name.removeprefix("vision_tower."): tensor for name, tensor in tower.items()}
    )
    testing.write_tensors(
        folder, {replace_prefix(x, _ORIGINAL_NAMES): y for x, y in tensors.items()}
    )
    raw = json.loads((folder / "config.json").read_text())
    clip_config = {"model_type": "clip", "vision_config": raw["vision_config"]}
    (clip / "config.json").write_text(json.dumps(clip_config))
    (folder / "config.json").write_text(json.dumps({**raw["text_config"], **_ORIGINAL_FIELDS}))
    (folder / "preprocessor_config.json").rename(clip / "preprocessor_config.json")
    tokenizer.save_pretrained(folder)
    return folder


def new_next(folder, **options):
    """Writes a LLaVA-NeXT with the weight names of newer `transformers`."""
    tiny_llava_next(folder, **options)
    rename(folder, (*_NEW_NAMES, ("image_newline", "model.image_newline")))
    return Path(folder)


def original_next(folder, mistral=False, with_tower=True):
    """Writes a LLaVA-NeXT in the original layout, with its tower also in the subfolder ``clip``."""
    folder = original_llava(folder)
    weights, clip = rename(folder, ()), rename(folder / "clip", ())
    newline = np.random.default_rng(1).standard_normal(48, np.float32)
    tower_weights = {f"model.vision_tower.vision_tower.{name}": x for name, x in clip.items()}
    testing.write_tensors(
        folder, {**weights, **(tower_weights if with_tower else {}), "model.image_newline": newline}
    )
    testing.write_tensors(folder / "clip", clip)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {
        "image_aspect_ratio": "anyres",
        "mm_patch_merge_type": "spatial_unpad",
        "image_grid_pinpoints": SIZES,
        **(MISTRAL | {"model_type": "llava_mistral"} if mistral else {"model_type": "llava"}),
    }
    (folder / "config.json").write_text(json.dumps(raw))
    return folder
