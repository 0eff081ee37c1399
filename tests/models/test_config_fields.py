"""Unsupported fields of a checkpoint folder are refused with the file and the field's name."""

import json
import math
import re

import layouts
import numpy as np
import pytest
from PIL import Image
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from stepprune_jax.checkpoints.folder import inspect_folder

CONFIG, PROCESSOR, GENERATION = (
    f"{name}.json" for name in ("config", "preprocessor_config", "generation_config")
)
TEXT, VISION = "text_config", "vision_config"
YARN = {"rope_scaling": {"type": "yarn", "factor": 4.0}}
ORIGINAL = {"mm_projector_type": "mlp2x_gelu"}
# Fields of the original layout that change answers and are not supported.
REFUSED = {
    "mm_vision_select_feature": "cls_patch",
    "mm_use_im_start_end": True,
    "mm_patch_merge_type": "spatial_unpad",
    "mm_resampler_type": "perceiver",
    "mm_hidden_size": 1024,
    "image_aspect_ratio": "anyres_max_9",
    "s2": True,
}
# Fields of a later checkpoint. They are refused before its tower is read.
TILED = ORIGINAL | {
    "mm_vision_tower": "google/siglip-so400m-patch14-384",
    "mm_patch_merge_type": "spatial_unpad",
}
PINPOINTS = {"image_grid_pinpoints": [[384, 768], [768, 384]]}
# Fields of the original layout that do not change answers.
ACCEPTED = {
    "mm_use_im_patch_token": True,
    "mm_patch_merge_type": "flat",
    "mm_resampler_type": None,
    "mm_hidden_size": 32,
    "mm_use_im_start_end": False,
    "image_grid_pinpoints": [[336, 672]],
    "tune_mm_mlp_adapter": True,
    "unfreeze_mm_vision_tower": True,
}
# Layout, file and fields of each case. The last field is unsupported.
CASES = [
    *(
        ("llava", CONFIG, fields)
        for fields in (
            {"model_type": "llava_onevision"},
            {"tie_word_embeddings": "no"},
            {"eos_token_id": [2, None]},
            {"vision_feature_layer": -30},
            {"vision_feature_layer": [-2, -5]},
            {"multimodal_projector_bias": False},
            {"projector_hidden_act": "relu"},
            {"quantization_config": "int4"},
            {"quantization_config": {"load_in_8bit": True}},
            {"vision_feature_select_strategy": "full"},
            {VISION: None},
            {VISION: {"model_type": "siglip"}},
            # Pixtral and LLaVA-Interleave: the first field is valid for these models.
            {"vision_feature_select_strategy": "full", VISION: {"model_type": "pixtral"}},
            {"vision_feature_select_strategy": "full", TEXT: {"model_type": "qwen2"}},
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
    *(
        ("llava", PROCESSOR, {name: value})
        for name, value in (
            *((f"do_{step}", False) for step in ("resize", "center_crop", "rescale", "normalize")),
            ("do_pad", "no"),
            ("default_to_square", True),
            ("use_square_size", True),
            ("rescale_factor", "1/255"),
        )
    ),
    ("llava", PROCESSOR, {"size": {"shortest_edge": 24, "longest_edge": 48}}),
    ("llava", PROCESSOR, {"size": {"height": 60}}),
    ("llava", PROCESSOR, {"crop_size": 25}),
    ("llava", PROCESSOR, {"image_std": [1, math.nan, 1]}),
    ("llava", PROCESSOR, {"resample": 9}),
    ("llava", PROCESSOR, {"image_processor_type": "LlavaNextImageProcessor"}),
    ("original", CONFIG, {"mm_vision_tower": True}),
    ("original", CONFIG, {"mm_projector_type": "linear"}),
    *(("original", CONFIG, ORIGINAL | {name: value}) for name, value in REFUSED.items()),
    ("original", CONFIG, TILED | PINPOINTS | {"image_aspect_ratio": "anyres_max_9"}),
    *(
        ("original", CONFIG, TILED | {"image_aspect_ratio": "anyres"} | fields)
        for fields in (
            PINPOINTS | {"model_type": "llava_qwen"},
            {"image_grid_pinpoints": "(1x1),...,(6x6)"},
        )
    ),
    ("qwen", CONFIG, YARN),
    ("qwen", CONFIG, {VISION: None}),
    *(("qwen", PROCESSOR, {f"do_{step}": False}) for step in ("resize", "rescale", "normalize")),
    ("qwen", PROCESSOR, {"patch_size": 14}),
    ("qwen", PROCESSOR, {"size": 400}),
    ("qwen", PROCESSOR, {"min_pixels": 9999}),
    ("qwen", PROCESSOR, {"max_pixels": 10**14}),
]


@pytest.mark.parametrize(("kind", "file", "fields"), CASES)
def test_a_field_is_refused_by_name(tmp_path, llava_folder, qwen_folder, kind, file, fields):
    published = qwen_folder if kind == "qwen" else llava_folder
    paths = {name: published / name for name in (CONFIG, PROCESSOR, GENERATION)}
    files = {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}
    if kind == "original":
        files[CONFIG] = {"model_type": "llava_llama", "mm_vision_tower": str(llava_folder)}
    raw = files.setdefault(file, {})
    for name, value in fields.items():
        is_nested = name in (TEXT, VISION) and value
        raw[name] = {**raw[name], **value} if is_nested else value
        wrong_field = [*value][-1] if is_nested else name
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    message = rf"^{re.escape(str(tmp_path))}.*({wrong_field}|{value!r})"
    with pytest.raises(ValueError, match=message) as error:
        source = inspect_folder(tmp_path)
        source.backbone.image_settings(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("aspect", "is_padded"), [("pad", True), ("square", False), (None, False)])
def test_the_configuration_of_the_original_layout_decides_the_padding(tmp_path, aspect, is_padded):
    """The original program ignores the padding field of the tower's image processor."""
    folder = layouts.original_llava(tmp_path)
    raw = json.loads((folder / CONFIG).read_text()) | ACCEPTED | {"image_aspect_ratio": aspect}
    (folder / CONFIG).write_text(json.dumps(raw))
    source = inspect_folder(folder)
    backbone, settings = source.backbone, source.backbone.image_settings(folder / "clip")
    image = Image.linear_gradient("L").resize((40, 20)).convert("RGB")
    theirs = LlavaImageProcessorPil(do_pad=is_padded, size=24, crop_size=24)(image)["pixel_values"]
    for variant in (settings, settings._replace(pad=not settings.pad)):
        ours = backbone.normalise(backbone.preprocess(variant, [image]))
        np.testing.assert_array_equal(ours, theirs)
        files = backbone.hf_processor(variant)
        assert {entry["do_pad"] for entry in _entries(files)} == {is_padded}


def _entries(files):
    return files["preprocessor_config.json"], files["processor_config.json"]["image_processor"]
