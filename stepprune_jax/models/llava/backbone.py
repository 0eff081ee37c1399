"""LLaVA-1.5 (Liu et al., https://arxiv.org/abs/2310.03744): a CLIP tower, a projector, a Llama."""

import copy
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int, UInt8
from PIL import Image

from stepprune_jax.data.prompts import IMAGE_MARK
from stepprune_jax.models import decoder
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import FieldRule, Json, Tokenizer, read_fields
from stepprune_jax.models.images import Bytes, normalise, read_processor
from stepprune_jax.models.layers import Dense, activate
from stepprune_jax.models.llava import images, tower, weights
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.models.llava.images import LlavaImageSettings
from stepprune_jax.models.stack import Execution, Params
from stepprune_jax.models.weights import WeightRule, replace_prefix
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import UserError, expect

# System prompt and roles of the ``vicuna_v1`` template of the original LLaVA repository.
_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_ROLES = ("USER", "ASSISTANT")
# A finished user turn ends with a space; a finished assistant turn ends with </s> and no space.
_ENDS = (" ", "</s>")


def _read_string(value: object) -> str | None:
    return value if isinstance(value, str) else None


_TOWER_FOLDER = FieldRule("mm_vision_tower", "", _read_string, "a folder or hub id")


class Projector(nn.Module):
    """Maps the tower's features to the width of the language model by a two-layer MLP."""

    config: LlavaConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*b d"]) -> Float[Array, "*b e"]:
        """Projects visual features."""
        width = self.config.text.hidden_size
        x = activate(self.config.projector_activation, Dense(width, name="up")(x))
        return Dense(width, name="down")(x)


@dataclasses.dataclass(frozen=True)
class Llava(Backbone):
    """LLaVA-1.5, in the Hugging Face layout or the original one.

    Attributes:
        CONFIG: class of the configuration.
        PROCESSOR: name of the processor's class in `transformers`.
    """

    config: LlavaConfig
    name = "llava"
    CONFIG: ClassVar[type[LlavaConfig]] = LlavaConfig
    SUPPORTED = (
        "LLaVA-1.5 in the Hugging Face layout (model_type 'llava' with text_config and "
        "vision_config) or in the original one (a Llama config.json with mm_vision_tower)"
    )
    CONTEXT_LIMIT = 2048  # the longest sequence of the model's training
    SHARDING_RULES = weights.SHARDING_RULES
    VISION_PREFIX = weights.VISION
    MARK = f"{IMAGE_MARK}\n"
    PROCESSOR = "LlavaProcessor"

    @classmethod
    def matches(cls, raw: Json) -> bool:
        is_hf_layout = raw.get("model_type") == "llava" and "text_config" in raw
        return _is_original_layout(raw) or is_hf_layout

    @classmethod
    def vision_folder(cls, raw: Json) -> str | None:
        if not _is_original_layout(raw):
            return None
        folder = read_fields(raw, "config.json", {"folder": _TOWER_FOLDER})["folder"]
        cls.CONFIG.check_original(raw)
        return folder

    @classmethod
    def read(cls, raw: Json, vision: Json | None) -> Backbone:
        if vision is None:
            return cls(LlavaConfig.from_hf(raw))
        return cls(LlavaConfig.from_original(raw, vision))

    @classmethod
    def canonical_name(cls, name: str, of_vision_folder: bool = False) -> str | None:
        if not of_vision_folder:
            return replace_prefix(name, weights.PREFIXES)
        if name.startswith(weights.CLIP_EXTRAS):
            return None
        return weights.VISION + name.removeprefix("vision_model.")

    def may_be_unused(self, name: str) -> bool:
        is_tied_head = self.config.text.tie_embeddings and name.startswith(weights.HEAD + ".")
        return is_tied_head or name.endswith(weights.UNUSED_ENDINGS)

    def weight_rules(self) -> tuple[WeightRule, ...]:
        return weights.rules(self.config.vision.patch_size)

    def complete_vocabulary(self, tokenizer: Tokenizer) -> tuple[Backbone, Tokenizer]:
        config = self.config
        if config.image_token_id is not None:
            return self, tokenizer
        # Saved folders have the Hugging Face layout, which needs an image token. The vocabulary of
        # the original layout has no such token.
        image_token_id = config.text.vocab_size
        if tokenizer is not None:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.add_tokens([IMAGE_MARK], special_tokens=True)
            image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_MARK)
        vocab_size = max(image_token_id + 1, config.text.vocab_size)
        text = dataclasses.replace(config.text, vocab_size=vocab_size)
        return self.replace(text=text, image_token_id=image_token_id), tokenizer

    @classmethod
    def image_settings(cls, folder: str | Path) -> LlavaImageSettings:
        return images.settings_from_hf(*read_processor(folder))

    def hf_processor(self, settings: LlavaImageSettings) -> dict[str, Json]:
        image_processor = self.hf_image_processor(settings)
        processor_class = {"processor_class": self.PROCESSOR}
        processor = {
            **processor_class,
            "image_processor": image_processor,
            "image_token": IMAGE_MARK,
            **images.placeholder_fields(self.config.vision.patch_size),
        }
        return {
            "preprocessor_config.json": image_processor | processor_class,
            "processor_config.json": processor,
        }

    def hf_image_processor(self, settings: LlavaImageSettings) -> Json:
        """Returns the JSON fields of the image processor."""
        settings = images.override_padding(settings, self.config.pad_images)
        return images.to_hf(settings, self.config.normalisation)

    def bound_images(
        self,
        folder: str | Path | None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> Backbone:
        vision = self.config.vision
        side, patch = vision.image_size, vision.patch_size
        expected = f"none, as this model takes images of one size, {side} x {side}"
        expect("min_pixels", min_pixels, min_pixels is None, expected)
        if folder is not None:
            images.warn_of_placeholders(folder, patch)
        if max_pixels is None:
            return self
        is_valid = is_count(max_pixels) and patch**2 <= max_pixels <= side**2
        expected = f"an integer from {patch**2} to {side**2}, the model's {side} x {side} pixels"
        expect("max_pixels", max_pixels, is_valid, expected)
        # The side of the smaller square is a multiple of the patch size.
        smaller_side = math.isqrt(max_pixels) // patch * patch
        if smaller_side // patch == side // patch:
            return self
        vision = dataclasses.replace(vision, image_size=smaller_side, trained_size=side)
        return self.replace(vision=vision)

    def resize(self, settings: LlavaImageSettings, image: Image.Image) -> Bytes:
        vision = self.config.vision
        side, trained_side = vision.image_size, vision.trained.image_size
        resize_to = round(settings.resize_to * side / trained_side)
        crop_to = round(settings.crop_to * side / trained_side)
        if crop_to != side:
            raise UserError(
                f"the image processor makes {crop_to} x {crop_to} pixels, the model takes "
                f"{side} x {side}: crop_size of the processor's file is wrong"
            )
        settings = images.override_padding(settings, self.config.pad_images)
        settings = settings._replace(resize_to=resize_to, crop_to=crop_to)
        return images.resize(image, settings, self.config.normalisation)

    def largest_pixel_shapes(self, count: int) -> jax.ShapeDtypeStruct:
        side = self.config.vision.image_size
        return jax.ShapeDtypeStruct((count, 3, side, side), np.uint8)

    def grids(self, pixels: UInt8[np.ndarray, "i 3 H W"]) -> Int[np.ndarray, "i 2"]:
        return np.tile(np.array(self.config.grid, np.int32), (len(pixels), 1))

    @classmethod
    def conversation(cls, turns: Sequence[str | None], system: str | None = None) -> str:
        turns = list(turns) + [None] * (len(turns) % 2)
        text = (_SYSTEM if system is None else system) + " "
        for turn, message in enumerate(turns):
            role, end = _ROLES[turn % 2], _ENDS[turn % 2]
            text += f"{role}: {message}{end}" if message else f"{role}:"
        return text

    @classmethod
    def published_prompts(cls, turns: Sequence[str]) -> tuple[str, ...]:
        # The chat template of the Hugging Face files has no system prompt and no end tokens.
        text = cls.conversation(turns)
        return text, text.removeprefix(_SYSTEM + " ").replace(_ENDS[1], " ")

    def init_params(self, key: Array) -> Params:
        config = self.config
        vision, projector, language = jax.random.split(key, 3)
        sample = jnp.zeros((1, config.vision.hidden_size))
        return {
            "vision": tower.init_vision(vision, config.vision),
            "projector": Projector(config).init(projector, sample)["params"],
            "language": decoder.init_language(language, config.text),
        }

    def encode_image(
        self,
        params: Params,
        pixels: UInt8[Array, "i 3 H W"],
        taps: Sequence[Tap] = (),
        execution: Execution = Execution(),
    ) -> tuple[Float[Array, "i n d"], dict[str, Array]]:
        # Taps include the class token, which comes first; see `tower.encode`.
        vision, layer = self.config.vision, self.config.feature_layer
        # `self.normalise` does not apply here: in LLaVA-NeXT, which inherits this method, it takes
        # `Tiles`, while `pixels` are the tiles as plain images.
        values = jnp.asarray(normalise(self.config.normalisation, pixels, -3))
        features, tapped = tower.encode(
            params["vision"], vision, values, layer, taps=taps, execution=execution
        )
        return features[:, 1:], tapped

    def project(self, params: Params, features: Float[Array, "*b d"]) -> Float[Array, "*b e"]:
        projector = Projector(self.config)
        return cast(Array, projector.apply({"params": params["projector"]}, features))

    def image_positions(
        self, grid: Int[Array, "*b 2"], place: Int[Array, "*b k"]
    ) -> tuple[Int[Array, "*b p k"], Int[Array, "*b"]]:
        return place[..., None, :], jnp.asarray(self.num_tokens(grid))

    def vision_flops(self, grid: tuple[int, int]) -> dict[str, int]:
        config = self.config
        vision, width = config.vision, config.text.hidden_size
        d, num_patches = vision.hidden_size, grid[0] * grid[1]
        num_tokens = num_patches + 1  # with the class token
        # Blocks after `feature_layer` are not run.
        num_blocks = config.feature_layer % (vision.num_layers + 1)
        block_macs = num_tokens * (
            4 * d * d + 2 * d * num_tokens + 2 * d * vision.intermediate_size
        )
        tower_macs = num_patches * 3 * vision.patch_size**2 * d + num_blocks * block_macs
        return {"tower": 2 * tower_macs, "projector": 2 * num_patches * width * (d + width)}


def _is_original_layout(raw: Json) -> bool:
    """Returns whether a ``config.json`` has the layout of the original LLaVA repository."""
    return "mm_vision_tower" in raw or "mm_projector_type" in raw
