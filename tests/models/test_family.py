"""What a family has to provide, and how a folder finds its own."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stepprune_jax import testing
from stepprune_jax.models import vlm
from stepprune_jax.models.family import FAMILIES, Family, ModelConfig, find_family
from stepprune_jax.models.llava.config import LlavaConfig

CONFIG = LlavaConfig.from_hf(testing.tiny_hf_config())
FUNCTIONS = {
    name: member
    for name, member in vars(Family).items()
    if inspect.isfunction(member) and not name.startswith("_")
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_the_functions_and_constants_of_the_protocol(name):
    family = FAMILIES[name]
    for constant in Family.__annotations__:
        assert getattr(family, constant), constant
    for function, wanted in FUNCTIONS.items():
        given = inspect.signature(getattr(family, function)).parameters
        parameters = list(inspect.signature(wanted).parameters)[1:]  # without self
        assert list(given)[: len(parameters)] == parameters, function


def test_the_configuration_offers_what_is_read_outside_of_the_family():
    assert isinstance(CONFIG, ModelConfig)
    assert CONFIG.family is FAMILIES["llava"]
    assert CONFIG.feature_width == CONFIG.vision.hidden_size
    assert CONFIG.max_image_tokens == 9


def test_a_folder_is_of_the_family_whose_configuration_it_has():
    raw = testing.tiny_hf_config()
    assert find_family(raw) is FAMILIES["llava"]
    assert (
        find_family({"model_type": "llava_llama", "mm_vision_tower": "clip"}).vision_folder(
            {"mm_vision_tower": "clip"}
        )
        == "clip"
    )
    assert FAMILIES["llava"].vision_folder(raw) is None
    assert FAMILIES["llava"].vision_folder({"mm_projector_type": "mlp2x_gelu"}) == ""
    with pytest.raises(ValueError, match="mm_vision_tower is True, expected a folder or hub id"):
        FAMILIES["llava"].vision_folder({"mm_vision_tower": True, "mm_hidden_size": 8})
    assert find_family({"model_type": "qwen2_5_vl"}) is FAMILIES["qwen2_5_vl"]
    assert find_family({"model_type": "qwen3_vl"}) is None
    assert FAMILIES["llava"].read_config(raw, None) == CONFIG
    assert LlavaConfig.from_hf(FAMILIES["llava"].hf_config(CONFIG, "float32")) == CONFIG


@pytest.mark.parametrize("select", ["default", "full"])
def test_images_have_as_many_tokens_as_their_grid_says(select):
    raw = testing.tiny_hf_config() | {"vision_feature_select_strategy": select}
    config = LlavaConfig.from_hf(raw)
    grid = config.family.grids(config, np.zeros((2, 3, 24, 24), np.float32))
    np.testing.assert_array_equal(grid, [[3, 3], [3, 3]])
    expected = 9 + (select == "full")
    for kind in (np.asarray, jnp.asarray):
        np.testing.assert_array_equal(config.family.num_tokens(config, kind(grid)), expected)
    assert config.max_image_tokens == expected
    extent = config.family.image_positions(config, jnp.asarray(grid), jnp.zeros((2, 1), int))[1]
    np.testing.assert_array_equal(extent, expected)
    params = vlm.init_params(jax.random.key(0), config)
    features, _ = vlm.encode_image(params, config, jnp.zeros((2, 3, 24, 24)))
    assert features.shape == (2, expected, config.feature_width)
