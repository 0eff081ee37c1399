"""LLaVA-NeXT (v1.6): LLaVA that encodes images of any aspect ratio as tiles."""

from stepprune_jax.models.llava_next.backbone import LlavaNext
from stepprune_jax.models.llava_next.config import LlavaNextConfig

__all__ = ["LlavaNext", "LlavaNextConfig"]
