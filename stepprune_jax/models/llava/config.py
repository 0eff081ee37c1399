"""Frozen configurations of CLIP and LLaVA, built from Hugging Face `config.json` dicts."""

import dataclasses
from importlib import import_module
from typing import Any

from stepprune_jax.models.config import (
    MOST_LAYERS,
    LlamaConfig,
    checked,
    positive,
    real,
    square,
    switch,
    token_id,
    token_ids,
)

ACTIVATIONS = ("quick_gelu", "gelu")


@dataclasses.dataclass(frozen=True)
class ClipConfig:
    """Shape of a CLIP vision transformer.

    Attributes:
        hidden_size: width d of the tower.
        intermediate_size: width of its MLPs.
        num_layers: number of blocks.
        num_heads: attention heads; divides `hidden_size`.
        image_size: side of the square input in pixels.
        patch_size: side of a square patch in pixels.
        layer_norm_eps: added to variances.
        activation: "quick_gelu" or "gelu" (the exact one).
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    layer_norm_eps: float = 1e-5
    activation: str = "quick_gelu"

    def __post_init__(self):
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"vision: hidden_size {self.hidden_size} is not a multiple of "
                f"num_heads {self.num_heads}"
            )
        if self.image_size < self.patch_size:
            raise ValueError(
                f"vision: image_size {self.image_size} is smaller than patch_size {self.patch_size}"
            )

    @property
    def num_patches(self) -> int:
        """Number n of patches of one image; an incomplete patch at the border is not counted."""
        return (self.image_size // self.patch_size) ** 2

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "ClipConfig":
        """Builds the config from a parsed `vision_config` or from a CLIP model's own file.

        Args:
            config: the vision part, or a whole CLIP `config.json`, whose `vision_config` is used.

        Returns:
            The frozen config.

        Raises:
            ValueError: a field has an unsupported value; the message names it.
        """
        if isinstance(config.get("vision_config"), dict):
            config = config["vision_config"]
        where = "vision_config"
        checked(config, "model_type", "clip_vision_model", ("clip_vision_model", "clip"), where)
        checked(config, "num_channels", 3, (3,), where)
        return cls(
            hidden_size=positive(config, "hidden_size", 768, where),
            intermediate_size=positive(config, "intermediate_size", 3072, where),
            num_layers=positive(config, "num_hidden_layers", 12, where, MOST_LAYERS),
            num_heads=positive(config, "num_attention_heads", 12, where),
            image_size=square(config, "image_size", 224, where),
            patch_size=square(config, "patch_size", 32, where),
            layer_norm_eps=real(config, "layer_norm_eps", 1e-5, where),
            activation=checked(config, "hidden_act", "quick_gelu", ACTIVATIONS, where),
        )


@dataclasses.dataclass(frozen=True)
class LlavaConfig:
    """A CLIP tower, a two-layer projector and a Llama.

    Attributes:
        vision: the tower.
        text: the language model.
        image_token_id: the vocabulary's own `<image>` id; None if it has none (original files).
        feature_layer: hidden state given to the projector; 0 is the embedding, -1 the last block's
            output.
        feature_select: "default" drops the class token, "full" keeps it.
        projector_activation: "gelu" (exact) or "quick_gelu".
        bos_token_id: begin-of-sequence id, or None.
        eos_token_ids: ids that end an answer.
        pad_token_id: padding id, or None.
    """

    vision: ClipConfig
    text: LlamaConfig
    image_token_id: int | None = None
    feature_layer: int = -2
    feature_select: str = "default"
    projector_activation: str = "gelu"
    bos_token_id: int | None = 1
    eos_token_ids: tuple[int, ...] = (2,)
    pad_token_id: int | None = None

    def __post_init__(self):
        if not -self.vision.num_layers - 1 <= self.feature_layer <= self.vision.num_layers:
            raise ValueError(
                f"vision_feature_layer {self.feature_layer} is outside a tower of "
                f"{self.vision.num_layers} layers"
            )

    @property
    def family(self) -> Any:
        """The family's package of functions; see `models.family`."""
        return import_module(__name__.rpartition(".")[0])

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
    def received_block(self) -> None:
        """None, as patches are ranked by the class token."""

    @property
    def sizes_vary(self) -> bool:
        """False, as all images have the same number of visual tokens."""
        return False

    @property
    def max_image_tokens(self) -> int:
        """Visual tokens of the largest image; here of every image."""
        return self.vision.num_patches + (self.feature_select == "full")

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "LlavaConfig":
        """Builds the config from the `config.json` of the Hugging Face LLaVA layout.

        Args:
            config: the parsed dict with `vision_config` and `text_config`.

        Returns:
            The frozen config.

        Raises:
            ValueError: not a LLaVA of this layout, or a field is not supported.
        """
        where = "config.json"
        checked(config, "model_type", None, ("llava",), where)
        for part in ("vision_config", "text_config"):
            if not isinstance(config.get(part), dict):
                raise ValueError(f"{where}: {part} is missing or is not an object")
        checked(config, "multimodal_projector_bias", True, (True,), where)
        layer = _layer(config, "vision_feature_layer", where)
        image = config.get("image_token_id", config.get("image_token_index", 32000))
        # Ids may be at the top level (newer files) or in the text part; Llama's are the fallback.
        text = {**config["text_config"]}
        ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
        for name, default in ids.items():
            given = (part[name] for part in (config, text) if part.get(name) is not None)
            ids[name] = next(given, default)
        if switch(config, "tie_word_embeddings", False, where):
            text["tie_word_embeddings"] = True
        return cls(
            vision=ClipConfig.from_hf(config["vision_config"]),
            text=LlamaConfig.from_hf(text),
            image_token_id=token_id(image, "image_token_index", where),
            feature_layer=layer,
            feature_select=checked(
                config, "vision_feature_select_strategy", "default", ("default", "full"), where
            ),
            projector_activation=checked(
                config, "projector_hidden_act", "gelu", ACTIVATIONS, where
            ),
            bos_token_id=token_id(ids["bos_token_id"], "bos_token_id", where),
            eos_token_ids=token_ids(ids["eos_token_id"], "eos_token_id", where),
            pad_token_id=token_id(ids["pad_token_id"], "pad_token_id", where),
        )

    @classmethod
    def from_original(cls, config: dict[str, Any], vision: dict[str, Any]) -> "LlavaConfig":
        """Builds the config from the original LLaVA-v1.5 layout, whose tower is stored elsewhere.

        Args:
            config: the parsed `config.json`: Llama's fields plus `mm_*` ones.
            vision: the parsed `config.json` of the CLIP folder named by `mm_vision_tower`.

        Returns:
            The frozen config; `image_token_id` is None, as that vocabulary has no such token.

        Raises:
            ValueError: a field is not supported; the message names it.
        """
        where = "config.json"
        checked(config, "mm_projector_type", "linear", ("mlp2x_gelu",), where)
        layer = _layer(config, "mm_vision_select_layer", where)
        select = checked(config, "mm_vision_select_feature", "patch", ("patch", "cls_patch"), where)
        return cls(
            vision=ClipConfig.from_hf(vision),
            text=LlamaConfig.from_hf(config),
            image_token_id=None,
            feature_layer=layer,
            feature_select="default" if select == "patch" else "full",
            bos_token_id=token_id(config.get("bos_token_id", 1), "bos_token_id", where),
            eos_token_ids=token_ids(config.get("eos_token_id", 2), "eos_token_id", where),
            pad_token_id=token_id(config.get("pad_token_id"), "pad_token_id", where),
        )


def _layer(config: dict[str, Any], field: str, where: str) -> int:
    """Reads which hidden state is projected."""
    layer = config.get(field, -2)
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise ValueError(f"{where}: {field} is {layer!r}, expected one integer")
    return layer


def hf_config(config: LlavaConfig, dtype: str) -> dict[str, Any]:
    """Describes a model as a Hugging Face LLaVA ``config.json``.

    Args:
        config: the model; must have an image token id.
        dtype: name of the weights' dtype, such as "bfloat16".

    Returns:
        A dict that `LlavaConfig.from_hf` turns back into ``config``.
    """
    vision = config.vision
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "dtype": dtype,
        "image_token_index": config.image_token_id,
        "image_seq_length": config.max_image_tokens,
        "projector_hidden_act": config.projector_activation,
        "multimodal_projector_bias": True,
        "vision_feature_layer": config.feature_layer,
        "vision_feature_select_strategy": config.feature_select,
        "tie_word_embeddings": config.text.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _one_or_list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_hidden_layers": vision.num_layers,
            "num_attention_heads": vision.num_heads,
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            "layer_norm_eps": vision.layer_norm_eps,
            "hidden_act": vision.activation,
            "projection_dim": vision.hidden_size,
        },
        "text_config": _hf_text_config(config.text, config),
    }


def _hf_text_config(text: LlamaConfig, config: LlavaConfig) -> dict[str, Any]:
    """Returns the language part, in field names of old and new versions of `transformers`."""
    scaling = None
    if text.rope_scaling is not None:
        rope = text.rope_scaling
        scaling = {"rope_type": rope.kind, "factor": rope.factor}
        if rope.kind == "llama3":
            scaling |= {
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
                "original_max_position_embeddings": rope.original_max_positions,
            }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_hidden_layers": text.num_layers,
        "num_attention_heads": text.num_heads,
        "num_key_value_heads": text.num_kv_heads,
        "head_dim": text.head_dim,
        "hidden_act": "silu",
        "rope_theta": text.rope_theta,
        "rope_scaling": scaling,
        "rms_norm_eps": text.rms_norm_eps,
        "max_position_embeddings": text.max_positions,
        "tie_word_embeddings": text.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _one_or_list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
    }


def _one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    """Returns token ids as `transformers` writes them: none, one, or a list."""
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)
