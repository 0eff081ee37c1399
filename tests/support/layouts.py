"""Tiny checkpoints in other layouts than those of `stepprune_jax.testing` and `tiny_qwen`."""

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
from stepprune_jax.models.weights import renamed

# The published weight names in other dialects.
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
    """Renames the weights of a folder; without names, takes them out of it."""
    entries = read_folder(folder)
    tensors = {renamed(x, names): safetensors.read_tensor(e) for x, e in entries.items()}
    for path in Path(folder).glob("*.safetensors*"):
        path.unlink()
    if names:
        testing.write_tensors(folder, tensors)
    return tensors


def new_llava(folder, **options):
    """A LLaVA with the names of newer `transformers`."""
    testing.tiny_llava(folder, **options)
    rename(folder, _NEW_NAMES)
    return Path(folder)


def new_qwen(folder, **options):
    """A Qwen2.5-VL with the names of newer `transformers`, in shards."""
    tiny_qwen(folder, **options)
    rename(folder, _NEW_QWEN_NAMES)
    to_shards(Path(folder), 3)
    return Path(folder)


def original_llava(folder, text=None, **options):
    """LLaVA-v1.5 as its authors published it, with a CLIP folder ``clip`` inside."""
    folder, tokenizer = Path(folder), testing.tiny_tokenizer(image_token=False)
    clip = folder / "clip"
    testing.tiny_llava(folder, text={"vocab_size": len(tokenizer), **(text or {})}, **options)
    tensors = rename(folder, ())
    clip.mkdir()
    tower = {name: tensors.pop(name) for name in list(tensors) if Llava.is_vision_name(name)}
    testing.write_tensors(
        clip, {name.removeprefix("vision_tower."): tensor for name, tensor in tower.items()}
    )
    testing.write_tensors(folder, {renamed(x, _ORIGINAL_NAMES): y for x, y in tensors.items()})
    raw = json.loads((folder / "config.json").read_text())
    about = {"model_type": "clip", "vision_config": raw["vision_config"]}
    (clip / "config.json").write_text(json.dumps(about))
    (folder / "config.json").write_text(json.dumps({**raw["text_config"], **_ORIGINAL_FIELDS}))
    (folder / "preprocessor_config.json").rename(clip / "preprocessor_config.json")
    tokenizer.save_pretrained(folder)
    return folder


def new_next(folder, **options):
    """A LLaVA-NeXT with the names of newer `transformers`."""
    tiny_llava_next(folder, **options)
    rename(folder, (*_NEW_NAMES, ("image_newline", "model.image_newline")))
    return Path(folder)


def original_next(folder, mistral=False, with_tower=True):
    """LLaVA-NeXT as its authors published it: with the tower, of which there is a folder, too."""
    folder = original_llava(folder)
    stored, clip = rename(folder, ()), rename(folder / "clip", ())
    newline = np.random.default_rng(1).standard_normal(48, np.float32)
    own = {f"model.vision_tower.vision_tower.{name}": x for name, x in clip.items()}
    testing.write_tensors(
        folder, {**stored, **(own if with_tower else {}), "model.image_newline": newline}
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
