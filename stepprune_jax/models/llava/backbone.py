"""LLaVA-v1.5 (Liu et al., https://arxiv.org/abs/2310.03744): a tower, a projector, a Llama."""

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
from stepprune_jax.models.weights import WeightRule, renamed
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import UserError, expect

# The ``vicuna_v1`` template, exactly as in the reference programs.
_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_ROLES = ("USER", "ASSISTANT")
# A finished user turn ends with a blank, a finished assistant turn with </s> and no blank.
_ENDS = (" ", "</s>")

_TOWER = FieldRule(
    "mm_vision_tower", "", lambda x: x if isinstance(x, str) else None, "a folder or hub id"
)


class Projector(nn.Module):
    """Two projections with an activation between them, from the tower's width to the model's."""

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

    `CONFIG` is the class of its configuration.
    """

    config: LlavaConfig
    name = "llava"
    CONFIG: ClassVar[type[LlavaConfig]] = LlavaConfig
    SUPPORTED = (
        "LLaVA-1.5 in the Hugging Face layout (model_type 'llava' with text_config and "
        "vision_config) or in the original one (a Llama config.json with mm_vision_tower)"
    )
    CONTEXT_LIMIT = 2048  # the longest row of training
    SHARDING_RULES = weights.SHARDING_RULES
    VISION_PREFIX = weights.VISION
    MARK = f"{IMAGE_MARK}\n"
    PROCESSOR = "LlavaProcessor"  # the class of `transformers`

    @classmethod
    def matches(cls, raw: Json) -> bool:
        original = "mm_vision_tower" in raw or "mm_projector_type" in raw
        return original or (raw.get("model_type") == "llava" and "text_config" in raw)

    @classmethod
    def vision_folder(cls, raw: Json) -> str | None:
        if "mm_vision_tower" not in raw and "mm_projector_type" not in raw:
            return None
        tower = read_fields(raw, "config.json", {"name": _TOWER})["name"]
        cls.CONFIG.check_original(raw)
        return tower

    @classmethod
    def read(cls, raw: Json, vision: Json | None) -> Backbone:
        if vision is None:
            return cls(LlavaConfig.from_hf(raw))
        return cls(LlavaConfig.from_original(raw, vision))

    @classmethod
    def canonical_name(cls, name: str, of_vision_folder: bool = False) -> str | None:
        if not of_vision_folder:
            return renamed(name, weights.PREFIXES)
        if name.startswith(weights.CLIP_EXTRAS):
            return None
        return weights.VISION + name.removeprefix("vision_model.")

    def is_harmless(self, name: str) -> bool:
        stored_head = self.config.text.tie_embeddings and name.startswith(weights.HEAD + ".")
        return stored_head or name.endswith(weights.HARMLESS_ENDINGS)

    def weight_rules(self) -> tuple[WeightRule, ...]:
        return weights.rules(self.config.vision.patch_size)

    def complete_vocabulary(self, tokenizer: Tokenizer) -> tuple[Backbone, Tokenizer]:
        config = self.config
        if config.image_token_id is not None:
            return self, tokenizer
        # The Hugging Face layout needs an image token, the original one has none.
        number = config.text.vocab_size
        if tokenizer is not None:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.add_tokens([IMAGE_MARK], special_tokens=True)
            number = tokenizer.convert_tokens_to_ids(IMAGE_MARK)
        text = dataclasses.replace(config.text, vocab_size=max(number + 1, config.text.vocab_size))
        return self.replace(text=text, image_token_id=number), tokenizer

    @classmethod
    def image_settings(cls, folder: str | Path) -> LlavaImageSettings:
        return images.settings_from_hf(*read_processor(folder))

    def hf_processor(self, settings: LlavaImageSettings) -> dict[str, Json]:
        processor, kind = self.describe(settings), {"processor_class": self.PROCESSOR}
        combined = {
            **kind,
            "image_processor": processor,
            "image_token": IMAGE_MARK,
            **images.placeholders(self.config.vision.patch_size),
        }
        return {
            "preprocessor_config.json": processor | kind,
            "processor_config.json": combined,
        }

    def describe(self, settings: LlavaImageSettings) -> Json:
        """Describes the image processor."""
        settings = images.padded(settings, self.config.pad_images)
        return images.to_hf(settings, self.config.normalisation)

    def bound_images(
        self,
        folder: str | Path | None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> Backbone:
        vision = self.config.vision
        side, patch = vision.image_size, vision.patch_size
        one = f"none, as this model takes images of one size, {side} x {side}"
        expect("min_pixels", min_pixels, min_pixels is None, one)
        if folder is not None:
            images.name_other_placeholders(folder, patch)
        if max_pixels is None:
            return self
        good = is_count(max_pixels) and patch**2 <= max_pixels <= side**2
        expected = f"an integer from {patch**2} to {side**2}, the model's {side} x {side} pixels"
        expect("max_pixels", max_pixels, good, expected)
        # Whole patches of a smaller square; the rest of the tower stays as it is.
        smaller = math.isqrt(max_pixels) // patch * patch
        if smaller // patch == side // patch:
            return self
        vision = dataclasses.replace(vision, image_size=smaller, trained_size=side)
        return self.replace(vision=vision)

    def resize(self, settings: LlavaImageSettings, image: Image.Image) -> Bytes:
        vision = self.config.vision
        side, trained = vision.image_size, vision.trained.image_size
        size, crop = (round(x * side / trained) for x in (settings.resize_to, settings.crop_to))
        if crop != side:
            raise UserError(
                f"the image processor makes {crop} x {crop} pixels, the model takes "
                f"{side} x {side}: crop_size of the processor's file is wrong"
            )
        settings = images.padded(settings, self.config.pad_images)
        settings = settings._replace(resize_to=size, crop_to=crop)
        return images.resize(image, settings, self.config.normalisation)

    def max_pixels(self, count: int) -> jax.ShapeDtypeStruct:
        side = self.config.vision.image_size
        return jax.ShapeDtypeStruct((count, 3, side, side), np.uint8)

    def grids(self, pixels: UInt8[np.ndarray, "i 3 H W"]) -> Int[np.ndarray, "i 2"]:
        return np.tile(np.array(self.config.grid, np.int32), (len(pixels), 1))

    @classmethod
    def conversation(cls, turns: Sequence[str | None], system: str | None = None) -> str:
        turns = list(turns) + [None] * (len(turns) % 2)
        text = (_SYSTEM if system is None else system) + " "
        for number, message in enumerate(turns):
            role, end = _ROLES[number % 2], _ENDS[number % 2]
            text += f"{role}: {message}{end}" if message else f"{role}:"
        return text

    @classmethod
    def published_prompts(cls, turns: Sequence[str]) -> tuple[str, ...]:
        # The template of the Hugging Face files has neither the system prompt nor end tokens.
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
        # Taps keep the tower's own tokens, the class token first; see `tower.encode`.
        vision, layer = self.config.vision, self.config.feature_layer
        # Not by the method, since the images of LLaVA-NeXT are tiles by now.
        values = jnp.asarray(normalise(self.config.normalisation, pixels, -3))
        features, tapped = tower.encode(params["vision"], vision, values, layer, taps, execution)
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
        d, n = vision.hidden_size, grid[0] * grid[1]
        t = n + 1
        # Blocks after `feature_layer` are not run.
        layers = config.feature_layer % (vision.num_layers + 1)
        block = t * (4 * d * d + 2 * d * t + 2 * d * vision.intermediate_size)
        tower = n * 3 * vision.patch_size**2 * d + layers * block
        return {"tower": 2 * tower, "projector": 2 * n * width * (d + width)}
