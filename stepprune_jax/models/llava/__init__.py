"""LLaVA-v1.5: a CLIP tower, a two-layer projector and a Llama."""

from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.models.llava.model import (
    POSITION_AXES,
    embed_text,
    encode_image,
    image_positions,
    init_params,
    logits,
    project,
    run_layers,
)

__all__ = [
    "POSITION_AXES",
    "LlavaConfig",
    "embed_text",
    "encode_image",
    "image_positions",
    "init_params",
    "logits",
    "project",
    "run_layers",
]
