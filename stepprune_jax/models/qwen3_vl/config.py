"""Configurations of Qwen3-VL, and their translation from and to ``config.json`` files."""

import dataclasses
import itertools
import math

from stepprune_jax.models.config import (
    LLAMA,
    MAX_LAYERS,
    MAX_SIDE,
    Json,
    choice_rule,
    number_rule,
    object_rule,
    read_fields,
    size_rule,
    write_fields,
    write_rope,
)
from stepprune_jax.models.qwen2_5_vl.config import (
    IDS,
    PATCH_TOWER,
    PatchModelConfig,
    PatchTowerConfig,
    integers_rule,
    is_tied,
    read_text,
)
from stepprune_jax.user_input import UserError, naming, require

_TOWER = {
    **PATCH_TOWER,
    "hidden_size": size_rule("hidden_size", 1152),
    "intermediate_size": size_rule("intermediate_size", 4304),
    "num_layers": size_rule("depth", 27, MAX_LAYERS),
    "patch_size": size_rule("patch_size", 16, MAX_SIDE),
    "positions": size_rule("num_position_embeddings", 2304),
    "deepstack_blocks": integers_rule("deepstack_visual_indexes", (8, 16, 24)),
}
_TOWER_ONLY = {
    "kind": choice_rule("model_type", "qwen3_vl_vision", "qwen3_vl"),
    "activation": choice_rule("hidden_act", "gelu_pytorch_tanh"),
    "channels": choice_rule("in_channels", 3),
    "rope": object_rule("rope_parameters", {}),
}
_TOWER_ROPE = {
    "kind": choice_rule("rope_type", "axial"),
    "theta": choice_rule("rope_theta", 10000.0),
}
_TEXT = {
    **{name: rule for name, rule in LLAMA.items() if name != "tie_embeddings"},
    "vocab_size": size_rule("vocab_size", 151936),
    "intermediate_size": size_rule("intermediate_size", 22016),
    "num_kv_heads": size_rule("num_key_value_heads", 32),
    "head_dim": size_rule("head_dim", 128),
    "rms_norm_eps": number_rule("rms_norm_eps", 1e-6),
    "max_positions": size_rule("max_position_embeddings", 128000),
}
_TEXT_ONLY = {
    "kind": choice_rule("model_type", "qwen3_vl_text"),
    "activation": choice_rule("hidden_act", "silu"),
    "attention_bias": choice_rule("attention_bias", False),
}
_ROPE = {
    "sections": integers_rule("mrope_section", (24, 20, 20)),
    "interleaved": choice_rule("mrope_interleaved", True),
}
_PARTS = {"vision": object_rule("vision_config"), "text": object_rule("text_config")}


@dataclasses.dataclass(frozen=True)
class Qwen3VisionConfig(PatchTowerConfig):
    """Shape of the tower of Qwen3-VL, whose blocks all have global attention.

    Attributes:
        patch_size: side of a patch in pixels.
        positions: number of learned position embeddings, the square of an integer. They are laid
            out as a square of patches.
        deepstack_blocks: ascending numbers of the blocks whose outputs are merged to DeepStack
            features (https://arxiv.org/abs/2406.04334). Layer l of the language model adds the
            features of the block with index l in this tuple.
    """

    patch_size: int = 16
    positions: int = 2304
    deepstack_blocks: tuple[int, ...] = (8, 16, 24)

    def __post_init__(self):
        super().__post_init__()
        deepstack_blocks, num_layers = self.deepstack_blocks, self.num_layers
        is_ascending = all(a < b for a, b in itertools.pairwise(deepstack_blocks))
        with naming("vision_config"):
            require(
                self.side**2 == self.positions,
                f"num_position_embeddings {self.positions} is not the square of an integer",
            )
            require(
                is_ascending and all(block < num_layers for block in deepstack_blocks),
                f"deepstack_visual_indexes is {list(deepstack_blocks)}, expected ascending numbers "
                f"of blocks of a tower that has {num_layers}",
            )

    @property
    def side(self) -> int:
        """Number of patches on each side of the square of position embeddings."""
        return math.isqrt(self.positions)

    @classmethod
    def from_hf(cls, raw: Json) -> "Qwen3VisionConfig":
        """Builds the config from the `vision_config` of a ``config.json``."""
        rope = read_fields(raw, "vision_config", _TOWER_ONLY)["rope"]
        read_fields(rope, "vision_config: rope_parameters", _TOWER_ROPE)
        return cls(**read_fields(raw, "vision_config", _TOWER))


@dataclasses.dataclass(frozen=True)
class Qwen3Config(PatchModelConfig):
    """Configuration of Qwen3-VL, whose first decoder layers add DeepStack features of the tower."""

    vision: Qwen3VisionConfig
    # Limits of a resized image's area in the published files: 64 to 16,384 tokens.
    min_pixels: int = 64 * 32 * 32
    max_pixels: int = 16384 * 32 * 32

    def __post_init__(self):
        super().__post_init__()
        num_blocks, num_layers = len(self.vision.deepstack_blocks), self.text.num_layers
        with naming("config.json"):
            require(
                num_blocks <= num_layers,
                f"deepstack_visual_indexes of vision_config has {num_blocks} numbers, expected at "
                f"most one for each of the {num_layers} layers of the language model",
            )

    @property
    def num_deepstack_layers(self) -> int:
        """Number of language-model layers that add DeepStack features, one per tower block."""
        return len(self.vision.deepstack_blocks)

    @property
    def global_blocks(self) -> tuple[int, ...]:
        """All blocks of the tower."""
        return tuple(range(self.vision.num_layers))

    @property
    def received_block(self) -> int:
        """The tower's last block."""
        return self.vision.num_layers - 1

    @classmethod
    def from_hf(cls, raw: Json) -> "Qwen3Config":
        """Builds the config from a parsed ``config.json``.

        Raises:
            ValueError: a field has an unsupported value; the message names the field.
        """
        if raw.get("model_type") != "qwen3_vl":
            raise UserError(
                f"config.json: model_type is {raw.get('model_type')!r}, a mixture of experts, "
                "which is not supported; expected 'qwen3_vl'"
            )
        parts = read_fields(raw, "config.json", _PARTS)
        text = parts["text"]
        read_fields(text, "text_config", _TEXT_ONLY)
        outer_fields = {name: value for name, value in raw.items() if value is not None}
        return cls(
            vision=Qwen3VisionConfig.from_hf(parts["vision"]),
            text=read_text(
                {"rope_theta": 500000.0, **text},
                _TEXT,
                _ROPE,
                tie_embeddings=is_tied(raw, text),
                qk_norm=True,
                rope_interleaved=True,
            ),
            **read_fields({**text, **outer_fields}, "config.json", IDS),
        )

    def to_hf(self, dtype: str) -> Json:
        """Returns the ``config.json`` of the model, with the field names of the published files.

        Args:
            dtype: name of the weights' dtype.
        """
        text, ids = self.text, write_fields(self, IDS)
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
                **write_fields(text, _TEXT),
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
                **write_fields(self.vision, _TOWER),
                "model_type": "qwen3_vl",
                "hidden_act": "gelu_pytorch_tanh",
                "in_channels": 3,
            },
        }
