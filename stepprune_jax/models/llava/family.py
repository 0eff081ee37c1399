"""LLaVA-v1.5 (Liu et al., https://arxiv.org/abs/2310.03744): a tower, a projector, a Llama."""

import copy
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int
from PIL import Image

from stepprune_jax.data.prompts import IMAGE_MARK
from stepprune_jax.models import decoder
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import Json, Rule, Tokenizer, read_fields
from stepprune_jax.models.family import Family
from stepprune_jax.models.images import Bytes
from stepprune_jax.models.layers import Dense, activate
from stepprune_jax.models.llava import images, tower, weights
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.models.llava.images import ImageSettings
from stepprune_jax.models.stack import Execution, Params
from stepprune_jax.models.weights import Rule as WeightRule
from stepprune_jax.models.weights import renamed
from stepprune_jax.settings import is_count
from stepprune_jax.user_input import expect

# The ``vicuna_v1`` template, exactly as in the reference programs.
_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_ROLES = ("USER", "ASSISTANT")
# A finished user turn ends with a blank, a finished assistant turn with </s> and no blank.
_ENDS = (" ", "</s>")

_TOWER = Rule(
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


class Llava(Family):
    """LLaVA-1.5, in the Hugging Face layout or the original one."""

    name = "llava"
    SUPPORTED = (
        "LLaVA-1.5 in the Hugging Face layout (model_type 'llava' with text_config and "
        "vision_config) or in the original one (a Llama config.json with mm_vision_tower)"
    )
    POSITION_AXES = 1
    CONTEXT_LIMIT = 2048  # the longest row of training
    SHARDING_RULES = weights.SHARDING_RULES
    VISION_PREFIX = weights.VISION
    MARK = f"{IMAGE_MARK}\n"

    def matches(self, raw: Json) -> bool:
        original = "mm_vision_tower" in raw or "mm_projector_type" in raw
        return original or (raw.get("model_type") == "llava" and "text_config" in raw)

    def vision_folder(self, raw: Json) -> str | None:
        if "mm_vision_tower" in raw or "mm_projector_type" in raw:
            return read_fields(raw, "config.json", {"name": _TOWER})["name"]
        return None

    def read_config(self, raw: Json, vision: Json | None) -> LlavaConfig:
        if vision is None:
            return LlavaConfig.from_hf(raw)
        return LlavaConfig.from_original(raw, vision)

    def canonical_name(self, name: str, of_vision_folder: bool = False) -> str | None:
        if not of_vision_folder:
            return renamed(name, weights.PREFIXES)
        if name.startswith(weights.CLIP_EXTRAS):
            return None
        return weights.VISION + name.removeprefix("vision_model.")

    def is_harmless(self, name: str, config: LlavaConfig) -> bool:
        stored_head = config.text.tie_embeddings and name.startswith(weights.HEAD + ".")
        return stored_head or name.endswith(weights.HARMLESS_ENDINGS)

    def weight_rules(self, config: LlavaConfig) -> tuple[WeightRule, ...]:
        return weights.rules(config.vision.patch_size)

    def complete_vocabulary(
        self, config: LlavaConfig, tokenizer: Tokenizer
    ) -> tuple[LlavaConfig, Tokenizer]:
        if config.image_token_id is not None:
            return config, tokenizer
        # The Hugging Face layout needs an image token, the original one has none.
        number = config.text.vocab_size
        if tokenizer is not None:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.add_tokens([IMAGE_MARK], special_tokens=True)
            number = tokenizer.convert_tokens_to_ids(IMAGE_MARK)
        text = dataclasses.replace(config.text, vocab_size=max(number + 1, config.text.vocab_size))
        return dataclasses.replace(config, text=text, image_token_id=number), tokenizer

    def read_settings(self, raw: Json, where: str) -> ImageSettings:
        return images.settings_from_hf(raw, where)

    def hf_processor(self, config: LlavaConfig, settings: ImageSettings) -> dict[str, Json]:
        processor = images.to_hf(images.padded(settings, config.pad_images))
        combined = {
            "processor_class": "LlavaProcessor",
            "image_processor": processor,
            "image_token": IMAGE_MARK,
            **images.placeholders(config.vision.patch_size),
        }
        return {
            "preprocessor_config.json": {**processor, "processor_class": "LlavaProcessor"},
            "processor_config.json": combined,
        }

    def bound_images(
        self,
        config: LlavaConfig,
        folder: str | Path | None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> LlavaConfig:
        vision, (side, patch) = config.vision, (config.vision.image_size, config.vision.patch_size)
        one = f"none, as this model takes images of one size, {side} x {side}"
        expect("min_pixels", min_pixels, min_pixels is None, one)
        if folder is not None:
            images.name_other_placeholders(folder, patch)
        if max_pixels is None:
            return config
        good = is_count(max_pixels) and patch**2 <= max_pixels <= side**2
        expected = f"an integer from {patch**2} to {side**2}, the model's {side} x {side} pixels"
        expect("max_pixels", max_pixels, good, expected)
        # Whole patches of a smaller square; the rest of the tower stays as it is.
        smaller = math.isqrt(max_pixels) // patch * patch
        if smaller // patch == side // patch:
            return config
        vision = dataclasses.replace(vision, image_size=smaller, trained_size=side)
        return dataclasses.replace(config, vision=vision)

    def resize(self, config: LlavaConfig, settings: ImageSettings, image: Image.Image) -> Bytes:
        side, trained = config.vision.image_size, config.vision.trained.image_size
        size, crop = (round(x * side / trained) for x in (settings.resize_to, settings.crop_to))
        if crop != side:
            raise ValueError(
                f"the image processor makes {crop} x {crop} pixels, the model takes "
                f"{side} x {side}: crop_size of the processor's file is wrong"
            )
        settings = images.padded(settings, config.pad_images)
        return images.resize(image, settings._replace(resize_to=size, crop_to=crop))

    def finish(
        self, config: LlavaConfig, settings: ImageSettings, image: Bytes
    ) -> Float[np.ndarray, "3 height width"]:
        return images.normalise(image, settings)

    def max_pixels(self, config: LlavaConfig, count: int) -> jax.ShapeDtypeStruct:
        side = config.vision.image_size
        return jax.ShapeDtypeStruct((count, 3, side, side), np.float32)

    def grids(
        self, config: LlavaConfig, pixels: Float[np.ndarray, "i 3 H W"]
    ) -> Int[np.ndarray, "i 2"]:
        return np.tile(np.array(config.grid, np.int32), (len(pixels), 1))

    def conversation(self, turns: Sequence[str | None], system: str | None = None) -> str:
        turns = list(turns) + [None] * (len(turns) % 2)
        text = (_SYSTEM if system is None else system) + " "
        for number, message in enumerate(turns):
            role, end = _ROLES[number % 2], _ENDS[number % 2]
            text += f"{role}: {message}{end}" if message else f"{role}:"
        return text

    def published_prompts(self, turns: Sequence[str]) -> tuple[str, ...]:
        # The template of the Hugging Face files has neither the system prompt nor end tokens.
        text = self.conversation(turns)
        return text, text.removeprefix(_SYSTEM + " ").replace(_ENDS[1], " ")

    def init_params(self, key: Array, config: LlavaConfig) -> Params:
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
        config: LlavaConfig,
        pixels: Float[Array, "i 3 H W"],
        taps: Sequence[Tap] = (),
        execution: Execution = Execution(),
    ) -> tuple[Float[Array, "i n d"], dict[str, Array]]:
        # Taps keep the tower's own tokens, the class token first; see `tower.encode`.
        features, tapped = tower.encode(
            params["vision"], config.vision, pixels, config.feature_layer, taps, execution
        )
        return features[:, 1:], tapped

    def project(
        self, params: Params, config: LlavaConfig, features: Float[Array, "*b d"]
    ) -> Float[Array, "*b e"]:
        return cast(Array, Projector(config).apply({"params": params["projector"]}, features))

    def image_positions(
        self, config: LlavaConfig, grid: Int[Array, "*b 2"], place: Int[Array, "*b k"]
    ) -> tuple[Int[Array, "*b p k"], Int[Array, "*b"]]:
        return place[..., None, :], jnp.asarray(self.num_tokens(config, grid))

    def vision_flops(self, config: LlavaConfig, grid: tuple[int, int]) -> dict[str, int]:
        vision, width = config.vision, config.text.hidden_size
        d, n = vision.hidden_size, grid[0] * grid[1]
        t = n + 1
        # Blocks after `feature_layer` are not run.
        layers = config.feature_layer % (vision.num_layers + 1)
        block = t * (4 * d * d + 2 * d * t + 2 * d * vision.intermediate_size)
        tower = n * 3 * vision.patch_size**2 * d + layers * block
        return {"tower": 2 * tower, "projector": 2 * n * width * (d + width)}


LLAVA = Llava()
