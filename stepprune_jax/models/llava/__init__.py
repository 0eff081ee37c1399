"""LLaVA-1.5: a CLIP tower, a two-layer projector and a Llama."""

from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.models.llava.family import LLAVA

__all__ = ["LLAVA", "LlavaConfig"]
