import dataclasses

import pytest

from stepprune_jax.models.config import LlamaConfig, RopeScaling
from stepprune_jax.models.llava.config import ClipConfig, LlavaConfig

# The fields of the published conversion of LLaVA-v1.5-7B; all others are defaults.
LLAVA_7B = {
    "model_type": "llava",
    "image_token_index": 32000,
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32064,
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}


def test_the_published_7b_file_gives_its_shape():
    config = LlavaConfig.from_hf(LLAVA_7B)
    assert config.vision == ClipConfig(1024, 4096, 24, 16, 336, 14)
    assert config.text == LlamaConfig(
        32064, 4096, 11008, 32, 32, 32, 128, 10000.0, 1e-5, max_positions=4096
    )
    assert config.max_image_tokens == config.vision.num_patches == 576
    assert (config.image_token_id, config.pad_token_id) == (32000, 32001)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert hash(config) == hash(LlavaConfig.from_hf(LLAVA_7B))


def test_the_original_layout_gives_the_same_shape():
    original = {
        **LLAVA_7B["text_config"],
        "model_type": "llava",
        "vocab_size": 32000,
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_layer": -2,
        "mm_vision_select_feature": "patch",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = LlavaConfig.from_original(original, {"vision_config": LLAVA_7B["vision_config"]})
    reference = LlavaConfig.from_hf(LLAVA_7B)
    text = dataclasses.replace(reference.text, vocab_size=32000)
    assert config == dataclasses.replace(reference, text=text, image_token_id=None, pad_token_id=0)


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeScaling("linear", 2.0)),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
        ),
        ({"rope_scaling": None, "rope_theta": 10000}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, None),
    ],
)
def test_both_generations_of_rope_fields_are_read(fields, scaling):
    config = LlamaConfig.from_hf(fields)
    assert config.rope_scaling == scaling
    assert config.rope_theta == fields.get("rope_parameters", {}).get("rope_theta", 1e4)
