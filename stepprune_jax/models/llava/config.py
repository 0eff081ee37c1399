"""Frozen, hashable configurations of the backbones, built from Hugging Face `config.json` dicts.

Every builder checks what it reads and raises a `ValueError` that names the field, the value found
and what is supported, so that a wrong folder fails before any weight is read. Defaults are those
of the Hugging Face configuration classes, because published files leave default fields out.
"""

import dataclasses
from importlib import import_module
from typing import Any

ACTIVATIONS = ("quick_gelu", "gelu")
ROPE_TYPES = ("default", "linear", "llama3")


def _checked(config: dict[str, Any], field: str, default: Any, supported: tuple, where: str) -> Any:
    """The value of a field that must be one of a few, else an error that lists them."""
    value = config.get(field, default)
    if value not in supported:
        listed = ", ".join(map(repr, supported))
        raise ValueError(f"{where}: {field} is {value!r}; supported: {listed}")
    return value


def _positive(config: dict[str, Any], field: str, default: int, where: str) -> int:
    """A field that must be a positive integer."""
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: {field} is {value!r}, expected a positive integer")
    return value


def _square(config: dict[str, Any], field: str, default: int, where: str) -> int:
    """A side length, given as one integer or as a pair of equal integers."""
    value = config.get(field, default)
    if isinstance(value, list | tuple):
        if len(set(value)) != 1:
            raise ValueError(f"{where}: {field} is {value!r}, expected a square")
        value = value[0]
    return _positive({field: value}, field, default, where)


def _token_ids(value: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    """A token id field that may be absent, one id or several, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


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
            config: the vision part, or a whole CLIP `config.json`, whose `vision_config` is taken.

        Returns:
            The frozen config.

        Raises:
            ValueError: a field has an unsupported value; the message names it.
        """
        if isinstance(config.get("vision_config"), dict):
            config = config["vision_config"]
        where = "vision_config"
        _checked(config, "model_type", "clip_vision_model", ("clip_vision_model", "clip"), where)
        _checked(config, "num_channels", 3, (3,), where)
        return cls(
            hidden_size=_positive(config, "hidden_size", 768, where),
            intermediate_size=_positive(config, "intermediate_size", 3072, where),
            num_layers=_positive(config, "num_hidden_layers", 12, where),
            num_heads=_positive(config, "num_attention_heads", 12, where),
            image_size=_square(config, "image_size", 224, where),
            patch_size=_square(config, "patch_size", 32, where),
            layer_norm_eps=float(config.get("layer_norm_eps", 1e-5)),
            activation=_checked(config, "hidden_act", "quick_gelu", ACTIVATIONS, where),
        )


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Stretching of the rotary frequencies beyond the pretrained length.

    Attributes:
        kind: "linear" (all frequencies divided by `factor`) or "llama3" (only those whose wave is
            long against the pretrained length, with a smooth passage between).
        factor: how many times longer the context is made.
        low_freq_factor: "llama3": waves longer than length / low_freq_factor are stretched fully.
        high_freq_factor: "llama3": waves shorter than length / high_freq_factor are left alone.
        original_max_positions: "llama3": the pretrained length.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


def _rope(config: dict[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embedding, from either generation of field names."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", config.get("rope_theta") or 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default")) or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(
            f"{where}: RoPE scaling type {kind!r} is not supported; "
            f"supported are {', '.join(map(repr, ROPE_TYPES))}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{where}: partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return theta, None
    needed = ("factor",) if kind == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
    missing = [name for name in needed if name not in rope]
    if missing:
        raise ValueError(f"{where}: RoPE scaling {kind!r} lacks {', '.join(missing)}")
    if kind == "linear":
        return theta, RopeScaling(kind, float(rope["factor"]))
    length = rope.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    return theta, RopeScaling(
        kind,
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(length or 2048),
    )


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama language model.

    Attributes:
        vocab_size: number v of token embeddings.
        hidden_size: width e.
        intermediate_size: width f of the gated MLPs.
        num_layers: number of blocks.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_dim: channels c of one head.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: added to mean squares.
        max_positions: pretrained length in tokens.
        tie_embeddings: the output head is the transposed embedding.
        rope_scaling: None or a supported stretching.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 2048
    tie_embeddings: bool = False
    rope_scaling: RopeScaling | None = None

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"text: num_heads {self.num_heads} is not a multiple of "
                f"num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"text: head_dim {self.head_dim} must be even for rotary positions")

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "LlamaConfig":
        """Builds the config from a parsed Llama `config.json` or the `text_config` of a LLaVA.

        Args:
            config: the parsed dict; of both generations of RoPE fields (`rope_theta` with
                `rope_scaling`, or `rope_parameters`).

        Returns:
            The frozen config.

        Raises:
            ValueError: a field has an unsupported value, such as a RoPE type; the message names it.
        """
        where = "text_config"
        # The original LLaVA files carry their own model type around an unchanged Llama.
        _checked(config, "model_type", "llama", ("llama", "llava", "llava_llama"), where)
        _checked(config, "hidden_act", "silu", ("silu",), where)
        _checked(config, "attention_bias", False, (False,), where)
        _checked(config, "mlp_bias", False, (False,), where)
        hidden_size = _positive(config, "hidden_size", 4096, where)
        num_heads = _positive(config, "num_attention_heads", 32, where)
        theta, scaling = _rope(config, where)
        return cls(
            vocab_size=_positive(config, "vocab_size", 32000, where),
            hidden_size=hidden_size,
            intermediate_size=_positive(config, "intermediate_size", 11008, where),
            num_layers=_positive(config, "num_hidden_layers", 32, where),
            num_heads=num_heads,
            num_kv_heads=_positive(config, "num_key_value_heads", num_heads, where),
            head_dim=_positive(config, "head_dim", hidden_size // num_heads, where),
            rope_theta=theta,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_positions=_positive(config, "max_position_embeddings", 2048, where),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope_scaling=scaling,
        )


@dataclasses.dataclass(frozen=True)
class LlavaConfig:
    """A CLIP tower, a two-layer projector and a Llama.

    Attributes:
        vision: the tower.
        text: the language model.
        image_token_id: the vocabulary's own `<image>` id; None where it has none (original files).
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
        """The package of functions that are this family's; see `models.family`."""
        return import_module("stepprune_jax.models.llava")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the patches of an image, which are the same for all images."""
        side = self.vision.image_size // self.vision.patch_size
        return side, side

    @property
    def num_image_tokens(self) -> int:
        """Number n of visual tokens of one unpruned image."""
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
        _checked(config, "model_type", None, ("llava",), where)
        for part in ("vision_config", "text_config"):
            if not isinstance(config.get(part), dict):
                raise ValueError(f"{where}: {part} is missing or is not an object")
        _checked(config, "multimodal_projector_bias", True, (True,), where)
        layer = config.get("vision_feature_layer", -2)
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise ValueError(f"{where}: vision_feature_layer is {layer!r}, expected one integer")
        # Ids may stand at the top (newer files) or in the text part; Llama's are the last resort.
        text = {**config["text_config"]}
        ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
        for name, default in ids.items():
            given = (part[name] for part in (config, text) if part.get(name) is not None)
            ids[name] = next(given, default)
        text["tie_word_embeddings"] = bool(
            config.get("tie_word_embeddings") or text.get("tie_word_embeddings", False)
        )
        return cls(
            vision=ClipConfig.from_hf(config["vision_config"]),
            text=LlamaConfig.from_hf(text),
            image_token_id=config.get("image_token_id", config.get("image_token_index", 32000)),
            feature_layer=layer,
            feature_select=_checked(
                config, "vision_feature_select_strategy", "default", ("default", "full"), where
            ),
            projector_activation=_checked(
                config, "projector_hidden_act", "gelu", ACTIVATIONS, where
            ),
            bos_token_id=ids["bos_token_id"],
            eos_token_ids=_token_ids(ids["eos_token_id"]),
            pad_token_id=ids["pad_token_id"],
        )

    @classmethod
    def from_original(cls, config: dict[str, Any], vision: dict[str, Any]) -> "LlavaConfig":
        """Builds the config from the original LLaVA-v1.5 layout, whose tower lies elsewhere.

        Args:
            config: the parsed `config.json`: Llama's fields plus `mm_*` ones.
            vision: the parsed `config.json` of the CLIP folder named by `mm_vision_tower`.

        Returns:
            The frozen config; `image_token_id` is None, as that vocabulary has no such token.

        Raises:
            ValueError: a field is not supported; the message names it.
        """
        where = "config.json"
        _checked(config, "mm_projector_type", "linear", ("mlp2x_gelu",), where)
        select = _checked(
            config, "mm_vision_select_feature", "patch", ("patch", "cls_patch"), where
        )
        return cls(
            vision=ClipConfig.from_hf(vision),
            text=LlamaConfig.from_hf(config),
            image_token_id=None,
            feature_layer=int(config.get("mm_vision_select_layer", -2)),
            feature_select="default" if select == "patch" else "full",
            bos_token_id=config.get("bos_token_id", 1),
            eos_token_ids=_token_ids(config.get("eos_token_id", 2)),
            pad_token_id=config.get("pad_token_id"),
        )
