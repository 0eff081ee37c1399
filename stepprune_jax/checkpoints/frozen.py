"""The frozen model named by a run's configuration, and how it is run."""

import dataclasses

from stepprune_jax.checkpoints.folder import ModelFolder, inspect_folder
from stepprune_jax.models.int8 import WEIGHTS
from stepprune_jax.models.stack import ATTENTIONS, Execution
from stepprune_jax.settings import Settings, choice, count, setting

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings, path="config.model"):
    """The frozen model, and how it is run.

    Attributes:
        folder: its folder, its hub id, or the name of a shipped model.
        vision_folder: the CLIP folder of the original LLaVA layout; empty otherwise.
        dtype: dtype of its weights.
        weights: "full", or "int8" for matrices of the language model in half the memory of
            bfloat16, see docs/devices.md.
        attention: implementation of attention, of `models.stack.ATTENTIONS`.
        remat: whether the backward pass recomputes the language model's blocks.
        rows_at_once: rows per pass on each device; 0 for all of them.
        min_pixels: smallest area of a resized image, for models that take images of any size; None
            for that of the folder's image processor.
        max_pixels: largest area; a model that takes images of one size is given smaller ones, in
            whole patches.
    """

    folder: str = setting("shapes", free=True)
    vision_folder: str = setting("", free=True)
    dtype: str = choice("float32", DTYPES)
    weights: str = choice("full", WEIGHTS)
    attention: str = choice("matmul", ATTENTIONS)
    remat: bool = False
    rows_at_once: int = count(0, least=0)
    min_pixels: int | None = count(None)
    max_pixels: int | None = count(None)

    @property
    def execution(self) -> Execution:
        """How the model's layers are run."""
        return Execution(attention=self.attention, remat=self.remat)

    @property
    def folders(self) -> tuple[str, str | None]:
        """The model's folder or hub id, and that of a separate tower."""
        return self.folder, self.vision_folder or None

    @property
    def image_bounds(self) -> dict[str, int | None]:
        """Bounds of images, as keyword arguments of `inspect_folder` and `load_vlm`."""
        return {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}

    def inspect(self) -> ModelFolder:
        """Inspects the model's folder; errors are those of `inspect_folder`."""
        return inspect_folder(*self.folders, **self.image_bounds)
