"""Configurations of Qwen2.5-VL, and their translation from and to ``config.json`` files.

The base classes `PatchTowerConfig` and `PatchModelConfig` are shared with Qwen3-VL.
"""

import dataclasses
import math
from typing import Any

from stepprune_jax.data.images import MAX_ASPECT
from stepprune_jax.models.config import (
    LLAMA,
    MAX_LAYERS,
    MAX_SIDE,
    FieldRule,
    Json,
    LlamaConfig,
    ModelConfig,
    bool_rule,
    choice_rule,
    number_rule,
    object_rule,
    read_fields,
    read_language,
    rope_field,
    size_rule,
    token_id_rule,
    token_ids_rule,
    write_fields,
    write_rope,
)
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import naming, require

# Limits of a resized image's area in the published `preprocessor_config.json`: 4 to 16,384 tokens.
MIN_PIXELS, MAX_PIXELS = 4 * 28 * 28, 16384 * 28 * 28
# Pillow refuses to open images with more pixels.
PILLOW_MAX_PIXELS = 2 * 89_478_485


def integers_rule(field: str, default: tuple[int, ...]) -> FieldRule:
    """Returns the rule for a list of integers from 0, which is read as a tuple."""

    def read(value: object) -> tuple[int, ...] | None:
        if not isinstance(value, list | tuple):
            return None
        numbers = tuple(entry for entry in value if is_count(entry, 0))
        return numbers if len(numbers) == len(value) else None

    return FieldRule(field, default, read, "a list of integers from 0")


PATCH_TOWER = {
    "hidden_size": size_rule("hidden_size", 3584),
    "intermediate_size": size_rule("intermediate_size", 3420),
    "num_layers": size_rule("depth", 32, MAX_LAYERS),
    "num_heads": size_rule("num_heads", 16),
    "patch_size": size_rule("patch_size", 14, MAX_SIDE),
    "temporal_patch_size": size_rule("temporal_patch_size", 2),
    "merge_size": size_rule("spatial_merge_size", 2),
    "out_size": size_rule("out_hidden_size", 3584),
}
_TOWER = {
    **PATCH_TOWER,
    "window_size": size_rule("window_size", 112),
    "full_blocks": integers_rule("fullatt_block_indexes", (7, 15, 23, 31)),
    "tokens_per_second": size_rule("tokens_per_second", 4),
}
_TOWER_ONLY = {
    "kind": choice_rule("model_type", "qwen2_5_vl_vision", "qwen2_5_vl"),
    "activation": choice_rule("hidden_act", "silu"),
    "channels": choice_rule("in_channels", 3),
    "chans": choice_rule("in_chans", 3),
}
_TEXT = {
    **{name: rule for name, rule in LLAMA.items() if name not in ("head_dim", "tie_embeddings")},
    "vocab_size": size_rule("vocab_size", 152064),
    "hidden_size": size_rule("hidden_size", 8192),
    "intermediate_size": size_rule("intermediate_size", 29568),
    "num_layers": size_rule("num_hidden_layers", 80, MAX_LAYERS),
    "num_heads": size_rule("num_attention_heads", 64),
    "rms_norm_eps": number_rule("rms_norm_eps", 1e-5),
    "max_positions": size_rule("max_position_embeddings", 32768),
}
_TEXT_ONLY = {
    "activation": choice_rule("hidden_act", "silu"),
    "sliding": choice_rule("use_sliding_window", False),
}
_TIED = {"tied": bool_rule("tie_word_embeddings", False)}
_ROPE = {"sections": integers_rule("mrope_section", (16, 24, 24))}
_PARTS = {
    "kind": choice_rule("model_type", None, "qwen2_5_vl"),
    "vision": object_rule("vision_config"),
}
IDS = {
    "image_token_id": token_id_rule("image_token_id", 151655),
    "eos_token_ids": token_ids_rule("eos_token_id", (151645,)),
    "pad_token_id": token_id_rule("pad_token_id"),
}


@dataclasses.dataclass(frozen=True)
class PatchTowerConfig:
    """Shape of a vision transformer for images of any size, with a merger.

    The merger turns each square of patches into one visual token.

    Attributes:
        hidden_size: width d of the residual stream.
        intermediate_size: width of the MLPs.
        num_layers: number of blocks.
        num_heads: number of attention heads.
        patch_size: side of a patch in pixels.
        temporal_patch_size: number of video frames of a patch. A still image is repeated in all
            frames.
        merge_size: number of patches on each side of a merged square.
        out_size: width of a visual token.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    out_size: int = 3584

    def __post_init__(self):
        d, heads = self.hidden_size, self.num_heads
        with naming("vision_config"):
            # A head's channel pairs are divided equally between rotation by row and by column.
            message = f"hidden_size {d} is not a multiple of 4 x num_heads {heads}"
            require(d % (4 * heads) == 0, message)

    @property
    def factor(self) -> int:
        """Side of a merged patch in pixels; the sides of resized images are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def unit(self) -> int:
        """Number of patches in a merged patch."""
        return self.merge_size**2


@dataclasses.dataclass(frozen=True)
class QwenVisionConfig(PatchTowerConfig):
    """Shape of the tower of Qwen2.5-VL.

    Attributes:
        window_size: side of an attention window in pixels.
        full_blocks: numbers of the blocks with global attention. All other blocks attend within
            windows.
        tokens_per_second: number of temporal position ids per second of a video.
    """

    window_size: int = 112
    full_blocks: tuple[int, ...] = (7, 15, 23, 31)
    tokens_per_second: int = 4

    def __post_init__(self):
        super().__post_init__()
        window, factor = self.window_size, self.factor
        blocks, layers = self.full_blocks, self.num_layers
        with naming("vision_config"):
            require(
                window >= factor,
                f"window_size {window} is smaller than a merged patch of {factor} pixels",
            )
            require(
                all(block < layers for block in blocks),
                f"fullatt_block_indexes {list(blocks)} are outside a tower of {layers} blocks",
            )

    @property
    def window(self) -> int:
        """Number of merged patches on each side of a window."""
        return self.window_size // self.factor

    @classmethod
    def from_hf(cls, raw: Json) -> "QwenVisionConfig":
        """Builds the config from the `vision_config` of a ``config.json``."""
        read_fields(raw, "vision_config", _TOWER_ONLY)
        return cls(**read_fields(raw, "vision_config", _TOWER))


@dataclasses.dataclass(frozen=True)
class PatchModelConfig(ModelConfig):
    """Configuration of a model that encodes images at their own size: tower, merger, decoder.

    Attributes:
        vision: shape of the tower.
        image_token_id: id of `<|image_pad|>` in the vocabulary.
        bos_token_id: None, because the template begins with a token of its roles.
        min_pixels: smallest area of a resized image in pixels.
        max_pixels: largest area of a resized image in pixels.
    """

    vision: PatchTowerConfig
    image_token_id: int = 151655
    eos_token_ids: tuple[int, ...] = (151645, 151643)
    min_pixels: int = MIN_PIXELS
    max_pixels: int = MAX_PIXELS

    def __post_init__(self):
        out_size, text_width = self.vision.out_size, self.text.hidden_size
        sections, merged_area = list(self.text.rope_sections), self.vision.factor**2
        min_pixels, max_pixels = self.min_pixels, self.max_pixels
        with naming("config.json"):
            require(
                out_size == text_width,
                f"out_hidden_size {out_size} of the tower is not the hidden_size {text_width}",
            )
            require(
                len(sections) == 3,
                f"mrope_section is {sections}, expected channel pairs of time, row and column",
            )
        with naming("image processor"):
            require(
                is_count(max_pixels, merged_area) and max_pixels <= PILLOW_MAX_PIXELS,
                f"max_pixels is {max_pixels!r}, expected an integer from {merged_area} to "
                f"{PILLOW_MAX_PIXELS}",
            )
            require(
                is_count(min_pixels) and min_pixels <= max_pixels,
                f"min_pixels is {min_pixels!r}, expected 1 to max_pixels, {max_pixels}",
            )

    @property
    def feature_width(self) -> int:
        """Width d of the merged tokens that a pruner reads, equal to the decoder's width."""
        return self.vision.out_size

    @property
    def image_bounds(self) -> dict[str, int]:
        """The smallest area; smaller images are enlarged."""
        return {"min_pixels": self.min_pixels}

    @property
    def sizes_vary(self) -> bool:
        """True, because the number of visual tokens depends on the size of the image."""
        return True

    @property
    def reads_videos(self) -> bool:
        """True: a video is a sequence of images of two frames."""
        return True

    @property
    def max_image_tokens(self) -> int:
        """Upper bound on an image's visual tokens.

        Usually this is the number of tokens in `max_pixels`. Sides are rounded to multiples of a
        token, so two kinds of images may exceed that number if the limits are small: a narrow
        image, which is one token high and up to `MAX_ASPECT` times as wide; and an image that was
        enlarged to `min_pixels`, which gets up to one more row and one more column.
        """
        area_tokens = self.max_pixels / self.vision.factor**2
        return int(max(area_tokens, math.sqrt(MAX_ASPECT * area_tokens), self.max_enlarged_tokens))

    @property
    def max_enlarged_tokens(self) -> int:
        """Upper bound on the visual tokens of an image that was enlarged to `min_pixels`."""
        area_tokens = self.min_pixels / self.vision.factor**2
        # Rows plus columns of an image of this area with the largest aspect ratio.
        rows_and_columns = math.sqrt(area_tokens) * (MAX_ASPECT + 1) / math.sqrt(MAX_ASPECT)
        return int(area_tokens + 1 + rows_and_columns)


@dataclasses.dataclass(frozen=True)
class QwenConfig(PatchModelConfig):
    """Configuration of Qwen2.5-VL, whose tower attends within windows in most blocks."""

    vision: QwenVisionConfig

    @property
    def global_blocks(self) -> tuple[int, ...]:
        """The tower's blocks with global attention."""
        return self.vision.full_blocks

    @property
    def received_block(self) -> int | None:
        """The tower's last block if it has global attention, otherwise None."""
        last_block = self.vision.num_layers - 1
        return last_block if last_block in self.vision.full_blocks else None

    @classmethod
    def from_hf(cls, raw: Json) -> "QwenConfig":
        """Builds the config from a parsed ``config.json``.

        Args:
            raw: the parsed JSON object. Newer files have the fields of the language model in
                `text_config`, older files at the top level.

        Raises:
            ValueError: a field has an unsupported value; the message names the field.
        """
        where = "config.json"
        vision = read_fields(raw, where, _PARTS)["vision"]
        text = read_fields(raw, where, {"text": object_rule("text_config", raw)})["text"]
        outer_fields = {name: value for name, value in raw.items() if value is not None}
        read_fields(text, "text_config", _TEXT_ONLY)
        return cls(
            vision=QwenVisionConfig.from_hf(vision),
            text=read_text(
                {"rope_theta": 1e6, **text},
                _TEXT,
                _ROPE,
                tie_embeddings=is_tied(raw, text),
                qkv_bias=True,
            ),
            **read_fields({**text, **outer_fields}, where, IDS),
        )

    def to_hf(self, dtype: str) -> Json:
        """Returns the ``config.json`` of the model, with the field names of the published files.

        Args:
            dtype: name of the weights' dtype.
        """
        rope = write_rope(self.text.rope_scaling)
        if self.text.rope_scaling is None:
            rope["type"] = "mrope"
        return {
            **write_fields(self.text, _TEXT),
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "dtype": dtype,
            **write_fields(self, IDS),
            "bos_token_id": self.bos_token_id,
            "tie_word_embeddings": self.text.tie_embeddings,
            "hidden_act": "silu",
            "use_sliding_window": False,
            "rope_theta": self.text.rope_theta,
            "rope_scaling": {**rope, "mrope_section": list(self.text.rope_sections)},
            "vision_config": {
                **write_fields(self.vision, _TOWER),
                "model_type": "qwen2_5_vl",
                "hidden_act": "silu",
                "in_chans": 3,
            },
        }


def is_tied(raw: Json, text: Json) -> bool:
    """Returns whether a ``config.json`` or its `text_config` ties the head to the embeddings."""
    return any(read_fields(fields, "config.json", _TIED)["tied"] for fields in (raw, text))


def read_text(
    raw: Json, rules: dict[str, FieldRule], rope_rules: dict[str, FieldRule], **overrides: Any
) -> LlamaConfig:
    """Builds the configuration of a language model with position ids of three axes.

    Args:
        raw: the parsed JSON object with the language model's fields.
        rules: rules for attributes of `LlamaConfig`, see `config.read_language`.
        rope_rules: rules for fields of the rotary embedding, including "sections".
        **overrides: attributes of the result that are not read by `rules`.

    Returns:
        The checked configuration.

    Raises:
        ValueError: a field has an unsupported value; the message names the field.
    """
    where, field = "text_config", rope_field(raw)
    rope = read_fields(raw, where, {"rope": object_rule(field, {})})["rope"]
    sections = read_fields(rope, where, rope_rules)["sections"]
    # Older files declare the three position ids as a kind of scaling, "mrope"; newer files do not.
    kind = rope.get("rope_type", rope.get("type", "mrope"))
    rope = rope | {"rope_type": "default" if kind == "mrope" else kind}
    return read_language({**raw, field: rope}, rules, rope_sections=sections, **overrides)
