"""The Qwen3-VL family (https://arxiv.org/abs/2511.21631).

Images, prompts and position ids follow Qwen2.5-VL, except that patches are larger and the template
has no system prompt.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from stepprune_jax.data.videos import ClipShape, Video
from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import Json
from stepprune_jax.models.images import Clip
from stepprune_jax.models.qwen2_5_vl import videos
from stepprune_jax.models.qwen2_5_vl.backbone import IMAGE_TEXT, QwenBackbone
from stepprune_jax.models.qwen2_5_vl.images import VideoSettings
from stepprune_jax.models.qwen3_vl import tower, weights
from stepprune_jax.models.qwen3_vl.config import Qwen3Config


@dataclasses.dataclass(frozen=True)
class Qwen3_VL(QwenBackbone):  # noqa: N801
    """Dense instruction-tuned models of Qwen3-VL."""

    config: Qwen3Config
    name = "qwen3_vl"
    SUPPORTED = "Qwen3-VL without experts (model_type 'qwen3_vl')"
    CONTEXT_LIMIT = 262144  # the longest sequence of the model's training
    PROCESSOR = "Qwen3VLProcessor"
    TOWER, WEIGHTS = tower, weights
    SHARDING_RULES = weights.SHARDING_RULES
    VISION_PREFIX = weights.VISION
    VIDEO_PROCESSOR = "Qwen3VLVideoProcessor"
    VIDEO_SETTINGS = VideoSettings(128 * 32 * 32, 768 * 32 * 32)
    MARKS_PATCHES = True

    @classmethod
    def matches(cls, raw: Json) -> bool:
        return raw.get("model_type") in ("qwen3_vl", "qwen3_vl_moe")

    @classmethod
    def read(cls, raw: Json, vision: Json | None) -> Backbone:
        return cls(Qwen3Config.from_hf(raw))

    @classmethod
    def canonical_name(cls, name: str, of_vision_folder: bool = False) -> str:
        return name

    def sample_frames(
        self, settings: VideoSettings, total: int, rate: float, video: Video
    ) -> Int[np.ndarray, "k"]:
        return videos.sample_by_linspace(settings, total, rate, video)

    def video_size(
        self, settings: VideoSettings, size: videos.FrameSize, num_frames: int
    ) -> videos.FrameSize:
        # The limits apply to the area of all frames together.
        factor = self.config.vision.factor
        settings = videos.bound_area(settings, num_frames * self.config.max_pixels)
        size = videos.enlarge_to_patch(factor, size)
        return videos.frame_size(factor, settings, size, num_frames)

    @classmethod
    def place_videos(cls, text: str, clips: Sequence[Clip | ClipShape | None]) -> str:
        first_piece, *pieces = text.split(IMAGE_TEXT)
        placed = [first_piece]
        for clip, piece in zip(clips, pieces, strict=True):
            times = () if clip is None else clip.times
            marks = [f"<{seconds:.1f} seconds>{IMAGE_TEXT}" for seconds in times]
            placed += ["".join(marks) or IMAGE_TEXT, piece]
        return "".join(placed)

    def vision_flops(self, grid: tuple[int, int]) -> dict[str, int]:
        # The mergers read all tokens before pruning, so they count as part of the tower. The kept
        # tokens need no projector.
        vision = self.config.vision
        d, num_tokens = vision.hidden_size, grid[0] * grid[1]
        num_patches, merged_width = num_tokens * vision.unit, vision.unit * d
        dense_macs_per_patch = 4 * d * d + 2 * d * vision.intermediate_size
        dense_macs = num_patches * dense_macs_per_patch * vision.num_layers
        attention_macs = 2 * num_patches * num_patches * d * vision.num_layers
        patch_values = vision.temporal_patch_size * 3 * vision.patch_size**2
        embedding_macs = num_patches * patch_values * d
        num_mergers = 1 + self.config.num_deepstack_layers
        merger_macs = num_mergers * num_tokens * merged_width * (merged_width + vision.out_size)
        tower_macs = embedding_macs + dense_macs + attention_macs + merger_macs
        return {"tower": 2 * tower_macs, "projector": 0}
