"""Qwen2.5-VL (Bai et al., https://arxiv.org/abs/2502.13923), and the base class of Qwen3-VL."""

import abc
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
from stepprune_jax.data.videos import ClipShape, Video
from stepprune_jax.models import decoder
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import Json
from stepprune_jax.models.images import Bytes, Clip, read_processor
from stepprune_jax.models.qwen2_5_vl import images, tower, videos, weights
from stepprune_jax.models.qwen2_5_vl.config import PatchModelConfig, QwenConfig
from stepprune_jax.models.qwen2_5_vl.images import (
    Patches,
    QwenImageSettings,
    VideoSettings,
)
from stepprune_jax.models.stack import Execution, Params
from stepprune_jax.models.weights import WeightRule, replace_prefix
from stepprune_jax.user_input import naming, require

_ROLES = ("user", "assistant")
_START, _END = "<|im_start|>", "<|im_end|>"
# Text of a prompt for an image, and for a temporal patch of a video of Qwen3-VL.
IMAGE_TEXT = f"<|vision_start|>{IMAGE_MARK}<|vision_end|>"
# Special tokens that represent visual tokens, with the reason why prompts must not contain them:
# in the user's text they would represent visual tokens that do not exist.
_FORBIDDEN_TOKENS = {
    token: f"which the template adds: use {IMAGE_MARK} for an image"
    for token in ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
} | {"<|video_pad|>": f"which the template adds: use {IMAGE_MARK} for a video, too"}


@dataclasses.dataclass(frozen=True)
class QwenBackbone(Backbone):
    """Base class of the Qwen-VL families: images of any size, prompts, and 3D position ids.

    Attributes:
        PROCESSOR: name of the processor's class in `transformers`.
        SYSTEM: the template's system prompt; None for no system prompt.
        TOWER: module of the family with `init_vision` and `encode`.
        WEIGHTS: module of the family with `rules`.
        VIDEO_PROCESSOR: name of the video processor's class in `transformers`.
        VIDEO_SETTINGS: settings of a video processor whose file does not have them.
    """

    config: PatchModelConfig
    PROCESSOR: ClassVar[str]
    SYSTEM: ClassVar[str | None] = None
    TOWER: ClassVar[ModuleType]
    WEIGHTS: ClassVar[ModuleType]
    VIDEO_PROCESSOR: ClassVar[str]
    VIDEO_SETTINGS: ClassVar[VideoSettings] = VideoSettings()

    def may_be_unused(self, name: str) -> bool:
        return self.config.text.tie_embeddings and name == weights.HEAD + ".weight"

    @classmethod
    def image_settings(cls, folder: str | Path) -> QwenImageSettings:
        settings = images.settings_from_hf(*read_processor(folder))
        return settings._replace(video=videos.read_settings(folder, cls.VIDEO_SETTINGS))

    def hf_processor(self, settings: QwenImageSettings) -> dict[str, Json]:
        return {
            "preprocessor_config.json": images.to_hf(self.config, settings, self.PROCESSOR),
            videos.VIDEO_FILE: videos.to_hf(self.config, settings.video, self.VIDEO_PROCESSOR),
        }

    def bound_images(
        self,
        folder: str | Path | None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> Backbone:
        lower, upper = self.config.min_pixels, self.config.max_pixels
        if folder is not None:
            lower, upper = images.read_area_bounds(self.config.vision, *read_processor(folder))
        lower = lower if min_pixels is None else min_pixels
        upper = upper if max_pixels is None else max_pixels
        # The checks of the configuration name the folder, if there is one.
        with contextlib.nullcontext() if folder is None else naming(str(folder)):
            return self.replace(min_pixels=lower, max_pixels=upper)

    def resize(self, settings: QwenImageSettings, image: Image.Image) -> Bytes:
        return images.resize(self.config, settings, image)

    def to_pixels(self, image: Bytes) -> Patches:
        return images.to_patches(self.config, image)

    def normalise(self, pixels: Patches) -> Patches:
        return images.normalise_patches(self.config, pixels)

    def largest_pixel_shapes(self, count: int) -> Patches:
        vision, num_tokens = self.config.vision, self.config.max_image_tokens
        num_patches = images.num_padded_tokens(num_tokens, num_tokens) * vision.unit
        return Patches(
            jax.ShapeDtypeStruct((count, num_patches, 3 * vision.patch_size**2), np.uint8),
            jax.ShapeDtypeStruct((count, 2), np.int32),
        )

    def list_example_pixels(self, width: int, height: int) -> list[Patches]:
        return images.list_example_pixels(self.config, width, height)

    def with_square_grids(self, pixels: Patches) -> Patches:
        side = math.isqrt(self.config.max_image_tokens)
        return pixels._replace(grid=np.full(pixels.grid.shape, side, np.int32))

    def grids(self, pixels: Patches) -> Int[np.ndarray, "i 2"]:
        return np.asarray(pixels.grid, np.int32)

    def num_padded_tokens(self, pixels: Patches) -> int:
        return pixels.values.shape[1] // self.config.vision.unit

    def read_video(self, settings: QwenImageSettings, video: Video) -> Clip:
        return videos.read_clip(self, settings.video, video)

    def inspect_video(self, settings: QwenImageSettings, video: Video) -> ClipShape:
        return videos.inspect_clip(self, settings.video, video)

    @abc.abstractmethod
    def sample_frames(
        self, settings: VideoSettings, total: int, rate: float, video: Video
    ) -> Int[np.ndarray, "k"]:
        """Returns the ascending indices of the frames to read.

        Args:
            settings: settings of the video processor.
            total: number of frames of the video.
            rate: number of frames of the video per second.
            video: the video, with the number of frames to sample or their rate.
        """

    @abc.abstractmethod
    def video_size(
        self, settings: VideoSettings, size: videos.FrameSize, num_frames: int
    ) -> videos.FrameSize:
        """Returns the size of resized frames of a video with `num_frames` sampled frames."""

    def time_interval(self, seconds: float) -> float:
        """Returns the number of temporal position ids in a time between two temporal patches."""
        del seconds
        return 0.0

    def as_patch_of_clip(self, pixels: Patches) -> Patches:
        frames = self.config.vision.temporal_patch_size
        values = np.tile(np.asarray(pixels.values), (1, 1, frames))
        return pixels._replace(values=values, of_video=np.zeros(len(values), bool))

    def patch_shapes(self, count: int, num_tokens: int) -> Patches:
        vision = self.config.vision
        num_values = vision.temporal_patch_size * 3 * vision.patch_size**2
        return Patches(
            jax.ShapeDtypeStruct((count, num_tokens * vision.unit, num_values), np.uint8),
            jax.ShapeDtypeStruct((count, 2), np.int32),
            jax.ShapeDtypeStruct((count,), np.bool_),
        )

    def num_padded_patch_tokens(self, num_tokens: int) -> int:
        return images.num_padded_tokens(num_tokens, videos.MAX_CLIP_TOKENS)

    def num_padded_clip_tokens(self, num_tokens: int) -> int:
        return images.num_padded_tokens(num_tokens, num_tokens)

    @classmethod
    def conversation(cls, turns: Sequence[str | None], system: str | None = None) -> str:
        # If the assistant's last turn has text, the prompt ends with the end token and no newline.
        turns = list(turns) + [None] * (len(turns) % 2)
        system = cls.SYSTEM if system is None else system
        for message in (system, *turns):
            for token, reason in _FORBIDDEN_TOKENS.items():
                require(token not in (message or ""), f"the prompt has {token}, {reason}")
        texts = [] if system is None else [f"{_START}system\n{system}{_END}"]
        for turn, message in enumerate(turns):
            end = _END if message or turn + 1 < len(turns) else ""
            message = (message or "").replace(IMAGE_MARK, IMAGE_TEXT)
            texts.append(f"{_START}{_ROLES[turn % 2]}\n{message}{end}")
        return "\n".join(texts)

    def weight_rules(self) -> tuple[WeightRule, ...]:
        return self.WEIGHTS.rules(self.config.vision)

    def init_params(self, key: Array) -> Params:
        vision_key, language_key = jax.random.split(key)
        return {
            **self.TOWER.init_vision(vision_key, self.config.vision),
            "language": decoder.init_language(language_key, self.config.text),
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
        # The axes are (time, row, column), and time is 0. An image's extent is its longer side.
        columns = jnp.maximum(grid[..., 1:], 1)
        offset = jnp.stack([jnp.zeros_like(place), place // columns, place % columns], axis=-2)
        return offset, grid.max(-1)

    def clip_positions(
        self,
        grid: Int[Array, "*b 2"],
        place: Int[Array, "*b k"],
        frames: Int[Array, "*b"],
        interval: Float[Array, "*b"],
    ) -> tuple[Int[Array, "*b p k"], Int[Array, "*b"]]:
        patch_grid = jnp.stack([grid[..., 0] // jnp.maximum(frames, 1), grid[..., 1]], axis=-1)
        patch_size = jnp.maximum(patch_grid.prod(-1), 1)[..., None]
        offset, extent = self.image_positions(patch_grid, place % patch_size)
        if not self.MARKS_PATCHES:
            # As in `transformers`, the time is computed in float32 and rounded down. The text after
            # the video continues by its rows and columns, also if the time is longer.
            time = (place // patch_size).astype(jnp.float32) * interval[..., None]
            offset = offset.at[..., 0, :].set(time.astype(jnp.int32))
        return offset, extent


@dataclasses.dataclass(frozen=True)
class Qwen2_5_VL(QwenBackbone):  # noqa: N801
    """Qwen2.5-VL's instruction-tuned models."""

    config: QwenConfig
    name = "qwen2_5_vl"
    SUPPORTED = "Qwen2.5-VL (model_type 'qwen2_5_vl')"
    CONTEXT_LIMIT = 32768  # the longest sequence of the model's training
    PROCESSOR = "Qwen2_5_VLProcessor"
    SYSTEM = "You are a helpful assistant."
    TOWER, WEIGHTS = tower, weights
    VIDEO_PROCESSOR = "Qwen2VLVideoProcessor"
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
        return replace_prefix(name, weights.PREFIXES)

    def sample_frames(
        self, settings: VideoSettings, total: int, rate: float, video: Video
    ) -> Int[np.ndarray, "k"]:
        return videos.sample_by_steps(settings, total, rate, video)

    def video_size(
        self, settings: VideoSettings, size: videos.FrameSize, num_frames: int
    ) -> videos.FrameSize:
        del num_frames  # the limits of the area refer to one frame
        settings = videos.bound_area(settings, self.config.max_pixels)
        return videos.frame_size(self.config.vision.factor, settings, size)

    def time_interval(self, seconds: float) -> float:
        # In float32, as in `transformers`.
        return float(np.float32(self.config.vision.tokens_per_second) * np.float32(seconds))

    def vision_flops(self, grid: tuple[int, int]) -> dict[str, int]:
        # A matrix product of m x k and k x n counts m k n multiply-adds (MACs), two FLOPs each. In
        # a block with windows, every patch attends to a complete window. The merger counts as the
        # projector.
        vision = self.config.vision
        d, num_tokens = vision.hidden_size, grid[0] * grid[1]
        num_patches, merged_width = num_tokens * vision.unit, vision.unit * d
        keys_per_block = [vision.unit * vision.window**2] * vision.num_layers
        for block in vision.full_blocks:
            keys_per_block[block] = num_patches
        dense_macs_per_patch = 4 * d * d + 3 * d * vision.intermediate_size
        dense_macs = num_patches * dense_macs_per_patch * vision.num_layers
        attention_macs = sum(
            2 * num_patches * d * min(num_patches, num_keys) for num_keys in keys_per_block
        )
        patch_values = vision.temporal_patch_size * 3 * vision.patch_size**2
        embedding_macs = num_patches * patch_values * d
        merger_macs = num_tokens * merged_width * (merged_width + vision.out_size)
        tower_macs = embedding_macs + dense_macs + attention_macs
        return {"tower": 2 * tower_macs, "projector": 2 * merger_macs}
