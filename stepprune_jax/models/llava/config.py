"""Frozen configurations of CLIP and LLaVA, built from Hugging Face `config.json` dicts."""

import dataclasses
from typing import Any, TypeVar

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
    size,
    switch,
    token,
    tokens,
    write_rope,
    written,
)
from stepprune_jax.user_input import naming, require

AnyLlava = TypeVar("AnyLlava", bound="LlavaConfig")

_ACTIVATIONS = ("quick_gelu", "gelu")


def _square(field: str, default: int) -> FieldRule:
    """A side length, given as one integer or as a pair of equal integers."""
    side = size(field, default, LONGEST_SIDE)

    def read(value: object) -> object:
        sides = list(value) if isinstance(value, list | tuple) else [value]
        return side.read(sides[0]) if sides and all(x == sides[0] for x in sides) else None

    return side._replace(read=read, expected=f"a square side, {side.expected}")


_CLIP = {
    "hidden_size": size("hidden_size", 768),
    "intermediate_size": size("intermediate_size", 3072),
    "num_layers": size("num_hidden_layers", 12, MOST_LAYERS),
    "num_heads": size("num_attention_heads", 12),
    "image_size": _square("image_size", 224),
    "patch_size": _square("patch_size", 32),
    "layer_norm_eps": number("layer_norm_eps", 1e-5),
    "activation": one_of("hidden_act", *_ACTIVATIONS),
}
_CLIP_ONLY = {
    "kind": one_of("model_type", "clip_vision_model", "clip"),
    "channels": one_of("num_channels", 3),
}
_IDS = {
    "bos_token_id": token("bos_token_id", 1),
    "eos_token_ids": tokens("eos_token_id", (2,)),
    "pad_token_id": token("pad_token_id"),
}


def _layer(field: str) -> FieldRule:
    return FieldRule(field, -2, lambda x: x if type(x) is int else None, "one integer")


_LLAVA = {
    **_IDS,
    "feature_layer": _layer("vision_feature_layer"),
    "projector_activation": one_of("projector_hidden_act", "gelu", "quick_gelu"),
}
_PARTS = {
    "vision": part("vision_config"),
    "text": part("text_config"),
    "tied": switch("tie_word_embeddings", False),
}
_LLAVA_ONLY = {
    "kind": one_of("model_type", None, "llava"),
    "bias": one_of("multimodal_projector_bias", True),
    # The visual tokens are the patches, without the class token.
    "select": one_of("vision_feature_select_strategy", "default"),
}
_ORIGINAL = {
    **_IDS,
    "feature_layer": _layer("mm_vision_select_layer"),
    "pad_images": FieldRule(
        "image_aspect_ratio",
        False,
        lambda x: x == "pad" if x in ("pad", "square") else None,
        "'pad' or 'square'",
    ),
}
_ORIGINAL_ONLY = {
    "projector": one_of("mm_projector_type", None, "mlp2x_gelu"),
    "select": one_of("mm_vision_select_feature", "patch"),
    # Tokens around an image, a resampler, and what belongs to images in several parts.
    "marks": one_of("mm_use_im_start_end", False),
    "resampler": FieldRule("mm_resampler_type", None, lambda x: None, "null", optional=True),
    "merge": one_of("mm_patch_merge_type", "flat", "spatial"),
    "scales": one_of("s2", False),
}


@dataclasses.dataclass(frozen=True)
class ClipConfig:
    """Shape of a CLIP vision transformer; sizes of images and patches are sides in pixels.

    `trained_size` is the side that it was trained for, if it is given smaller images.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    layer_norm_eps: float = 1e-5
    activation: str = "quick_gelu"
    trained_size: int | None = None

    def __post_init__(self):
        d, heads = self.hidden_size, self.num_heads
        image, patch = self.image_size, self.patch_size
        with naming("vision_config"):
            require(d % heads == 0, f"hidden_size {d} is not a multiple of num_heads {heads}")
            require(image >= patch, f"image_size {image} is smaller than patch_size {patch}")

    @property
    def num_patches(self) -> int:
        """Number n of patches of one image; an incomplete patch at the border is not counted."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def trained(self) -> "ClipConfig":
        """The tower for images of the size that it was trained for, which its weights fit."""
        side = self.trained_size or self.image_size
        return dataclasses.replace(self, image_size=side, trained_size=None)

    @classmethod
    def from_hf(cls, raw: Json) -> "ClipConfig":
        """Builds the config from a parsed `vision_config`, or a CLIP's own file that has one."""
        if isinstance(raw.get("vision_config"), dict):
            raw = raw["vision_config"]
        read_fields(raw, "vision_config", _CLIP_ONLY)
        return cls(**read_fields(raw, "vision_config", _CLIP))


@dataclasses.dataclass(frozen=True)
class LlavaConfig(ModelConfig):
    """A CLIP tower, a two-layer projector and a Llama.

    Attributes:
        vision: the tower.
        image_token_id: the vocabulary's own `<image>` id; None if it has none (original files).
        feature_layer: hidden state given to the projector; 0 is the embedding, -1 the last block's
            output.
        projector_activation: "gelu" (exact) or "quick_gelu".
        pad_images: whether images are padded to squares; None if the image processor's file says it
            (Hugging Face layout).
    """

    vision: ClipConfig
    bos_token_id: int | None = 1
    eos_token_ids: tuple[int, ...] = (2,)
    feature_layer: int = -2
    projector_activation: str = "gelu"
    pad_images: bool | None = None

    def __post_init__(self):
        layer, layers = self.feature_layer, self.vision.num_layers
        message = f"vision_feature_layer {layer} is outside a tower of {layers} layers"
        require(-layers - 1 <= layer <= layers, f"config.json: {message}")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of an image's patches, the same for all images."""
        side = self.vision.image_size // self.vision.patch_size
        return side, side

    @property
    def feature_width(self) -> int:
        """Width d of the visual tokens that a pruner sees."""
        return self.vision.hidden_size

    @property
    def class_token_block(self) -> int | None:
        """The tower's block whose output is projected; None if that is the embedding."""
        state = self.feature_layer % (self.vision.num_layers + 1)
        return state - 1 if state else None

    @property
    def global_blocks(self) -> tuple[int, ...]:
        """All blocks of the tower."""
        return tuple(range(self.vision.num_layers))

    @property
    def max_image_tokens(self) -> int:
        """Visual tokens of every image."""
        return self.vision.num_patches

    @classmethod
    def from_hf(cls: type[AnyLlava], raw: Json, **more: Any) -> AnyLlava:
        """Builds the config from the `config.json` of the Hugging Face LLaVA layout.

        Args:
            raw: the parsed dict with `vision_config` and `text_config`.
            **more: fields of a subclass.

        Raises:
            ValueError: not a LLaVA of this layout, or a field is not supported.
        """
        where = "config.json"
        parts = read_fields(raw, where, _PARTS)
        text = parts["text"] | ({"tie_word_embeddings": True} if parts["tied"] else {})
        # First the two parts: other models' fields around them are correct, and are not to blame.
        vision, language = ClipConfig.from_hf(parts["vision"]), LlamaConfig.from_hf(text)
        read_fields(raw, where, _LLAVA_ONLY)
        # Ids may be at the top level (newer files) or in the text part; Llama's are the fallback.
        given = {name: value for name, value in raw.items() if value is not None}
        image = "image_token_id" if "image_token_id" in raw else "image_token_index"
        rules = _LLAVA | {"image_token_id": token(image, 32000)}
        return cls(
            vision=vision,
            text=language,
            **read_fields({**text, **given}, where, rules),
            **more,
        )

    @classmethod
    def check_original(cls, raw: Json) -> None:
        """Checks a ``config.json`` of the original layout, before its tower is looked for.

        Raises:
            ValueError: a field is not supported; the message names it.
        """
        LlamaConfig.from_hf(raw)
        read_fields(raw, "config.json", _ORIGINAL | _ORIGINAL_ONLY)

    @classmethod
    def from_original(cls: type[AnyLlava], raw: Json, vision: Json, **more: Any) -> AnyLlava:
        """Builds the config from the original LLaVA-v1.5 layout, whose tower is stored elsewhere.

        Args:
            raw: the parsed `config.json`, checked by `check_original`: Llama's fields plus `mm_*`
                ones.
            vision: the parsed `config.json` of the CLIP folder named by `mm_vision_tower`.
            **more: fields of a subclass.

        Returns:
            The frozen config; `image_token_id` is None, as that vocabulary has no such token.

        Raises:
            ValueError: a field of the tower is not supported; the message names it.
        """
        tower = ClipConfig.from_hf(vision)
        width = one_of("mm_hidden_size", tower.hidden_size)
        width = width._replace(expected=f"{tower.hidden_size}, the tower's hidden_size")
        read_fields(raw, "config.json", {"width": width})
        return cls(
            vision=tower,
            text=LlamaConfig.from_hf(raw),
            **read_fields(raw, "config.json", _ORIGINAL),
            **more,
        )

    def to_hf(self, dtype: str) -> Json:
        """Describes a model with an image token as a ``config.json`` that `from_hf` reads."""
        if self.vision.trained_size is not None:  # smaller images are a choice of who runs it
            return dataclasses.replace(self, vision=self.vision.trained).to_hf(dtype)
        eos = self.eos_token_ids
        ids = written(self, _IDS) | {"eos_token_id": eos[0] if len(eos) == 1 else list(eos)}
        rope = write_rope(self.text.rope_scaling)
        return {
            **written(self, _LLAVA),
            **ids,
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "dtype": dtype,
            "image_token_index": self.image_token_id,
            "image_seq_length": self.max_image_tokens,
            "multimodal_projector_bias": True,
            "vision_feature_select_strategy": "default",
            "tie_word_embeddings": self.text.tie_embeddings,
            "vision_config": {
                **written(self.vision, _CLIP),
                "model_type": "clip_vision_model",
                "projection_dim": self.vision.hidden_size,
            },
            "text_config": {
                **written(self.text, LLAMA),
                **ids,
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_act": "silu",
                "rope_theta": self.text.rope_theta,
                "rope_scaling": rope if self.text.rope_scaling else None,
            },
        }
