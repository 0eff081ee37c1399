"""Fields of a folder that no supported model can have are refused by file and name."""

import json
import math
import re

import pytest

from stepprune_jax.checkpoints.folder import inspect_folder

CONFIG, PROCESSOR, GENERATION = (
    f"{name}.json" for name in ("config", "preprocessor_config", "generation_config")
)
TEXT, VISION = "text_config", "vision_config"
YARN = {"rope_scaling": {"type": "yarn", "factor": 4.0}}
ORIGINAL = {"mm_projector_type": "mlp2x_gelu"}
# The last field is the wrong one.
CASES = [
    *(
        ("llava", CONFIG, fields)
        for fields in (
            {"model_type": "llava_next"},
            {"tie_word_embeddings": "no"},
            {"eos_token_id": [2, None]},
            {"vision_feature_layer": -30},
            {"quantization_config": "int4"},
            {"vision_feature_select_strategy": "full"},
            {VISION: None},
            {VISION: {"model_type": "siglip"}},
            {VISION: {"image_size": [224, 336]}},
            {VISION: {"patch_size": 448}},
            {TEXT: {"num_hidden_layers": 10**9}},
            {TEXT: {"rms_norm_eps": math.nan}},
            {TEXT: YARN},
            {TEXT: {"rope_scaling": {"type": "linear"}}},
            {TEXT: {"attention_bias": True}},
        )
    ),
    ("llava", GENERATION, {"repetition_penalty": 0}),
    ("qwen", GENERATION, {"eos_token_id": [2, "</s>"]}),
    ("llava", PROCESSOR, {"do_normalize": False}),
    ("llava", PROCESSOR, {"size": {"height": 60}}),
    ("llava", PROCESSOR, {"crop_size": 25}),
    ("llava", PROCESSOR, {"image_std": [1, math.nan, 1]}),
    ("llava", PROCESSOR, {"resample": 9}),
    ("llava", PROCESSOR, {"image_processor_type": "LlavaNextImageProcessor"}),
    ("original", CONFIG, {"mm_vision_tower": True}),
    ("original", CONFIG, {"mm_projector_type": "linear"}),
    ("original", CONFIG, ORIGINAL | {"mm_vision_select_feature": "cls_patch"}),
    ("qwen", CONFIG, YARN),
    ("qwen", CONFIG, {VISION: None}),
    ("qwen", PROCESSOR, {"patch_size": 14}),
    ("qwen", PROCESSOR, {"min_pixels": 9999}),
    ("qwen", PROCESSOR, {"max_pixels": 10**14}),
]


@pytest.mark.parametrize(("kind", "file", "fields"), CASES)
def test_a_field_is_refused_by_name(tmp_path, llava_folder, qwen_folder, kind, file, fields):
    published = qwen_folder if kind == "qwen" else llava_folder
    known = {name: published / name for name in (CONFIG, PROCESSOR, GENERATION)}
    files = {name: json.loads(path.read_text()) for name, path in known.items() if path.is_file()}
    if kind == "original":
        files[CONFIG] = {"model_type": "llava_llama", "mm_vision_tower": str(llava_folder)}
    raw = files.setdefault(file, {})
    for name, value in fields.items():
        part = name in (TEXT, VISION) and value
        raw[name] = {**raw[name], **value} if part else value
        wrong = [*value][-1] if part else name
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    named = rf"^{re.escape(str(tmp_path))}.*({wrong}|{value!r})"
    with pytest.raises(ValueError, match=named) as error:
        found = inspect_folder(tmp_path)
        found.config.family.image_settings(tmp_path)
    assert "\n" not in str(error.value)
