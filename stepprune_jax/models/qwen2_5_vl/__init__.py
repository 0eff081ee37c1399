"""Qwen2.5-VL: images of any size, a tower with windows and a merger."""

from stepprune_jax.models.qwen2_5_vl.config import QwenConfig
from stepprune_jax.models.qwen2_5_vl.family import QWEN2_5_VL

__all__ = ["QWEN2_5_VL", "QwenConfig"]
