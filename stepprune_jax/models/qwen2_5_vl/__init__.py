"""Qwen2.5-VL: images of any size, a tower with windows and a merger; see `models.family`."""

from stepprune_jax.models.qwen2_5_vl.config import QwenConfig, hf_config
from stepprune_jax.models.qwen2_5_vl.folder import (
    SUPPORTED,
    complete_vocabulary,
    matches,
    read_config,
    vision_folder,
)
from stepprune_jax.models.qwen2_5_vl.images import (
    bound_images,
    grids,
    hf_processor,
    image_settings,
    max_pixels,
    pixel_cache,
    preprocess,
    seen,
)
from stepprune_jax.models.qwen2_5_vl.model import (
    POSITION_AXES,
    encode_image,
    image_positions,
    init_params,
    num_tokens,
    project,
    vision_flops,
)
from stepprune_jax.models.qwen2_5_vl.prompts import CONTEXT_LIMIT, conversation, place_images
from stepprune_jax.models.qwen2_5_vl.weights import (
    SHARDING_RULES,
    canonical_name,
    is_harmless,
    is_vision_name,
    weight_targets,
)

__all__ = [
    "CONTEXT_LIMIT",
    "POSITION_AXES",
    "SHARDING_RULES",
    "SUPPORTED",
    "QwenConfig",
    "bound_images",
    "canonical_name",
    "complete_vocabulary",
    "conversation",
    "encode_image",
    "grids",
    "hf_config",
    "hf_processor",
    "image_positions",
    "image_settings",
    "init_params",
    "is_harmless",
    "is_vision_name",
    "matches",
    "max_pixels",
    "num_tokens",
    "pixel_cache",
    "place_images",
    "preprocess",
    "project",
    "read_config",
    "seen",
    "vision_flops",
    "vision_folder",
    "weight_targets",
]
