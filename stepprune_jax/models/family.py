"""The protocol of model families, on which pipelines, trainers and pruners rely.

A family is a package of pure functions over a tree of frozen weights and a frozen configuration;
`config.family` is that package. No other code depends on a model's family. The family decides,
image by image, how many visual tokens an image has and their grid, and how many position ids a
token has. The language model of every family is that of `models.decoder`, with its weights under
"language".
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int
from PIL import Image

from stepprune_jax.models import llava, qwen2_5_vl
from stepprune_jax.models.config import LlamaConfig
from stepprune_jax.models.layers import Tap
from stepprune_jax.models.stack import Execution
from stepprune_jax.models.weights import Target


@runtime_checkable
class ModelConfig(Protocol):
    """Fields of every family's configuration, a frozen, hashable dataclass that may have more.

    Attributes:
        text: shape of the language model. Read outside the family: `num_layers`, `hidden_size`,
            `vocab_size`, `max_positions`, and for counting operations and planning memory also
            `num_heads`, `num_kv_heads`, `head_dim` and `intermediate_size`.
        image_token_id: the vocabulary's own id for images, or None. Prompts use `IMAGE_TOKEN`.
        bos_token_id: begin-of-sequence id, or None.
        eos_token_ids: ids that end an answer.
        pad_token_id: padding id, or None.
    """

    text: LlamaConfig
    image_token_id: int | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    @property
    def family(self) -> "Family":
        """The family's package."""
        ...

    @property
    def feature_width(self) -> int:
        """Width d of the visual tokens that a pruner sees, before the projector."""
        ...

    @property
    def max_image_tokens(self) -> int:
        """Visual tokens of the largest image: a bound for budgets, rows and memory, not a size."""
        ...

    @property
    def sizes_vary(self) -> bool:
        """Whether images may differ in their number of visual tokens."""
        ...

    @property
    def class_token_block(self) -> int | None:
        """The tower's block whose class token ranks patches by attention; None without one."""
        ...

    @property
    def received_block(self) -> int | None:
        """The tower's block with taps "received" and "keys" per visual token; None without one.

        "received" [i, n] is the attention that a token receives from its whole image; "keys"
        [i, n, c] measure the similarity of tokens.
        """
        ...


@runtime_checkable
class Family(Protocol):
    """Functions of a model family; `models.vlm` documents those that run on devices.

    `raw` is a parsed ``config.json``. `settings` and pixels have types that only the family reads;
    pixels are an array, or a tuple of arrays, with a leading axis of images. Canonical names are
    the weight names of the family's published files, to which other dialects are translated.

    Attributes:
        SUPPORTED: description of the supported models, for error messages.
        POSITION_AXES: p, position ids per token: 1, or 3 for (time, row, column).
        CONTEXT_LIMIT: length that prompts are truncated to, including visual tokens.
        SHARDING_RULES: (pattern on the path, spec) of every weight, see `parallel.sharding`.
    """

    SUPPORTED: str
    POSITION_AXES: int
    CONTEXT_LIMIT: int
    SHARDING_RULES: tuple[tuple[str, PartitionSpec], ...]

    # Checkpoint folders.

    def matches(self, raw: dict[str, Any]) -> bool:
        """Returns whether this family reads such a folder."""
        ...

    def vision_folder(self, raw: dict[str, Any]) -> str | None:
        """Returns the folder or hub id of a tower that is stored elsewhere.

        Returns:
            None if the tower is part of the checkpoint, as is usual; "" if it is stored elsewhere
            and the file does not say where.
        """
        ...

    def read_config(self, raw: dict[str, Any], vision: dict[str, Any] | None) -> ModelConfig:
        """Builds the configuration.

        Args:
            raw: ``config.json`` of the checkpoint.
            vision: ``config.json`` of the tower's own folder, if it has one.

        Returns:
            The checked configuration.

        Raises:
            ValueError: a field has an unsupported value; the message names it.
        """
        ...

    def canonical_name(self, name: str, of_vision_folder: bool = False) -> str | None:
        """Returns the canonical form of a weight's name; None for a weight to skip."""
        ...

    def is_vision_name(self, name: str) -> bool:
        """Returns whether a canonical name belongs to the tower."""
        ...

    def is_harmless(self, name: str, config: ModelConfig) -> bool:
        """Returns whether an unused canonical name may be in the files, such as a tied head."""
        ...

    def weight_targets(self, abstract: dict[str, Any], config: ModelConfig) -> list[Target]:
        """Lists the tensors that make up each leaf of the weights; see `weights.targets`."""
        ...

    def complete_vocabulary(
        self, config: ModelConfig, tokenizer: Any | None
    ) -> tuple[ModelConfig, Any | None]:
        """Adds tokens that a saved folder needs to configuration and tokenizer.

        New rows of the vocabulary are filled with those of token 0. Most families return their
        arguments.
        """
        ...

    def hf_config(self, config: ModelConfig, dtype: str) -> dict[str, Any]:
        """Describes a model as a ``config.json`` that `read_config` turns back into `config`."""
        ...

    def hf_processor(self, config: ModelConfig, settings: Any) -> dict[str, dict[str, Any]]:
        """Describes how images are processed, as JSON values by file name."""
        ...

    # Images, on the host.

    def image_settings(self, folder: str | Path) -> Any:
        """Reads the image processor's settings.

        Raises:
            FileNotFoundError: the folder has no image processor file.
            ValueError: it describes another kind of processor.
        """
        ...

    def bound_images(
        self,
        config: ModelConfig,
        folder: str | Path | None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> ModelConfig:
        """Bounds the area of resized images, by the folder's processor or the user.

        Args:
            config: the model's configuration.
            folder: folder with the image processor's file; None for the bounds of the
                configuration.
            min_pixels: smallest area, instead of the folder's.
            max_pixels: largest area, instead of the folder's.

        Returns:
            The configuration, whose `max_image_tokens` follows.

        Raises:
            FileNotFoundError: the folder has no image processor file.
            ValueError: bounds that no image meets, or bounds for images of a fixed size.
        """
        ...

    def preprocess(self, config: ModelConfig, settings: Any, images: Sequence[Image.Image]) -> Any:
        """Converts RGB images, whose sizes may differ, to pixels.

        Images with fewer tokens than others are padded here, so that the pixels of a batch share a
        shape; a family pads to few different shapes, as each needs a compilation.

        Raises:
            ValueError: no images, or one that the model cannot take.
        """
        ...

    def seen(self, config: ModelConfig, settings: Any, image: Image.Image) -> Image.Image:
        """Returns an RGB image as the tower sees it, covered by the grid of its tokens.

        Raises:
            ValueError: an image that the model cannot take.
        """
        ...

    def pixel_cache(
        self, config: ModelConfig, settings: Any, limit_bytes: int
    ) -> Callable[[Path], Any]:
        """Returns a function from an image file to its pixels, without the axis of images.

        The function returns the same as `preprocess`, caches the latest images up to `limit_bytes`
        of memory, may be called by several threads, and is empty after being sent to another
        process.

        Raises:
            FileNotFoundError: when called, if there is no such file.
            ValueError: when called, if the model cannot take the image.
        """
        ...

    def max_pixels(self, config: ModelConfig, count: int) -> Any:
        """Returns the shapes of the pixels of `count` images of the largest size.

        They are `jax.ShapeDtypeStruct`s, used to plan memory before any image is read.
        """
        ...

    def grids(self, config: ModelConfig, pixels: Any) -> Int[np.ndarray, "i 2"]:
        """Returns rows and columns of each image's visual tokens, as the language model sees them.

        With a merger of 2 x 2 patches, that is half of the patches' rows and columns.
        """
        ...

    def num_tokens(
        self, config: ModelConfig, grid: Int[Array | np.ndarray, "*b 2"]
    ) -> Int[Array | np.ndarray, "*b"]:
        """Returns the number of visual tokens of unpruned images of these grids.

        Args:
            config: the model's configuration.
            grid: a numpy or a traced array.
        """
        ...

    # Prompts, on the host. `data.prompts` does the rest for all families.

    def place_images(self, message: str, num_images: int) -> str:
        """Puts an `IMAGE_MARK` for each image in the first user turn, where the model expects it.

        Raises:
            ValueError: the message has marks, but not one per image.
        """
        ...

    def conversation(self, turns: Sequence[str | None]) -> str:
        """Formats a conversation, user first and then alternating, with its image marks.

        A last user turn is followed by an open assistant turn. The text of a conversation's first
        turns is a prefix of the whole, so that the text added by a turn belongs to it.
        """
        ...

    # Programs.

    def init_params(self, key: Array, config: ModelConfig) -> dict[str, Any]:
        """Draws float32 weights; kernels are [in, out], layers stacked along a leading axis."""
        ...

    def encode_image(
        self,
        params: dict[str, Any],
        config: ModelConfig,
        pixels: Any,
        taps: Sequence[Tap],
        execution: Execution = Execution(),
    ) -> tuple[Float[Array, "i n d"], dict[str, Array]]:
        """Returns the tokens that a pruner chooses from, and intermediates of the tower by name.

        Tokens are in raster order, whatever the tower's own order; n is that of the largest image
        that fits the pixels, and the tokens of a smaller one are a prefix of length `num_tokens`.
        """
        ...

    def project(
        self, params: dict[str, Any], config: ModelConfig, features: Float[Array, "*b d"]
    ) -> Float[Array, "*b e"]:
        """Maps visual tokens to the language model's width, token by token.

        A merger, which mixes neighbours, is part of `encode_image`; its last projection may be part
        of this function.
        """
        ...

    def image_positions(
        self, config: ModelConfig, grid: Int[Array, "*b 2"], place: Int[Array, "*b k"]
    ) -> tuple[Int[Array, "*b p k"], Int[Array, "*b"]]:
        """Returns position ids relative to the image's first, and the image's extent.

        Text has the same id on all axes, and text after an image continues after its extent:
        n for consecutive ids, the longer side for (time, row, column).
        """
        ...

    def vision_flops(self, config: ModelConfig, grid: tuple[int, int]) -> dict[str, int]:
        """Counts the operations of the `tower` and the `projector` for an image of this grid."""
        ...


FAMILIES: dict[str, Any] = {"llava": llava, "qwen2_5_vl": qwen2_5_vl}


def find_family(raw: dict[str, Any]) -> Any:
    """Finds the family that reads a checkpoint folder.

    Args:
        raw: its parsed ``config.json``.

    Returns:
        The family, or None if no family does.
    """
    return next((family for family in FAMILIES.values() if family.matches(raw)), None)
