"""The frozen model that a run's configuration names."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

ASSETS = Path(__file__).resolve().parents[1] / "assets"
# The model of the shapes world, used when no folder is given.
SHAPES_MODEL = ASSETS / "shapes_llava"


def model_folders(config: Any) -> tuple[str, str | None]:
    """The frozen model's folder or hub id (without one, the model of the shapes world), and CLIP's.

    The second is for the original LLaVA layout, where the tower lies elsewhere, and None otherwise.
    """
    return config.model.folder or str(SHAPES_MODEL), config.model.vision_folder or None


def model_dtype(config: Any) -> Any:
    """The floating dtype of the frozen weights."""
    return jnp.dtype(config.model.dtype)
