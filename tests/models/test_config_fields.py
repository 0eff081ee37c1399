"""Fields of `config.json` that no model can have are refused by name, before anything is sized."""

import math

import pytest

from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.testing import tiny_hf_config

LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("text", {"num_hidden_layers": 10**9}, "text_config: num_hidden_layers is 1000000000, exp"),
        ("text", {"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5, expected a positive int"),
        ("text", {"hidden_size": 1 << 40}, "hidden_size is .* at most 16,777,216"),
        ("text", {"rms_norm_eps": math.nan}, "text_config: rms_norm_eps is nan, expected a finite"),
        pytest.param("text", {"rms_norm_eps": 10**400}, "rms_norm_eps is 1000", id="huge"),
        ("text", {"rms_norm_eps": 1e300}, r"rms_norm_eps is 1e\+300, expected a finite number"),
        ("text", {"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a finite number above 0"),
        ("text", {"rope_theta": "x"}, "rope_theta is 'x', expected a finite number above 0"),
        ("text", {"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        (
            "text",
            {"rope_parameters": {"rope_type": "linear", "factor": math.nan}},
            "text_config: rope_parameters: factor is nan, expected a finite number above 0",
        ),
        ("text", {"rope_scaling": {"type": "linear", "factor": math.inf}}, "factor is inf"),
        ("text", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "low_freq_factor is 4.0, exp"),
        (
            "text",
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 0}},
            "original_max_position_embeddings is 0, expected a positive integer",
        ),
        ("vision", {"num_hidden_layers": 10**9}, "vision_config: num_hidden_layers is 1000000000"),
        ("vision", {"image_size": 10**6}, "image_size is 1000000, expected .* at most 8,192"),
        ("vision", {"image_size": [28, [28]]}, "image_size is .*, expected a square"),
        ("vision", {"layer_norm_eps": -1}, "layer_norm_eps is -1, expected a finite number"),
        ("text", {"tie_word_embeddings": "x"}, "text_config: tie_word_embeddings is 'x', expected"),
        ("", {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', expected true or"),
        ("", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
        ("", {"eos_token_id": "2"}, "config.json: eos_token_id is '2', expected a token id"),
        ("", {"eos_token_id": [2, None]}, "eos_token_id is .*, expected a token id, or a list"),
        ("", {"bos_token_id": [1]}, r"bos_token_id is \[1\], expected a token id"),
        ("", {"eos_token_id": 10**12}, "eos_token_id is 1000000000000, expected a token id"),
        ("", {"image_token_index": 10**9}, "image_token_index is 1000000000, expected a token id"),
        ("", {"image_token_index": -5}, "image_token_index is -5, expected a token id"),
    ],
)
def test_a_field_is_refused_by_name(part, fields, message):
    raw = tiny_hf_config()
    place = raw[f"{part}_config"] if part else raw
    place.update(fields)
    with pytest.raises(ValueError, match=message):
        LlavaConfig.from_hf(raw)
