"""LLaVA-1.5: a CLIP tower, a two-layer projector and a Llama."""

from stepprune_jax.models.llava.backbone import Llava
from stepprune_jax.models.llava.config import LlavaConfig

__all__ = ["Llava", "LlavaConfig"]
