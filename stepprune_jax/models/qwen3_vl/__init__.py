"""Qwen3-VL: images of any size, a tower with learned positions, and DeepStack features."""

from stepprune_jax.models.qwen3_vl.backbone import Qwen3_VL
from stepprune_jax.models.qwen3_vl.config import Qwen3Config

__all__ = ["Qwen3Config", "Qwen3_VL"]
