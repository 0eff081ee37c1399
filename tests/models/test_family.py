"""What differs between families beside their programs, and how a folder finds its own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax import testing
from stepprune_jax.models.families import FAMILIES, find_family
from stepprune_jax.models.llava import LLAVA, LlavaConfig
from stepprune_jax.models.qwen2_5_vl import QWEN2_5_VL, QwenConfig
from stepprune_jax.models.vlm import abstract_params


def test_a_folder_is_of_the_family_whose_configuration_it_has():
    raw = testing.tiny_hf_config()
    qwen = testing.tiny_qwen_config(testing.qwen_tokenizer())
    for family, config, fields in (
        (LLAVA, LlavaConfig.from_hf(raw), raw),
        (QWEN2_5_VL, QwenConfig.from_hf(qwen), qwen),
    ):
        assert find_family(fields, "here") is family is config.family is FAMILIES[family.name]
        assert family.read_config(fields, None) == config
        for ends in (config.eos_token_ids, (), (5,), (5, 6, 7)):
            config = dataclasses.replace(config, eos_token_ids=ends)
            assert family.read_config(config.to_hf("float32"), None) == config
    original = {"model_type": "llava_llama", "mm_vision_tower": "clip"}
    assert find_family(original, "here").vision_folder(original) == "clip"
    assert LLAVA.vision_folder(raw) is None
    assert LLAVA.vision_folder({"mm_projector_type": "mlp2x_gelu"}) == ""
    with pytest.raises(ValueError, match="mm_vision_tower is True, expected a folder or hub id"):
        LLAVA.vision_folder({"mm_vision_tower": True})


def test_images_have_as_many_tokens_as_their_grid_says():
    config = LlavaConfig.from_hf(testing.tiny_hf_config())
    grid = LLAVA.grids(config, np.zeros((2, 3, 24, 24), np.float32))
    np.testing.assert_array_equal(grid, [[3, 3], [3, 3]])
    for kind in (np.asarray, jnp.asarray):
        np.testing.assert_array_equal(LLAVA.num_tokens(config, kind(grid)), 9)
    assert config.max_image_tokens == 9
    extent = LLAVA.image_positions(config, jnp.asarray(grid), jnp.zeros((2, 1), int))[1]
    np.testing.assert_array_equal(extent, 9)


def test_tokens_are_padded_as_the_tower_pads_them():
    qwen = testing.tiny_qwen_config(testing.qwen_tokenizer())
    for config in (LlavaConfig.from_hf(testing.tiny_hf_config()), QwenConfig.from_hf(qwen)):
        family, pixels = config.family, config.family.max_pixels(config, 2)
        encode = functools.partial(family.encode_image, config=config)
        features, _ = jax.eval_shape(encode, abstract_params(config), pixels=pixels)
        assert family.padded_tokens(config, pixels) == features.shape[1]
