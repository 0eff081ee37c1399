"""Fields of a folder that no supported model can have are refused by file and name."""

import json
import math
import re

import pytest

from stepprune_jax.checkpoints.folder import inspect_folder

CONFIG, PROCESSOR, GENERATION = (
    f"{name}.json" for name in ("config", "preprocessor_config", "generation_config")
)
YARN = {"type": "yarn", "factor": 4.0}
CASES = [
    ("llava", CONFIG, {"model_type": "llava_next"}, r"llava_next.*supported: LLaVA-1\.5"),
    ("llava", CONFIG, {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ("llava", CONFIG, {"eos_token_id": [2, None]}, "eos_token_id"),
    ("llava", CONFIG, {"vision_config": None}, "vision_config is missing"),
    ("llava", CONFIG, {"vision_feature_layer": -30}, "-30 is outside a tower of 3"),
    ("llava", CONFIG, {"quantization_config": "int4"}, "'int4'"),
    ("llava", CONFIG, {"vision_feature_select_strategy": "full"}, "strategy is 'full', expected"),
    ("llava", GENERATION, {"repetition_penalty": 0}, "repetition_penalty"),
    ("llava", GENERATION, {"repetition_penalty": math.inf}, "repetition_penalty"),
    *(
        ("llava", CONFIG, {part: {field: value}}, f"{part}: .*{message}")
        for part, field, value, message in (
            ("text_config", "num_hidden_layers", 10**9, "num_hidden_layers"),
            ("text_config", "rms_norm_eps", math.nan, "rms_norm_eps"),
            ("text_config", "rope_scaling", YARN, "rope_type is 'yarn'"),
            ("text_config", "rope_scaling", {"type": "linear"}, "factor is missing"),
            ("text_config", "rope_scaling", {"type": "linear", "factor": math.inf}, "factor"),
            ("text_config", "attention_bias", True, "attention_bias is True"),
            ("text_config", "num_key_value_heads", 5, "heads are not a multiple of 5"),
            ("vision_config", "model_type", "siglip", "model_type is 'siglip'"),
            ("vision_config", "image_size", [224, 336], "expected a square"),
            ("vision_config", "image_size", 10**6, "image_size"),
            ("vision_config", "patch_size", 448, "image_size 24 is smaller than patch_size 448"),
        )
    ),
    ("llava", PROCESSOR, {"image_processor_type": "LlavaNextImageProcessor"}, "unsupported"),
    ("llava", PROCESSOR, {"size": {"shortest_edge": 0.5}}, "size"),
    ("llava", PROCESSOR, {"crop_size": 1_000_000}, "crop_size"),
    ("llava", PROCESSOR, {"image_std": [1, math.nan, 1]}, "image_std"),
    ("llava", PROCESSOR, {"resample": 9}, "resample"),
    ("original", CONFIG, {"mm_projector_type": "linear"}, "mm_projector_type is 'linear'"),
    (
        "original",
        CONFIG,
        {"mm_projector_type": "mlp2x_gelu", "mm_vision_select_feature": "cls_patch"},
        "mm_vision_select_feature is 'cls_patch', expected 'patch'",
    ),
    ("qwen", CONFIG, {"rope_scaling": YARN}, "rope_scaling"),
    ("qwen", CONFIG, {"vision_config": None}, "vision_config"),
    ("qwen", PROCESSOR, {"patch_size": 14}, "patch_size"),
    ("qwen", PROCESSOR, {"min_pixels": 9999}, "min_pixels"),
    ("qwen", PROCESSOR, {"max_pixels": 10**14}, "max_pixels"),
]


@pytest.mark.parametrize(("kind", "file", "fields", "message"), CASES)
def test_a_field_is_refused_by_name(
    tmp_path, llava_folder, qwen_folder, kind, file, fields, message
):
    published = qwen_folder if kind == "qwen" else llava_folder
    known = {name: published / name for name in (CONFIG, PROCESSOR, GENERATION)}
    files = {name: json.loads(path.read_text()) for name, path in known.items() if path.is_file()}
    if kind == "original":
        files[CONFIG] = {"model_type": "llava_llama", "mm_vision_tower": str(llava_folder)}
    raw = files.setdefault(file, {})
    for name, value in fields.items():
        part = name in ("text_config", "vision_config") and value
        raw[name] = {**raw[name], **value} if part else value
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(tmp_path))}.*{message}") as error:
        found = inspect_folder(tmp_path)
        found.config.family.image_settings(tmp_path)
    assert "\n" not in str(error.value)
