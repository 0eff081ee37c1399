"""Frozen configurations of Qwen3-VL and its tower, from Hugging Face `config.json` dicts."""

import dataclasses
import itertools
import math

from stepprune_jax.models.config import (
    LLAMA,
    LONGEST_SIDE,
    MOST_LAYERS,
    Json,
    number,
    one_of,
    part,
    read_fields,
    size,
    write_rope,
    written,
)
from stepprune_jax.models.qwen2_5_vl.config import (
    IDS,
    PATCH_TOWER,
    PatchModelConfig,
    PatchTowerConfig,
    integers,
    is_tied,
    read_text,
)
from stepprune_jax.user_input import UserError, naming, require

_TOWER = {
    **PATCH_TOWER,
    "hidden_size": size("hidden_size", 1152),
    "intermediate_size": size("intermediate_size", 4304),
    "num_layers": size("depth", 27, MOST_LAYERS),
    "patch_size": size("patch_size", 16, LONGEST_SIDE),
    "positions": size("num_position_embeddings", 2304),
    "deep_blocks": integers("deepstack_visual_indexes", (8, 16, 24)),
}
_TOWER_ONLY = {
    "kind": one_of("model_type", "qwen3_vl_vision", "qwen3_vl"),
    "activation": one_of("hidden_act", "gelu_pytorch_tanh"),
    "channels": one_of("in_channels", 3),
    "rope": part("rope_parameters", {}),
}
_TOWER_ROPE = {
    "kind": one_of("rope_type", "axial"),
    "theta": one_of("rope_theta", 10000.0),
}
_TEXT = {
    **{name: rule for name, rule in LLAMA.items() if name != "tie_embeddings"},
    "vocab_size": size("vocab_size", 151936),
    "intermediate_size": size("intermediate_size", 22016),
    "num_kv_heads": size("num_key_value_heads", 32),
    "head_dim": size("head_dim", 128),
    "rms_norm_eps": number("rms_norm_eps", 1e-6),
    "max_positions": size("max_position_embeddings", 128000),
}
_TEXT_ONLY = {
    "kind": one_of("model_type", "qwen3_vl_text"),
    "activation": one_of("hidden_act", "silu"),
    "attention_bias": one_of("attention_bias", False),
}
_ROPE = {
    "sections": integers("mrope_section", (24, 20, 20)),
    "interleaved": one_of("mrope_interleaved", True),
}
_PARTS = {"vision": part("vision_config"), "text": part("text_config")}


@dataclasses.dataclass(frozen=True)
class Qwen3VisionConfig(PatchTowerConfig):
    """Shape of the tower, whose blocks all attend to the whole image.

    Its table of learned positions has `positions` rows, those of a square of patches. What leaves
    each of `deep_blocks` is merged, too, and added after as many layers of the language model.
    """

    patch_size: int = 16
    positions: int = 2304
    deep_blocks: tuple[int, ...] = (8, 16, 24)

    def __post_init__(self):
        super().__post_init__()
        deep, layers = self.deep_blocks, self.num_layers
        rising = all(one < other for one, other in itertools.pairwise(deep))
        with naming("vision_config"):
            require(
                self.side**2 == self.positions,
                f"num_position_embeddings {self.positions} is not the square of an integer",
            )
            require(
                rising and all(block < layers for block in deep),
                f"deepstack_visual_indexes is {list(deep)}, expected ascending numbers of blocks "
                f"of a tower that has {layers}",
            )

    @property
    def side(self) -> int:
        """Patches on each side of the table of positions."""
        return math.isqrt(self.positions)

    @classmethod
    def from_hf(cls, raw: Json) -> "Qwen3VisionConfig":
        """Builds the config from a parsed `vision_config`."""
        rope = read_fields(raw, "vision_config", _TOWER_ONLY)["rope"]
        read_fields(rope, "vision_config: rope_parameters", _TOWER_ROPE)
        return cls(**read_fields(raw, "vision_config", _TOWER))


@dataclasses.dataclass(frozen=True)
class Qwen3Config(PatchModelConfig):
    """Qwen3-VL: a tower whose deep features the first layers of the language model add."""

    vision: Qwen3VisionConfig
    # Bounds of a resized image's area in the published files: 64 to 16,384 tokens.
    min_pixels: int = 64 * 32 * 32
    max_pixels: int = 16384 * 32 * 32

    def __post_init__(self):
        super().__post_init__()
        deep, layers = len(self.vision.deep_blocks), self.text.num_layers
        with naming("config.json"):
            require(
                deep <= layers,
                f"deepstack_visual_indexes of vision_config has {deep} numbers, expected at most "
                f"one for each of the {layers} layers of the language model",
            )

    @property
    def deep_layers(self) -> int:
        """As many as there are blocks of the tower with deep features."""
        return len(self.vision.deep_blocks)

    @property
    def global_blocks(self) -> tuple[int, ...]:
        """All blocks."""
        return tuple(range(self.vision.num_layers))

    @property
    def received_block(self) -> int:
        """The last block."""
        return self.vision.num_layers - 1

    @classmethod
    def from_hf(cls, raw: Json) -> "Qwen3Config":
        """Builds the config from a parsed `config.json`.

        Raises:
            ValueError: a field is not supported; the message names it.
        """
        if raw.get("model_type") != "qwen3_vl":
            raise UserError(
                f"config.json: model_type is {raw.get('model_type')!r}, a mixture of experts, "
                "which is not supported; expected 'qwen3_vl'"
            )
        parts = read_fields(raw, "config.json", _PARTS)
        text = parts["text"]
        read_fields(text, "text_config", _TEXT_ONLY)
        language = {"rope_theta": 500000.0, **text}
        more = {"tie_embeddings": is_tied(raw, text), "qk_norm": True, "rope_interleaved": True}
        given = {name: value for name, value in raw.items() if value is not None}
        return cls(
            vision=Qwen3VisionConfig.from_hf(parts["vision"]),
            text=read_text(language, _TEXT, _ROPE, **more),
            **read_fields({**text, **given}, "config.json", IDS),
        )

    def to_hf(self, dtype: str) -> Json:
        """Describes a model as a ``config.json``, in the field names of the published files."""
        text, ids = self.text, written(self, IDS)
        rope = {
            **write_rope(text.rope_scaling),
            "mrope_section": list(text.rope_sections),
            "mrope_interleaved": True,
        }
        return {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "dtype": dtype,
            "image_token_id": ids.pop("image_token_id"),
            "tie_word_embeddings": text.tie_embeddings,
            "text_config": {
                **written(text, _TEXT),
                **ids,
                "bos_token_id": self.bos_token_id,
                "model_type": "qwen3_vl_text",
                "tie_word_embeddings": text.tie_embeddings,
                "attention_bias": False,
                "hidden_act": "silu",
                "rope_theta": text.rope_theta,
                "rope_scaling": rope,
            },
            "vision_config": {
                **written(self.vision, _TOWER),
                "model_type": "qwen3_vl",
                "hidden_act": "gelu_pytorch_tanh",
                "in_channels": 3,
            },
        }
