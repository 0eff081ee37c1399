"""Qwen2.5-VL: images of any size, a tower with windowed attention, and a merger."""

from stepprune_jax.models.qwen2_5_vl.backbone import Qwen2_5_VL
from stepprune_jax.models.qwen2_5_vl.config import QwenConfig

__all__ = ["Qwen2_5_VL", "QwenConfig"]
