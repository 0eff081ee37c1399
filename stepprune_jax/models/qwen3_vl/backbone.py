"""Qwen3-VL (https://arxiv.org/abs/2511.21631): tower, mergers, language model.

Images, prompts and position ids are those of Qwen2.5-VL, with larger patches and without a system's
words.
"""

import dataclasses

from stepprune_jax.models.backbone import Backbone
from stepprune_jax.models.config import Json
from stepprune_jax.models.qwen2_5_vl.backbone import QwenBackbone
from stepprune_jax.models.qwen3_vl import tower, weights
from stepprune_jax.models.qwen3_vl.config import Qwen3Config


@dataclasses.dataclass(frozen=True)
class Qwen3_VL(QwenBackbone):  # noqa: N801
    """Qwen3-VL's dense instruction-tuned models."""

    config: Qwen3Config
    name = "qwen3_vl"
    SUPPORTED = "Qwen3-VL without experts (model_type 'qwen3_vl')"
    CONTEXT_LIMIT = 262144  # the longest row of training
    PROCESSOR = "Qwen3VLProcessor"
    TOWER, WEIGHTS = tower, weights
    SHARDING_RULES = weights.SHARDING_RULES
    VISION_PREFIX = weights.VISION

    @classmethod
    def matches(cls, raw: Json) -> bool:
        return raw.get("model_type") in ("qwen3_vl", "qwen3_vl_moe")

    @classmethod
    def read(cls, raw: Json, vision: Json | None) -> Backbone:
        return cls(Qwen3Config.from_hf(raw))

    @classmethod
    def canonical_name(cls, name: str, of_vision_folder: bool = False) -> str:
        return name

    def vision_flops(self, grid: tuple[int, int]) -> dict[str, int]:
        # With the mergers, which read all tokens: nothing is left for a projector of the kept ones.
        vision = self.config.vision
        d, n = vision.hidden_size, grid[0] * grid[1]
        m, wide = n * vision.unit, vision.unit * d
        products = m * (4 * d * d + 2 * d * vision.intermediate_size) * vision.num_layers
        attention = 2 * m * m * d * vision.num_layers
        embedding = m * vision.temporal_patch_size * 3 * vision.patch_size**2 * d
        mergers = (1 + self.config.deep_layers) * n * wide * (wide + vision.out_size)
        return {"tower": 2 * (embedding + products + attention + mergers), "projector": 0}
