"""Frozen configurations of Qwen2.5-VL and its tower, from Hugging Face `config.json` dicts."""

import dataclasses
import math
from importlib import import_module
from typing import Any

from stepprune_jax.data.images import MAX_ASPECT
from stepprune_jax.models.config import (
    LONGEST_SIDE,
    MOST_LAYERS,
    LlamaConfig,
    checked,
    positive,
    read_rope,
    real,
    switch,
    token_id,
    token_ids,
)
from stepprune_jax.settings import is_count

# Bounds of a resized image's area in the published `preprocessor_config.json`: 4 to 16,384 tokens.
MIN_PIXELS, MAX_PIXELS = 4 * 28 * 28, 16384 * 28 * 28
# Pillow's own limit.
MOST_PIXELS = 2 * 89_478_485


@dataclasses.dataclass(frozen=True)
class QwenVisionConfig:
    """Shape of the tower.

    Attributes:
        hidden_size: width d of the tower.
        intermediate_size: width of its gated MLPs.
        num_layers: number of blocks.
        num_heads: attention heads.
        patch_size: side of a square patch in pixels.
        temporal_patch_size: frames of a patch; an image is repeated this many times.
        merge_size: patches on each side of the square that becomes one token.
        window_size: side in pixels of the windows in which most blocks attend.
        full_blocks: blocks that attend to the whole image.
        out_size: width of the merged tokens, which is the language model's.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    window_size: int = 112
    full_blocks: tuple[int, ...] = (7, 15, 23, 31)
    out_size: int = 3584

    def __post_init__(self):
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"vision_config: hidden_size {self.hidden_size} is not a multiple of 4 x num_heads "
                f"{self.num_heads}: a head's channels are rotated in pairs by row and by column"
            )
        if self.window_size < self.factor:
            raise ValueError(
                f"vision_config: window_size {self.window_size} is smaller than a merged patch of "
                f"{self.factor} pixels"
            )
        if not all(0 <= block < self.num_layers for block in self.full_blocks):
            raise ValueError(
                f"vision_config: fullatt_block_indexes {list(self.full_blocks)} are outside a "
                f"tower of {self.num_layers} blocks"
            )

    @property
    def factor(self) -> int:
        """Pixels on each side of a merged patch; sides of resized images are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def unit(self) -> int:
        """Patches in a merged patch."""
        return self.merge_size**2

    @property
    def window(self) -> int:
        """Merged patches on each side of a window."""
        return self.window_size // self.factor

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "QwenVisionConfig":
        """Builds the config from a parsed `vision_config`.

        Raises:
            ValueError: a field has an unsupported value; the message names it.
        """
        where = "vision_config"
        kinds = ("qwen2_5_vl", "qwen2_5_vl_vision")
        checked(config, "model_type", "qwen2_5_vl_vision", kinds, where)
        checked(config, "hidden_act", "silu", ("silu",), where)
        for field in ("in_channels", "in_chans"):
            checked(config, field, 3, (3,), where)
        blocks = config.get("fullatt_block_indexes", (7, 15, 23, 31))
        if not isinstance(blocks, list | tuple) or not all(type(block) is int for block in blocks):
            raise ValueError(
                f"{where}: fullatt_block_indexes is {blocks!r}, expected a list of integers"
            )
        return cls(
            hidden_size=positive(config, "hidden_size", 3584, where),
            intermediate_size=positive(config, "intermediate_size", 3420, where),
            num_layers=positive(config, "depth", 32, where, MOST_LAYERS),
            num_heads=positive(config, "num_heads", 16, where),
            patch_size=positive(config, "patch_size", 14, where, LONGEST_SIDE),
            temporal_patch_size=positive(config, "temporal_patch_size", 2, where),
            merge_size=positive(config, "spatial_merge_size", 2, where),
            window_size=positive(config, "window_size", 112, where),
            full_blocks=tuple(blocks),
            out_size=positive(config, "out_hidden_size", 3584, where),
        )


@dataclasses.dataclass(frozen=True)
class QwenConfig:
    """A tower with a merger, and a language model.

    Attributes:
        vision: the tower.
        text: the language model.
        image_token_id: the vocabulary's `<|image_pad|>`.
        bos_token_id: None, as prompts begin with the template's own token.
        eos_token_ids: ids that end an answer.
        pad_token_id: padding id, or None.
        min_pixels: smallest area of a resized image.
        max_pixels: largest area of a resized image.
    """

    vision: QwenVisionConfig
    text: LlamaConfig
    image_token_id: int = 151655
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = (151645, 151643)
    pad_token_id: int | None = None
    min_pixels: int = MIN_PIXELS
    max_pixels: int = MAX_PIXELS

    def __post_init__(self):
        if self.vision.out_size != self.text.hidden_size:
            raise ValueError(
                f"config.json: out_hidden_size {self.vision.out_size} of the tower is not the "
                f"language model's hidden_size {self.text.hidden_size}"
            )
        if len(self.text.rope_sections) != 3:
            raise ValueError(
                f"config.json: mrope_section is {list(self.text.rope_sections)}, expected pairs of "
                "channels for time, row and column"
            )
        least = self.vision.factor**2
        if not (is_count(self.max_pixels, least) and self.max_pixels <= MOST_PIXELS):
            raise ValueError(
                f"max_pixels is {self.max_pixels!r}, expected an integer from {least} to "
                f"{MOST_PIXELS}"
            )
        if not (is_count(self.min_pixels) and self.min_pixels <= self.max_pixels):
            raise ValueError(
                f"min_pixels is {self.min_pixels!r}, expected 1 to max_pixels, {self.max_pixels}"
            )

    @property
    def family(self) -> Any:
        """The family's package of functions; see `models.family`."""
        return import_module(__name__.rpartition(".")[0])

    @property
    def feature_width(self) -> int:
        """Width d of the merged tokens that a pruner sees, which is the language model's."""
        return self.vision.out_size

    @property
    def class_token_block(self) -> None:
        """None, as the tower has no class token."""

    @property
    def received_block(self) -> int | None:
        """The last block, if it attends to the whole image."""
        last = self.vision.num_layers - 1
        return last if last in self.vision.full_blocks else None

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
        most, least = (
            pixels / self.vision.factor**2 for pixels in (self.max_pixels, self.min_pixels)
        )
        enlarged = least + 1 + math.sqrt(least) * (MAX_ASPECT + 1) / math.sqrt(MAX_ASPECT)
        return int(max(most, math.sqrt(MAX_ASPECT * most), enlarged))

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "QwenConfig":
        """Builds the config from a parsed `config.json`.

        Args:
            config: the parsed dict, of either generation: with text fields at the top level or in a
                `text_config`.

        Raises:
            ValueError: a field is not supported; the message names it.
        """
        where = "config.json"
        checked(config, "model_type", None, ("qwen2_5_vl",), where)
        if not isinstance(config.get("vision_config"), dict):
            raise ValueError(f"{where}: vision_config is missing or is not an object")
        text = config.get("text_config") or config
        if not isinstance(text, dict):
            raise ValueError(f"{where}: text_config is {text!r}, expected an object")
        tied = [switch(part, "tie_word_embeddings", False, where) for part in (config, text)]
        ids = {
            name: text.get(name) if config.get(name) is None else config[name]
            for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        # The file's begin-of-sequence token is <|endoftext|>, which no prompt begins with and which
        # also ends an answer.
        ends = token_ids(ids["eos_token_id"], "eos_token_id", where) or (151645,)
        ends += token_ids(ids["bos_token_id"], "bos_token_id", where) or (151643,)
        image = token_id(config.get("image_token_id"), "image_token_id", where)
        return cls(
            vision=QwenVisionConfig.from_hf(config["vision_config"]),
            text=_text_config(text, any(tied)),
            image_token_id=cls.image_token_id if image is None else image,
            eos_token_ids=tuple(dict.fromkeys(ends)),
            pad_token_id=token_id(ids["pad_token_id"], "pad_token_id", where),
        )


def _text_config(config: dict[str, Any], tied: bool) -> LlamaConfig:
    """Reads the shape of the language model."""
    where = "text_config"
    checked(config, "hidden_act", "silu", ("silu",), where)
    checked(config, "use_sliding_window", False, (False, None), where)
    hidden_size = positive(config, "hidden_size", 8192, where)
    num_heads = positive(config, "num_attention_heads", 64, where)
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(field) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{where}: {field} is {rope!r}, expected an object with mrope_section")
    # Older files describe the three position ids as a kind of scaling; newer ones do not.
    kind = rope.get("rope_type", rope.get("type", "mrope"))
    rope = rope | {"rope_type": "default" if kind == "mrope" else kind}
    sections = rope.get("mrope_section", (16, 24, 24))
    if not isinstance(sections, list | tuple) or not all(is_count(x, 0) for x in sections):
        raise ValueError(f"{where}: mrope_section is {sections!r}, expected three integers from 0")
    theta, scaling = read_rope({"rope_theta": 1e6, **config, field: rope}, where)
    return LlamaConfig(
        vocab_size=positive(config, "vocab_size", 152064, where),
        hidden_size=hidden_size,
        intermediate_size=positive(config, "intermediate_size", 29568, where),
        num_layers=positive(config, "num_hidden_layers", 80, where, MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=positive(config, "num_key_value_heads", num_heads, where),
        head_dim=hidden_size // num_heads,
        rope_theta=theta,
        rms_norm_eps=real(config, "rms_norm_eps", 1e-5, where),
        max_positions=positive(config, "max_position_embeddings", 32768, where),
        tie_embeddings=tied,
        rope_scaling=scaling,
        rope_sections=tuple(sections),
        qkv_bias=True,
    )


def hf_config(config: QwenConfig, dtype: str) -> dict[str, Any]:
    """Describes a model as a ``config.json``, in the field names of the published files.

    Args:
        config: the model.
        dtype: name of the weights' dtype, such as "bfloat16".

    Returns:
        A dict that `QwenConfig.from_hf` turns back into ``config``, except the bounds of images.
    """
    vision, text, scaling = config.vision, config.text, config.text.rope_scaling
    rope: dict[str, Any] = {"mrope_section": list(text.rope_sections)}
    if scaling is None:
        rope |= {"type": "mrope", "rope_type": "default"}
    else:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    eos, end_of_text = config.eos_token_ids[0], config.eos_token_ids[-1]
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": dtype,
        "image_token_id": config.image_token_id,
        "bos_token_id": end_of_text,
        "eos_token_id": eos,
        "pad_token_id": config.pad_token_id,
        "tie_word_embeddings": text.tie_embeddings,
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_hidden_layers": text.num_layers,
        "num_attention_heads": text.num_heads,
        "num_key_value_heads": text.num_kv_heads,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_theta": text.rope_theta,
        "rope_scaling": rope,
        "rms_norm_eps": text.rms_norm_eps,
        "max_position_embeddings": text.max_positions,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": vision.num_layers,
            "hidden_size": vision.hidden_size,
            "hidden_act": "silu",
            "intermediate_size": vision.intermediate_size,
            "num_heads": vision.num_heads,
            "in_chans": 3,
            "out_hidden_size": vision.out_size,
            "patch_size": vision.patch_size,
            "spatial_merge_size": vision.merge_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "window_size": vision.window_size,
            "fullatt_block_indexes": list(vision.full_blocks),
        },
    }
