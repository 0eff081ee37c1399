"""Settings of the frozen model in the configuration of a training or evaluation run."""

import dataclasses

from stepprune_jax.checkpoints.folder import ModelFolder, inspect_folder
from stepprune_jax.models.int8 import WEIGHTS
from stepprune_jax.models.stack import ATTENTIONS, Execution
from stepprune_jax.settings import Settings, choice, count, setting

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings, path="config.model"):
    """Names the frozen model and says how it is loaded and run.

    Attributes:
        folder: folder or hub id of the model, or the name of a shipped model.
        vision_folder: the CLIP folder of the original LLaVA layout; empty otherwise.
        dtype: dtype of the weights.
        weights: "full", or "int8" to keep the matrices of the language model in half the memory of
            bfloat16, see docs/devices.md.
        attention: implementation of attention, one of `models.stack.ATTENTIONS`.
        remat: whether the backward pass recomputes the language model's blocks.
        rows_at_once: rows per pass on each device; 0 puts all rows in one pass.
        min_pixels: smallest area of a resized image in pixels, for models that take images of any
            size; None selects the area of the folder's image processor.
        max_pixels: largest area of a resized image in pixels. For a model with one image size, a
            smaller area reduces that size to a multiple of the patch size.
    """

    folder: str = setting("shapes", free=True)
    vision_folder: str = setting("", free=True)
    dtype: str = choice("float32", DTYPES)
    weights: str = choice("full", WEIGHTS)
    attention: str = choice("matmul", ATTENTIONS)
    remat: bool = False
    rows_at_once: int = count(0, minimum=0)
    min_pixels: int | None = count(None)
    max_pixels: int | None = count(None)

    @property
    def execution(self) -> Execution:
        """Execution options of the model's layers."""
        return Execution(attention=self.attention, remat=self.remat)

    @property
    def folders(self) -> tuple[str, str | None]:
        """Folder or hub id of the model and of a separate vision tower, or None."""
        return self.folder, self.vision_folder or None

    @property
    def image_bounds(self) -> dict[str, int | None]:
        """Area limits of images, as keyword arguments of `inspect_folder` and `load_vlm`."""
        return {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}

    def inspect(self) -> ModelFolder:
        """Reads the model's configuration, as `inspect_folder` does with the same errors."""
        return inspect_folder(*self.folders, **self.image_bounds)
