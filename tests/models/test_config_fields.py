"""Fields of `config.json` that no model can have are refused by name, before anything is sized."""

import math

import pytest

from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.testing import tiny_hf_config


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("text_config", "num_hidden_layers", 10**9),
        ("text_config", "rms_norm_eps", math.nan),
        ("text_config", "rope_scaling", {"type": "linear", "factor": math.inf}),
        ("vision_config", "image_size", 10**6),
        ("config.json", "eos_token_id", [2, None]),
    ],
)
def test_a_field_is_refused_by_name(part, field, value):
    raw = tiny_hf_config()
    raw.get(part, raw)[field] = value
    with pytest.raises(ValueError, match=f"^{part}: .*{field}"):
        LlavaConfig.from_hf(raw)
