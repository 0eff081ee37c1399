import dataclasses

import pytest

from stepprune_jax.efficiency.model_shapes import MODELS
from stepprune_jax.models.config import LlamaConfig, RopeScaling
from stepprune_jax.models.llava.config import ClipConfig, LlavaConfig

PUBLISHED = MODELS["llava-7b"]


def test_the_published_7b_configuration_is_parsed():
    config = LlavaConfig.from_hf(PUBLISHED)
    assert config.vision == ClipConfig(1024, 4096, 24, 16, 336, 14)
    assert config.text == LlamaConfig(
        32064, 4096, 11008, 32, 32, 32, 128, 10000.0, 1e-5, max_positions=4096
    )
    assert config.max_image_tokens == config.vision.num_patches == 576
    special_ids = (config.image_token_id, config.bos_token_id, config.eos_token_ids)
    assert special_ids == (32000, 1, (2,))


def test_the_original_layout_gives_an_equal_configuration():
    original = {
        **PUBLISHED["text_config"],
        "model_type": "llava",
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_layer": -2,
        "mm_vision_select_feature": "patch",
        "mm_hidden_size": 1024,
        "image_aspect_ratio": "pad",
        "pad_token_id": 0,
    }
    config = LlavaConfig.from_original(original, PUBLISHED)
    published = LlavaConfig.from_hf(PUBLISHED)
    assert config == dataclasses.replace(
        published, image_token_id=None, pad_token_id=0, pad_images=True
    )


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5},
            RopeScaling("linear", 2.0),
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, None),
    ],
)
def test_both_generations_of_rope_fields_are_read(fields, scaling):
    config = LlamaConfig.from_hf(fields)
    assert (config.rope_scaling, config.rope_theta) == (scaling, 5e5)
