"""The frozen model named by a run's configuration, and how it is run."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp

from stepprune_jax.checkpoints.folder import Source, inspect_folder
from stepprune_jax.checkpoints.shipped import SHAPES_MODEL
from stepprune_jax.models.stack import ATTENTIONS, Execution
from stepprune_jax.settings import Settings, choice, count, switch, text

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings, group="model"):
    """The frozen model, and how it is run.

    Attributes:
        folder: its folder or hub id; empty for the small LLaVA of the shapes world.
        vision_folder: the CLIP folder of the original LLaVA layout; empty otherwise.
        dtype: dtype of its weights.
        attention: implementation of attention, of `models.stack.ATTENTIONS`.
        remat: whether the backward pass recomputes the language model's blocks.
        rows_at_once: rows per pass on each device; 0 for all of them.
        min_pixels: smallest area of a resized image, for models that take images of any size; None
            for that of the folder's image processor.
        max_pixels: largest area, likewise.
    """

    folder: str = text(free=True)
    vision_folder: str = text(free=True)
    dtype: str = choice(DTYPES)
    attention: str = choice(ATTENTIONS)
    remat: bool = switch()
    rows_at_once: int = count(0)
    min_pixels: int | None = count(optional=True)
    max_pixels: int | None = count(optional=True)

    @property
    def execution(self) -> Execution:
        """How the model's layers are run."""
        return Execution(attention=self.attention, remat=self.remat)


@runtime_checkable
class HasModel(Protocol):
    """Settings with the group `model`, such as those of a training run."""

    @property
    def model(self) -> Any:
        """The group, `ModelSettings` or an object with its fields."""


def model_folders(settings: HasModel) -> tuple[str, str | None]:
    """Returns the frozen model's folder or hub id, and that of a separate tower.

    Without a folder it is the model of the shapes world.
    """
    return settings.model.folder or str(SHAPES_MODEL), settings.model.vision_folder or None


def model_source(settings: HasModel) -> Source:
    """Inspects the frozen model's folder.

    Args:
        settings: settings with the group `model`.

    Returns:
        The folder and the model's configuration.

    Raises:
        FileNotFoundError: as `inspect_folder`.
        ValueError: as `inspect_folder`.
    """
    return inspect_folder(*model_folders(settings), **image_bounds(settings))


def image_bounds(settings: HasModel) -> dict[str, int | None]:
    """Returns the bounds of images, as keyword arguments of `inspect_folder` and `load_vlm`."""
    model = settings.model
    return {"min_pixels": model.min_pixels, "max_pixels": model.max_pixels}


def model_dtype(settings: HasModel) -> Any:
    """Returns the floating dtype of the frozen weights."""
    return jnp.dtype(settings.model.dtype)
