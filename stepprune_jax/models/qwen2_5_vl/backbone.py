"""Qwen2.5-VL (Bai et al., https://arxiv.org/abs/2502.13923): tower, merger, language model."""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from PIL import Image

from stepprune_jax.data.prompts import IMAGE_MARK
from stepprune_jax.models import decoder
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import Json
from stepprune_jax.models.images import Bytes, read_processor
from stepprune_jax.models.qwen2_5_vl import images, tower, weights
from stepprune_jax.models.qwen2_5_vl.config import PatchModelConfig, QwenConfig
from stepprune_jax.models.qwen2_5_vl.images import Patches, QwenImageSettings
from stepprune_jax.models.stack import Execution, Params
from stepprune_jax.models.weights import WeightRule, renamed
from stepprune_jax.user_input import naming, require

_ROLES = ("user", "assistant")
_START, _END = "<|im_start|>", "<|im_end|>"
_IMAGE = f"<|vision_start|>{IMAGE_MARK}<|vision_end|>"
# Placeholders of visual tokens: in the user's text they would count as tokens that do not exist.
_PLACEHOLDERS = {
    token: f"which the template adds: use {IMAGE_MARK} for an image"
    for token in ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
} | {"<|video_pad|>": "but videos are not supported"}


@dataclasses.dataclass(frozen=True)
class QwenBackbone(Backbone):
    """What Qwen's models share: images of any size, prompts, position ids of three axes.

    Attributes:
        PROCESSOR: class of the processor in `transformers`.
        SYSTEM: what the system says by the template; None for nothing.
        TOWER: the family's module with `init_vision` and `encode`.
        WEIGHTS: the family's module with `rules`.
    """

    config: PatchModelConfig
    PROCESSOR: ClassVar[str]
    SYSTEM: ClassVar[str | None] = None
    TOWER: ClassVar[ModuleType]
    WEIGHTS: ClassVar[ModuleType]

    def is_harmless(self, name: str) -> bool:
        return self.config.text.tie_embeddings and name == weights.HEAD + ".weight"

    @classmethod
    def image_settings(cls, folder: str | Path) -> QwenImageSettings:
        return images.settings_from_hf(*read_processor(folder))

    def hf_processor(self, settings: QwenImageSettings) -> dict[str, Json]:
        return {"preprocessor_config.json": images.to_hf(self.config, settings, self.PROCESSOR)}

    def bound_images(
        self,
        folder: str | Path | None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> Backbone:
        config = self.config
        least, most = config.min_pixels, config.max_pixels
        if folder is not None:
            least, most = images.processor_bounds(config.vision, *read_processor(folder))
        least = least if min_pixels is None else min_pixels
        most = most if max_pixels is None else max_pixels
        named = contextlib.nullcontext() if folder is None else naming(str(folder))
        with named:
            return self.replace(min_pixels=least, max_pixels=most)

    def resize(self, settings: QwenImageSettings, image: Image.Image) -> Bytes:
        return images.resize(self.config, settings, image)

    def cut(self, image: Bytes) -> Patches:
        return images.to_patches(self.config, image)

    def normalise(self, pixels: Patches) -> Patches:
        return images.normalise_patches(self.config, pixels)

    def max_pixels(self, count: int) -> Patches:
        vision, largest = self.config.vision, self.config.max_image_tokens
        patches = images.padded_tokens(largest, largest) * vision.unit
        return Patches(
            jax.ShapeDtypeStruct((count, patches, 3 * vision.patch_size**2), np.uint8),
            jax.ShapeDtypeStruct((count, 2), np.int32),
        )

    def list_pixels(self, width: int, height: int) -> list[Patches]:
        return images.list_pixels(self.config, width, height)

    def squared(self, pixels: Patches) -> Patches:
        side = math.isqrt(self.config.max_image_tokens)
        return pixels._replace(grid=np.full(pixels.grid.shape, side, np.int32))

    def grids(self, pixels: Patches) -> Int[np.ndarray, "i 2"]:
        return np.asarray(pixels.grid, np.int32)

    def padded_tokens(self, pixels: Patches) -> int:
        return pixels.values.shape[1] // self.config.vision.unit

    @classmethod
    def conversation(cls, turns: Sequence[str | None], system: str | None = None) -> str:
        # A closed last turn ends with its end token, without a newline after it.
        turns = list(turns) + [None] * (len(turns) % 2)
        system = cls.SYSTEM if system is None else system
        for message in (system, *turns):
            for token, reason in _PLACEHOLDERS.items():
                require(token not in (message or ""), f"the prompt has {token}, {reason}")
        said = [] if system is None else [f"{_START}system\n{system}{_END}"]
        for number, message in enumerate(turns):
            end = _END if message or number + 1 < len(turns) else ""
            message = (message or "").replace(IMAGE_MARK, _IMAGE)
            said.append(f"{_START}{_ROLES[number % 2]}\n{message}{end}")
        return "\n".join(said)

    def weight_rules(self) -> tuple[WeightRule, ...]:
        return self.WEIGHTS.rules(self.config.vision)

    def init_params(self, key: Array) -> Params:
        vision, language = jax.random.split(key)
        return {
            **self.TOWER.init_vision(vision, self.config.vision),
            "language": decoder.init_language(language, self.config.text),
        }

    def encode_image(
        self,
        params: Params,
        pixels: Patches,
        taps: Sequence[Tap] = (),
        execution: Execution = Execution(),
    ) -> tuple[Float[Array, "i n w"], dict[str, Array]]:
        pixels = self.normalise(pixels)
        return self.TOWER.encode(params, self.config.vision, pixels, taps, execution)

    def project(self, params: Params, features: Float[Array, "*b w"]) -> Float[Array, "*b e"]:
        return features  # merged tokens already have the language model's width

    def image_positions(
        self, grid: Int[Array, "*b 2"], place: Int[Array, "*b k"]
    ) -> tuple[Int[Array, "*b p k"], Int[Array, "*b"]]:
        # 0 in time, the row, and the column; text after the image is shifted by the longer side.
        columns = jnp.maximum(grid[..., 1:], 1)
        offset = jnp.stack([jnp.zeros_like(place), place // columns, place % columns], axis=-2)
        return offset, grid.max(-1)


@dataclasses.dataclass(frozen=True)
class Qwen2_5_VL(QwenBackbone):  # noqa: N801
    """Qwen2.5-VL's instruction-tuned models."""

    config: QwenConfig
    name = "qwen2_5_vl"
    SUPPORTED = "Qwen2.5-VL (model_type 'qwen2_5_vl')"
    CONTEXT_LIMIT = 32768  # the longest row of training
    PROCESSOR = "Qwen2_5_VLProcessor"
    SYSTEM = "You are a helpful assistant."
    TOWER, WEIGHTS = tower, weights
    SHARDING_RULES = weights.SHARDING_RULES
    VISION_PREFIX = weights.VISION

    @classmethod
    def matches(cls, raw: Json) -> bool:
        return raw.get("model_type") == "qwen2_5_vl"

    @classmethod
    def read(cls, raw: Json, vision: Json | None) -> Backbone:
        return cls(QwenConfig.from_hf(raw))

    @classmethod
    def canonical_name(cls, name: str, of_vision_folder: bool = False) -> str:
        return renamed(name, weights.PREFIXES)

    def vision_flops(self, grid: tuple[int, int]) -> dict[str, int]:
        # With the attention of whole windows; the merger counts as the projector.
        vision = self.config.vision
        d, n = vision.hidden_size, grid[0] * grid[1]
        m, wide = n * vision.unit, vision.unit * d
        seen = [vision.unit * vision.window**2] * vision.num_layers
        for block in vision.full_blocks:
            seen[block] = m
        products = m * (4 * d * d + 3 * d * vision.intermediate_size) * vision.num_layers
        attention = sum(2 * m * d * min(m, keys) for keys in seen)
        embedding = m * vision.temporal_patch_size * 3 * vision.patch_size**2 * d
        merger = n * wide * (wide + vision.out_size)
        return {"tower": 2 * (embedding + products + attention), "projector": 2 * merger}
