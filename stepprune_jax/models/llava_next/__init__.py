"""LLaVA-NeXT (v1.6): LLaVA on tiles of an image, for images of any aspect ratio."""

from stepprune_jax.models.llava_next.backbone import LlavaNext
from stepprune_jax.models.llava_next.config import LlavaNextConfig

__all__ = ["LlavaNext", "LlavaNextConfig"]
