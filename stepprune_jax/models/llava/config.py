"""Configurations of CLIP and LLaVA, and their translation from and to ``config.json`` files."""

import dataclasses
from typing import Any, TypeVar

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
    size_rule,
    token_id_rule,
    token_ids_rule,
    write_fields,
    write_rope,
)
from stepprune_jax.user_input import naming, require

AnyLlava = TypeVar("AnyLlava", bound="LlavaConfig")

_ACTIVATIONS = ("quick_gelu", "gelu")


def _square_side_rule(field: str, default: int) -> FieldRule:
    """Returns the rule for the side of a square: an integer, or a pair of equal integers."""
    side_rule = size_rule(field, default, MAX_SIDE)

    def read(value: object) -> object:
        sides = list(value) if isinstance(value, list | tuple) else [value]
        is_square = bool(sides) and all(side == sides[0] for side in sides)
        return side_rule.read(sides[0]) if is_square else None

    return side_rule._replace(read=read, expected=f"a square side, {side_rule.expected}")


_CLIP = {
    "hidden_size": size_rule("hidden_size", 768),
    "intermediate_size": size_rule("intermediate_size", 3072),
    "num_layers": size_rule("num_hidden_layers", 12, MAX_LAYERS),
    "num_heads": size_rule("num_attention_heads", 12),
    "image_size": _square_side_rule("image_size", 224),
    "patch_size": _square_side_rule("patch_size", 32),
    "layer_norm_eps": number_rule("layer_norm_eps", 1e-5),
    "activation": choice_rule("hidden_act", *_ACTIVATIONS),
}
_CLIP_ONLY = {
    "kind": choice_rule("model_type", "clip_vision_model", "clip"),
    "channels": choice_rule("num_channels", 3),
}
_IDS = {
    "bos_token_id": token_id_rule("bos_token_id", 1),
    "eos_token_ids": token_ids_rule("eos_token_id", (2,)),
    "pad_token_id": token_id_rule("pad_token_id"),
}


def _layer_rule(field: str) -> FieldRule:
    """Returns the rule for the number of a hidden state, which may be negative."""
    return FieldRule(field, -2, lambda value: value if type(value) is int else None, "one integer")


def _read_pad_images(value: object) -> bool | None:
    """Reads `image_aspect_ratio`; returns whether images are padded to squares."""
    return {"pad": True, "square": False}.get(value) if isinstance(value, str) else None


_LLAVA = {
    **_IDS,
    "feature_layer": _layer_rule("vision_feature_layer"),
    "projector_activation": choice_rule("projector_hidden_act", "gelu", "quick_gelu"),
}
_PARTS = {
    "vision": object_rule("vision_config"),
    "text": object_rule("text_config"),
    "tied": bool_rule("tie_word_embeddings", False),
}
_LLAVA_ONLY = {
    "kind": choice_rule("model_type", None, "llava"),
    "bias": choice_rule("multimodal_projector_bias", True),
    # "default" drops the class token: the visual tokens are the patches.
    "select": choice_rule("vision_feature_select_strategy", "default"),
}
_ORIGINAL = {
    **_IDS,
    "feature_layer": _layer_rule("mm_vision_select_layer"),
    "pad_images": FieldRule("image_aspect_ratio", False, _read_pad_images, "'pad' or 'square'"),
}
_ORIGINAL_ONLY = {
    "projector": choice_rule("mm_projector_type", None, "mlp2x_gelu"),
    "select": choice_rule("mm_vision_select_feature", "patch"),
    # Features that are not supported: start and end tokens around an image, a resampler, and images
    # that are encoded in several parts.
    "marks": choice_rule("mm_use_im_start_end", False),
    "resampler": FieldRule("mm_resampler_type", None, lambda value: None, "null", optional=True),
    "merge": choice_rule("mm_patch_merge_type", "flat", "spatial"),
    "scales": choice_rule("s2", False),
}


@dataclasses.dataclass(frozen=True)
class ClipConfig:
    """Shape of a CLIP vision transformer.

    Attributes:
        hidden_size: width d of the residual stream.
        intermediate_size: width of the MLPs.
        num_layers: number of blocks.
        num_heads: number of attention heads; divides `hidden_size`.
        image_size: side of the square images in pixels.
        patch_size: side of the square patches in pixels.
        layer_norm_eps: constant that layer norms add to the variance.
        activation: activation of the MLPs, see `layers.activate`.
        trained_size: side in pixels of the images in training; None if it is `image_size`.
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
        """Number n of patches of an image; incomplete patches at the border are dropped."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def trained(self) -> "ClipConfig":
        """The tower with the image size of its training, which determines its weights' shapes."""
        side = self.trained_size or self.image_size
        return dataclasses.replace(self, image_size=side, trained_size=None)

    @classmethod
    def from_hf(cls, raw: Json) -> "ClipConfig":
        """Builds the config from a `vision_config`, or from a ``config.json`` that contains one."""
        if isinstance(raw.get("vision_config"), dict):
            raw = raw["vision_config"]
        read_fields(raw, "vision_config", _CLIP_ONLY)
        return cls(**read_fields(raw, "vision_config", _CLIP))


@dataclasses.dataclass(frozen=True)
class LlavaConfig(ModelConfig):
    """A CLIP tower, a two-layer projector and a Llama.

    Attributes:
        vision: shape of the tower.
        image_token_id: id of `<image>` in the vocabulary; None if the vocabulary has no such token,
            as in the original layout.
        feature_layer: hidden state of the tower that the projector reads; 0 is the embedding, -1 is
            the output of the last block.
        projector_activation: "gelu" (exact) or "quick_gelu".
        pad_images: whether images are padded to squares; None if the image processor's file decides
            this, as in the Hugging Face layout.
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
        """Width d of the visual tokens that a pruner reads."""
        return self.vision.hidden_size

    @property
    def class_token_block(self) -> int | None:
        """The tower block whose output is projected; None if the embedding is projected."""
        state = self.feature_layer % (self.vision.num_layers + 1)
        return state - 1 if state else None

    @property
    def global_blocks(self) -> tuple[int, ...]:
        """All blocks of the tower, because every block has global attention."""
        return tuple(range(self.vision.num_layers))

    @property
    def max_image_tokens(self) -> int:
        """Number of visual tokens, which all images share."""
        return self.vision.num_patches

    @classmethod
    def from_hf(cls: type[AnyLlava], raw: Json, **subclass_fields: Any) -> AnyLlava:
        """Builds the config from a ``config.json`` of the Hugging Face layout.

        Args:
            raw: the parsed JSON object, with `vision_config` and `text_config`.
            **subclass_fields: fields that a subclass adds.

        Raises:
            ValueError: the file has another layout, or a field has an unsupported value.
        """
        where = "config.json"
        parts = read_fields(raw, where, _PARTS)
        text = parts["text"] | ({"tie_word_embeddings": True} if parts["tied"] else {})
        # The two parts are checked first. In the file of another model, the outer fields may be
        # valid for that model, so an error should name the part that is not supported.
        vision, language = ClipConfig.from_hf(parts["vision"]), LlamaConfig.from_hf(text)
        read_fields(raw, where, _LLAVA_ONLY)
        # Token ids are at the top level in newer files, and in the text part in older files.
        outer_fields = {name: value for name, value in raw.items() if value is not None}
        id_field = "image_token_id" if "image_token_id" in raw else "image_token_index"
        rules = _LLAVA | {"image_token_id": token_id_rule(id_field, 32000)}
        return cls(
            vision=vision,
            text=language,
            **read_fields({**text, **outer_fields}, where, rules),
            **subclass_fields,
        )

    @classmethod
    def check_original(cls, raw: Json) -> None:
        """Checks a ``config.json`` of the original layout before the tower's folder is read.

        Raises:
            ValueError: a field has an unsupported value; the message names the field.
        """
        LlamaConfig.from_hf(raw)
        read_fields(raw, "config.json", _ORIGINAL | _ORIGINAL_ONLY)

    @classmethod
    def from_original(
        cls: type[AnyLlava], raw: Json, vision: Json, **subclass_fields: Any
    ) -> AnyLlava:
        """Builds the config from the original layout, which stores the tower in another folder.

        Args:
            raw: the parsed ``config.json``, checked by `check_original`. It has the fields of a
                Llama and fields that begin with ``mm_``.
            vision: the parsed ``config.json`` of the CLIP folder that `mm_vision_tower` names.
            **subclass_fields: fields that a subclass adds.

        Returns:
            The config; `image_token_id` is None, because the vocabulary has no such token.

        Raises:
            ValueError: a field of the tower has an unsupported value; the message names the field.
        """
        tower = ClipConfig.from_hf(vision)
        width = choice_rule("mm_hidden_size", tower.hidden_size)
        width = width._replace(expected=f"{tower.hidden_size}, the tower's hidden_size")
        read_fields(raw, "config.json", {"width": width})
        return cls(
            vision=tower,
            text=LlamaConfig.from_hf(raw),
            **read_fields(raw, "config.json", _ORIGINAL),
            **subclass_fields,
        )

    def to_hf(self, dtype: str) -> Json:
        """Returns the ``config.json`` of the model, in the layout that `from_hf` reads.

        Args:
            dtype: name of the weights' dtype.
        """
        if self.vision.trained_size is not None:
            # The user chose smaller images for this process; saved files keep the trained size.
            return dataclasses.replace(self, vision=self.vision.trained).to_hf(dtype)
        eos_ids = list(self.eos_token_ids)
        eos_field = eos_ids[0] if len(eos_ids) == 1 else eos_ids
        ids = write_fields(self, _IDS) | {"eos_token_id": eos_field}
        rope = write_rope(self.text.rope_scaling)
        return {
            **write_fields(self, _LLAVA),
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
                **write_fields(self.vision, _CLIP),
                "model_type": "clip_vision_model",
                "projection_dim": self.vision.hidden_size,
            },
            "text_config": {
                **write_fields(self.text, LLAMA),
                **ids,
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_act": "silu",
                "rope_theta": self.text.rope_theta,
                "rope_scaling": rope if self.text.rope_scaling else None,
            },
        }
