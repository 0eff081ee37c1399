"""Frozen configurations of Qwen2.5-VL and its tower, from Hugging Face `config.json` dicts."""

import dataclasses
import math
from typing import Any

from stepprune_jax.data.images import MAX_ASPECT
from stepprune_jax.models.config import (
    LLAMA,
    LONGEST_SIDE,
    MOST_LAYERS,
    FieldRule,
    Json,
    LlamaConfig,
    ModelConfig,
    number,
    one_of,
    part,
    read_fields,
    read_language,
    size,
    switch,
    token,
    tokens,
    write_rope,
    written,
)
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import naming, require

# Bounds of a resized image's area in the published `preprocessor_config.json`: 4 to 16,384 tokens.
MIN_PIXELS, MAX_PIXELS = 4 * 28 * 28, 16384 * 28 * 28
# Pillow's own limit.
MOST_PIXELS = 2 * 89_478_485


def integers(field: str, default: tuple[int, ...]) -> FieldRule:
    """Several integers from 0, as a tuple."""

    def read(value: object) -> tuple[int, ...] | None:
        if not isinstance(value, list | tuple):
            return None
        numbers = tuple(x for x in value if is_count(x, 0))
        return numbers if len(numbers) == len(value) else None

    return FieldRule(field, default, read, "a list of integers from 0")


PATCH_TOWER = {
    "hidden_size": size("hidden_size", 3584),
    "intermediate_size": size("intermediate_size", 3420),
    "num_layers": size("depth", 32, MOST_LAYERS),
    "num_heads": size("num_heads", 16),
    "patch_size": size("patch_size", 14, LONGEST_SIDE),
    "temporal_patch_size": size("temporal_patch_size", 2),
    "merge_size": size("spatial_merge_size", 2),
    "out_size": size("out_hidden_size", 3584),
}
_TOWER = {
    **PATCH_TOWER,
    "window_size": size("window_size", 112),
    "full_blocks": integers("fullatt_block_indexes", (7, 15, 23, 31)),
}
_TOWER_ONLY = {
    "kind": one_of("model_type", "qwen2_5_vl_vision", "qwen2_5_vl"),
    "activation": one_of("hidden_act", "silu"),
    "channels": one_of("in_channels", 3),
    "chans": one_of("in_chans", 3),
}
_TEXT = {
    **{name: rule for name, rule in LLAMA.items() if name not in ("head_dim", "tie_embeddings")},
    "vocab_size": size("vocab_size", 152064),
    "hidden_size": size("hidden_size", 8192),
    "intermediate_size": size("intermediate_size", 29568),
    "num_layers": size("num_hidden_layers", 80, MOST_LAYERS),
    "num_heads": size("num_attention_heads", 64),
    "rms_norm_eps": number("rms_norm_eps", 1e-5),
    "max_positions": size("max_position_embeddings", 32768),
}
_TEXT_ONLY = {
    "activation": one_of("hidden_act", "silu"),
    "sliding": one_of("use_sliding_window", False),
}
_TIED = {"tied": switch("tie_word_embeddings", False)}
_SECTIONS = {"sections": integers("mrope_section", (16, 24, 24))}
_PARTS = {"kind": one_of("model_type", None, "qwen2_5_vl"), "vision": part("vision_config")}
IDS = {
    "image_token_id": token("image_token_id", 151655),
    "eos_token_ids": tokens("eos_token_id", (151645,)),
    "pad_token_id": token("pad_token_id"),
}


@dataclasses.dataclass(frozen=True)
class PatchTowerConfig:
    """Shape of a tower for images of any size; the size of a patch is its side in pixels.

    `merge_size` patches on each side of a square become a token of width `out_size`. An image is
    repeated as `temporal_patch_size` frames of a patch.
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
            # A head's channels are rotated in pairs by row and by column.
            require(
                d % (4 * heads) == 0, f"hidden_size {d} is not a multiple of 4 x num_heads {heads}"
            )

    @property
    def factor(self) -> int:
        """Pixels on each side of a merged patch; sides of resized images are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def unit(self) -> int:
        """Patches in a merged patch."""
        return self.merge_size**2


@dataclasses.dataclass(frozen=True)
class QwenVisionConfig(PatchTowerConfig):
    """Shape of the tower; `window_size` is the side of a window in pixels.

    Blocks attend within windows, those of `full_blocks` to the whole image.
    """

    window_size: int = 112
    full_blocks: tuple[int, ...] = (7, 15, 23, 31)

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
        """Merged patches on each side of a window."""
        return self.window_size // self.factor

    @classmethod
    def from_hf(cls, raw: Json) -> "QwenVisionConfig":
        """Builds the config from a parsed `vision_config`."""
        read_fields(raw, "vision_config", _TOWER_ONLY)
        return cls(**read_fields(raw, "vision_config", _TOWER))


@dataclasses.dataclass(frozen=True)
class PatchModelConfig(ModelConfig):
    """A tower for images of any size with a merger, and a language model.

    Attributes:
        vision: the tower.
        image_token_id: the vocabulary's `<|image_pad|>`.
        bos_token_id: None, as prompts begin with the template's own token.
        min_pixels: smallest area of a resized image.
        max_pixels: largest area of a resized image.
    """

    vision: PatchTowerConfig
    image_token_id: int = 151655
    eos_token_ids: tuple[int, ...] = (151645, 151643)
    min_pixels: int = MIN_PIXELS
    max_pixels: int = MAX_PIXELS

    def __post_init__(self):
        width, wanted = self.vision.out_size, self.text.hidden_size
        sections, area = list(self.text.rope_sections), self.vision.factor**2
        least, most = self.min_pixels, self.max_pixels
        with naming("config.json"):
            require(
                width == wanted,
                f"out_hidden_size {width} of the tower is not the hidden_size {wanted}",
            )
            require(
                len(sections) == 3,
                f"mrope_section is {sections}, expected channel pairs of time, row and column",
            )
        with naming("image processor"):
            require(
                is_count(most, area) and most <= MOST_PIXELS,
                f"max_pixels is {most!r}, expected an integer from {area} to {MOST_PIXELS}",
            )
            require(
                is_count(least) and least <= most,
                f"min_pixels is {least!r}, expected 1 to max_pixels, {most}",
            )

    @property
    def feature_width(self) -> int:
        """Width d of the merged tokens that a pruner sees, which is the language model's."""
        return self.vision.out_size

    @property
    def image_bounds(self) -> dict[str, int]:
        """The smallest area, below which images are enlarged."""
        return {"min_pixels": self.min_pixels}

    @property
    def sizes_vary(self) -> bool:
        """True, as the number of visual tokens depends on the image's size."""
        return True

    @property
    def max_image_tokens(self) -> int:
        """Visual tokens of the largest image: those of `max_pixels`, or more where bounds are low.

        Sides are rounded to whole tokens. A narrow image may therefore be larger than `max_pixels`,
        one token high and up to `MAX_ASPECT` times as wide; and one that was enlarged to
        `min_pixels` gets up to one more row and column.
        """
        most = self.max_pixels / self.vision.factor**2
        return int(max(most, math.sqrt(MAX_ASPECT * most), self.enlarged_tokens))

    @property
    def enlarged_tokens(self) -> int:
        """Visual tokens of the largest image that was enlarged to `min_pixels`."""
        least = self.min_pixels / self.vision.factor**2
        return int(least + 1 + math.sqrt(least) * (MAX_ASPECT + 1) / math.sqrt(MAX_ASPECT))


@dataclasses.dataclass(frozen=True)
class QwenConfig(PatchModelConfig):
    """Qwen2.5-VL: a tower with windows and a merger, and a language model."""

    vision: QwenVisionConfig

    @property
    def global_blocks(self) -> tuple[int, ...]:
        """The blocks that do not attend within windows."""
        return self.vision.full_blocks

    @property
    def received_block(self) -> int | None:
        """The last block, if it attends to the whole image."""
        last = self.vision.num_layers - 1
        return last if last in self.vision.full_blocks else None

    @classmethod
    def from_hf(cls, raw: Json) -> "QwenConfig":
        """Builds the config from a parsed `config.json`.

        Args:
            raw: the parsed dict, of either generation: with text fields at the top level or in a
                `text_config`.

        Raises:
            ValueError: a field is not supported; the message names it.
        """
        where = "config.json"
        vision = read_fields(raw, where, _PARTS)["vision"]
        text = read_fields(raw, where, {"text": part("text_config", raw)})["text"]
        given = {name: value for name, value in raw.items() if value is not None}
        read_fields(text, "text_config", _TEXT_ONLY)
        language = {"rope_theta": 1e6, **text}
        more = {"tie_embeddings": is_tied(raw, text), "qkv_bias": True}
        return cls(
            vision=QwenVisionConfig.from_hf(vision),
            text=read_text(language, _TEXT, _SECTIONS, **more),
            **read_fields({**text, **given}, where, IDS),
        )

    def to_hf(self, dtype: str) -> Json:
        """Describes a model as a ``config.json``, in the field names of the published files."""
        rope = write_rope(self.text.rope_scaling)
        if self.text.rope_scaling is None:
            rope["type"] = "mrope"
        return {
            **written(self.text, _TEXT),
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "model_type": "qwen2_5_vl",
            "dtype": dtype,
            **written(self, IDS),
            "bos_token_id": self.bos_token_id,
            "tie_word_embeddings": self.text.tie_embeddings,
            "hidden_act": "silu",
            "use_sliding_window": False,
            "rope_theta": self.text.rope_theta,
            "rope_scaling": {**rope, "mrope_section": list(self.text.rope_sections)},
            "vision_config": {
                **written(self.vision, _TOWER),
                "model_type": "qwen2_5_vl",
                "hidden_act": "silu",
                "in_chans": 3,
            },
        }


def is_tied(raw: Json, text: Json) -> bool:
    """Returns whether a `config.json` or its `text_config` ties the head to the embeddings."""
    return any(read_fields(fields, "config.json", _TIED)["tied"] for fields in (raw, text))


def read_text(
    raw: Json, rules: dict[str, FieldRule], rope_rules: dict[str, FieldRule], **more: Any
) -> LlamaConfig:
    """Builds the language model's config by `read_language`, and by rules for its rotary angles.

    The first of these is that of `mrope_section`.
    """
    where = "text_config"
    field = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope = read_fields(raw, where, {"rope": part(field, {})})["rope"]
    sections = read_fields(rope, where, rope_rules)["sections"]
    # Older files describe the three position ids as a kind of scaling; newer ones do not.
    kind = rope.get("rope_type", rope.get("type", "mrope"))
    rope = rope | {"rope_type": "default" if kind == "mrope" else kind}
    return read_language({**raw, field: rope}, rules, rope_sections=sections, **more)
