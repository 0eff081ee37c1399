"""Published configurations of all supported variants are read as by `transformers`."""

import json

import pytest
import transformers

from stepprune_jax.checkpoints.folder import inspect_folder
from stepprune_jax.efficiency.model_shapes import KNOWN
from stepprune_jax.models.llava import Llava
from stepprune_jax.models.llava_next.backbone import (
    LlavaNext,
    LlavaNextLlama3,
    LlavaNextMistral,
    LlavaNextYi,
)
from stepprune_jax.models.qwen2_5_vl import Qwen2_5_VL
from stepprune_jax.models.qwen3_vl import Qwen3_VL

pytestmark = pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated:FutureWarning")

PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
CLIP = {
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "model_type": "clip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "projection_dim": 768,
    "vocab_size": 32000,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}
VICUNA = {
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "vocab_size": 32064,
}
YI = {
    "eos_token_id": 7,
    "hidden_size": 7168,
    "intermediate_size": 20480,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 56,
    "num_hidden_layers": 60,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 5000000.0,
    "use_cache": False,
    "vocab_size": 64064,
}
LLAMA_3 = {
    "bos_token_id": 128000,
    "eos_token_id": 128009,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 128320,
}
LLAMA_31 = {
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}


def next_config(text, image_token, **changes):
    """Returns the `config.json` of a LLaVA-NeXT in the Hugging Face layout."""
    return {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "ignore_index": -100,
        "image_grid_pinpoints": PINPOINTS,
        "image_seq_length": 576,
        "image_token_index": image_token,
        "model_type": "llava_next",
        "projector_hidden_act": "gelu",
        "text_config": text,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "use_image_newline_parameter": True,
        "vision_config": CLIP,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        **changes,
    }


QWEN_7B = KNOWN["qwen2.5-vl-7b"]
QWEN_TOWER = QWEN_7B["vision_config"]
QWEN_32B = QWEN_7B | {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "max_window_layers": 64,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "pad_token_id": 151643,
    "sliding_window": 32768,
    "vision_config": QWEN_TOWER
    | {"in_channels": 3, "intermediate_size": 3456, "out_hidden_size": 5120},
}
QWEN_72B = QWEN_7B | {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vision_config": QWEN_TOWER | {"intermediate_size": 3456, "out_hidden_size": 8192},
}
# `transformers` 4.53 writes the text fields at the top level and in `text_config`, where the ids of
# images are null.
QWEN_SAVED = QWEN_7B | {
    "text_config": {
        **{name: x for name, x in QWEN_7B.items() if not isinstance(x, dict)},
        "image_token_id": None,
        "layer_types": ["full_attention"] * 28,
        "model_type": "qwen2_5_vl_text",
        "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
        "sliding_window": None,
        "video_token_id": None,
    }
}
QWEN3_8B = KNOWN["qwen3-vl-8b"]
QWEN3_32B = QWEN3_8B | {
    "text_config": QWEN3_8B["text_config"]
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
    },
    "vision_config": QWEN3_8B["vision_config"] | {"out_hidden_size": 5120},
}
VARIANTS = {
    "llava-1.5-7b-hf": (Llava, KNOWN["llava-7b"]),
    "llava-v1.6-mistral-7b-hf": (LlavaNextMistral, next_config(MISTRAL, 32000)),
    "llava-v1.6-vicuna-7b-hf": (LlavaNext, next_config(VICUNA, 32000, pad_token_id=32001)),
    "llava-v1.6-34b-hf": (LlavaNextYi, next_config(YI, 64002)),
    "llama3-llava-next-8b-hf": (LlavaNextLlama3, next_config(LLAMA_3, 128256)),
    "with Llama 3.1": (LlavaNextLlama3, next_config(LLAMA_3 | LLAMA_31, 128256)),
    "Qwen2.5-VL-3B": (Qwen2_5_VL, KNOWN["qwen2.5-vl-3b"]),
    "Qwen2.5-VL-7B": (Qwen2_5_VL, QWEN_7B),
    "Qwen2.5-VL-7B saved by 4.53": (Qwen2_5_VL, QWEN_SAVED),
    "Qwen2.5-VL-32B": (Qwen2_5_VL, QWEN_32B),
    "Qwen2.5-VL-72B": (Qwen2_5_VL, QWEN_72B),
    "Qwen3-VL-2B": (Qwen3_VL, KNOWN["qwen3-vl-2b"]),
    "Qwen3-VL-4B": (Qwen3_VL, KNOWN["qwen3-vl-4b"]),
    "Qwen3-VL-8B": (Qwen3_VL, QWEN3_8B),
    "Qwen3-VL-32B": (Qwen3_VL, QWEN3_32B),
}
PROCESSORS = {
    "llava": {"image_processor_type": "CLIPImageProcessor", "size": 336, "crop_size": 336},
    "llava_next": {
        "image_grid_pinpoints": PINPOINTS,
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"shortest_edge": 336},
        "crop_size": {"height": 336, "width": 336},
    },
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "max_pixels": 12845056,
        "min_pixels": 3136,
        "patch_size": 14,
    },
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 16,
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    },
}


def write(folder, raw, generation=None):
    """Writes a checkpoint folder without weights."""
    for name, value in (
        ("config.json", raw),
        ("preprocessor_config.json", PROCESSORS.get(raw["model_type"], PROCESSORS["llava"])),
        *([("generation_config.json", generation)] if generation else []),
    ):
        (folder / name).write_text(json.dumps(value))
    return folder


# Our names of fields, and those of `transformers`.
FIELDS = {name: name for name in ("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps")}
FIELDS |= {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
FIELDS |= {"num_kv_heads": "num_key_value_heads", "max_positions": "max_position_embeddings"}


@pytest.mark.parametrize("name", VARIANTS)
def test_published_fields_are_read_as_by_transformers(tmp_path, name):
    expected_class, raw = VARIANTS[name]
    backbone = inspect_folder(write(tmp_path, raw)).backbone
    assert type(backbone) is expected_class
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    text, our_text = config.get_text_config(), backbone.config.text
    rope = text.rope_parameters
    for ours, theirs in FIELDS.items():
        assert getattr(our_text, ours) == getattr(text, theirs), ours
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    assert (our_text.head_dim, our_text.rope_theta) == (head_dim, rope["rope_theta"])
    assert our_text.tie_embeddings == config.tie_word_embeddings
    assert list(our_text.rope_sections) == rope.get("mrope_section", [])
    scaling = our_text.rope_scaling
    assert (scaling.kind if scaling else "default") == rope["rope_type"]
    assert backbone.config.image_token_id == config.image_token_id
    layers = getattr(config.vision_config, "num_hidden_layers", None) or config.vision_config.depth
    assert backbone.config.vision.num_layers == layers


QWEN_1_5 = LLAMA_3 | {"model_type": "qwen2", "rope_theta": 1000000.0, "vocab_size": 152064}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
UNSUPPORTED = {
    "llava-next-72b-hf": (next_config(QWEN_1_5, 151646), "model_type is 'qwen2'"),
    "Qwen3-VL-30B-A3B": (QWEN3_8B | {"model_type": "qwen3_vl_moe"}, "a mixture of experts"),
    "Qwen3-VL-8B-FP8": (QWEN3_8B | FP8, r"quantized weights \('fp8'\)"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_variants_are_refused_with_one_line(tmp_path, name):
    raw, message = UNSUPPORTED[name]
    with pytest.raises(ValueError, match=message) as error:
        inspect_folder(write(tmp_path, raw))
    assert "\n" not in str(error.value)


# Fields of the authors' layout: the tower is in another folder, pinpoints are (width, height), and
# there is no image token.
ORIGINAL = {
    "image_aspect_ratio": "anyres",
    "image_crop_resolution": 224,
    "image_grid_pinpoints": PINPOINTS,
    "image_split_resolution": 224,
    "mm_hidden_size": 1024,
    "mm_patch_merge_type": "spatial_unpad",
    "mm_projector_type": "mlp2x_gelu",
    "mm_resampler_type": None,
    "mm_use_im_start_end": False,
    "mm_vision_select_feature": "patch",
    "mm_vision_select_layer": -2,
    "mm_vision_tower": "clip",
    "rope_scaling": None,
    "unfreeze_mm_vision_tower": True,
}


@pytest.mark.parametrize(
    ("expected_class", "text"),
    [
        (LlavaNext, VICUNA | {"model_type": "llava", "vocab_size": 32000}),
        (LlavaNextMistral, MISTRAL | {"model_type": "llava_mistral", "vocab_size": 32000}),
        (LlavaNextYi, YI | {"model_type": "llava", "vocab_size": 64000}),
        (LlavaNextLlama3, LLAMA_3 | {"model_type": "llava_llama", "vocab_size": 128256}),
    ],
)
def test_files_in_the_layout_of_the_authors_give_the_same_model(tmp_path, expected_class, text):
    tower = tmp_path / "clip"
    tower.mkdir()
    write(tower, {"model_type": "clip", "vision_config": CLIP})
    generation = {"eos_token_id": [128001, 128009]}
    source = inspect_folder(write(tmp_path, text | ORIGINAL, generation))
    assert type(source.backbone) is expected_class and source.vision_folder == tower
    # A Yi adds the end of its turns, which a Llama 3 names already.
    turn_end = (7,) if expected_class is LlavaNextYi else ()
    assert source.config.eos_token_ids == (128001, 128009, *turn_end)
    assert source.config.max_image_tokens == 2928 and source.config.image_token_id is None


@pytest.mark.parametrize(
    ("text", "image_token", "end"), [(LLAMA_3, 128256, 128009), (YI, 64000, 7)]
)
def test_the_end_of_a_turn_ends_an_answer(tmp_path, text, image_token, end):
    """The file names only the end of a text."""
    raw = next_config(text | {"eos_token_id": 2}, image_token)
    assert inspect_folder(write(tmp_path, raw)).config.eos_token_ids == (2, end)
