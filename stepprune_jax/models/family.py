"""What a model family provides: the protocol that pipelines, trainers and pruners rely on.

A family is a package of pure functions over a tree of frozen weights and a frozen configuration;
`config.family` is that package. Nothing outside of it asks which family a model is of. How many
visual tokens an image has, their grid, and how many position ids a token has are the family's to
say, image by image: images of one model may differ in all of them. The language model is that of
`models.decoder` in every family, with its weights under "language".
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
    """What every family's configuration offers; a frozen, hashable dataclass with more fields.

    Attributes:
        text: shape of the language model. Read outside of the family: `num_layers`, `hidden_size`,
            `vocab_size`, `max_positions`, and for counting operations and planning memory also
            `num_heads`, `num_kv_heads`, `head_dim` and `intermediate_size`.
        image_token_id: the vocabulary's own id for images, or None. Prompts have `IMAGE_TOKEN`.
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
        """The tower's block that offers taps "received" and "keys", a value a visual token.

        None without one. "received" [i, n] is how much a token is attended to by all of its image;
        "keys" [i, n, c] by what tokens are alike.
        """
        ...


@runtime_checkable
class Family(Protocol):
    """Functions of a model family; `models.vlm` documents those that run on devices.

    `raw` is a parsed ``config.json``. `settings` and pixels are of types that only the family
    reads; pixels are an array, or a tuple of arrays, with a leading axis of images. Canonical names
    are the weight names of the family's published files, which its other dialects are brought to.

    Attributes:
        SUPPORTED: what is supported, for the message about a folder that is not.
        POSITION_AXES: p, position ids of a token: 1, or 3 for (time, row, column).
        CONTEXT_LIMIT: the longest row that prompts are cut to, visual tokens counted.
        SHARDING_RULES: (pattern on the path, spec) of every weight, see `parallel.sharding`.
    """

    SUPPORTED: str
    POSITION_AXES: int
    CONTEXT_LIMIT: int
    SHARDING_RULES: tuple[tuple[str, PartitionSpec], ...]

    # Checkpoint folders.

    def matches(self, raw: dict[str, Any]) -> bool:
        """Whether this family reads such a folder."""
        ...

    def vision_folder(self, raw: dict[str, Any]) -> str | None:
        """Names the folder or hub id of a tower that lies elsewhere.

        Returns:
            None if the tower is part of the checkpoint, as is usual; "" if it lies elsewhere and
            the file does not say where.
        """
        ...

    def read_config(self, raw: dict[str, Any], vision: dict[str, Any] | None) -> ModelConfig:
        """Builds the configuration.

        Args:
            raw: of the checkpoint.
            vision: ``config.json`` of the tower's own folder, if it has one.

        Returns:
            The checked configuration.

        Raises:
            ValueError: a field has an unsupported value; the message names it.
        """
        ...

    def canonical_name(self, name: str, of_vision_folder: bool = False) -> str | None:
        """Brings a weight's name to its canonical form; None for one that is to be passed over."""
        ...

    def is_vision_name(self, name: str) -> bool:
        """Whether a canonical name belongs to the tower."""
        ...

    def is_harmless(self, name: str, config: ModelConfig) -> bool:
        """Whether a canonical name that no weight has may lie in the files, such as a tied head."""
        ...

    def weight_targets(self, abstract: dict[str, Any], config: ModelConfig) -> list[Target]:
        """Lists the tensors that each leaf of the weights is made of; see `weights.targets`."""
        ...

    def complete_vocabulary(
        self, config: ModelConfig, tokenizer: Any | None
    ) -> tuple[ModelConfig, Any | None]:
        """Adds to configuration and tokenizer what a saved folder needs beyond what was loaded.

        New rows of the vocabulary are filled with those of token 0. Most families return what they
        were given.
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
        """Reads how images are processed.

        Raises:
            FileNotFoundError: the folder does not say.
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
        """Bounds the area of resized images as the folder's processor does, or the user.

        Args:
            config: the model's.
            folder: that says how images are processed; None for the bounds that the configuration
                has.
            min_pixels: least area, in place of the folder's.
            max_pixels: largest area, in place of the folder's.

        Returns:
            The configuration, whose `max_image_tokens` follows.

        Raises:
            FileNotFoundError: the folder does not say.
            ValueError: bounds that no image meets, or bounds of images that all have one size.
        """
        ...

    def preprocess(self, config: ModelConfig, settings: Any, images: Sequence[Image.Image]) -> Any:
        """Turns RGB images, whose sizes may differ, into pixels.

        Images that give fewer tokens than others are padded here, so that pixels of one batch share
        a shape; a family pads to few different shapes, as each is compiled for.

        Raises:
            ValueError: no images, or one that the model cannot take.
        """
        ...

    def seen(self, config: ModelConfig, settings: Any, image: Image.Image) -> Image.Image:
        """Returns an RGB image as the tower sees it, which the grid of its tokens covers.

        Raises:
            ValueError: an image that the model cannot take.
        """
        ...

    def pixel_cache(
        self, config: ModelConfig, settings: Any, limit_bytes: int
    ) -> Callable[[Path], Any]:
        """Returns a function from an image file to its pixels, without the axis of images.

        It gives what `preprocess` would, keeps the latest images up to `limit_bytes` of memory,
        may be called by several threads, and begins empty when it is sent to another process.

        Raises:
            FileNotFoundError: when it is called, if there is no such file.
            ValueError: when it is called, if the model cannot take the image.
        """
        ...

    def max_pixels(self, config: ModelConfig, count: int) -> Any:
        """Returns the shapes of the pixels of `count` images of the largest size.

        They are `jax.ShapeDtypeStruct`; memory is planned with them before any image is read.
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
            config: the model's.
            grid: a numpy or a traced array.
        """
        ...

    # Prompts, on the host. `data.prompts` does the rest for all families.

    def place_images(self, message: str, num_images: int) -> str:
        """Puts an `IMAGE_MARK` for each image where the model expects it in a first user turn.

        Raises:
            ValueError: the message has marks, but not one per image.
        """
        ...

    def conversation(self, turns: Sequence[str | None]) -> str:
        """Writes out a conversation, user first and then alternating, with its image marks.

        A last user turn is followed by an open assistant turn. Each conversation begins with what
        any shorter part of it gives, so that the text which a turn adds is that turn's.
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
        """Returns what a pruner chooses from, and intermediates of the tower by name.

        Tokens stand row by row of the image's grid, whatever order the tower works in; n is that of
        the largest image that the pixels have room for, and the tokens of a smaller one are a
        prefix, as long as `num_tokens` says.
        """
        ...

    def project(
        self, params: dict[str, Any], config: ModelConfig, features: Float[Array, "*b d"]
    ) -> Float[Array, "*b e"]:
        """Maps visual tokens to the language model's width, token by token.

        A merger, which mixes neighbours, is part of `encode_image`; its last projection may be
        here.
        """
        ...

    def image_positions(
        self, config: ModelConfig, grid: Int[Array, "*b 2"], place: Int[Array, "*b k"]
    ) -> tuple[Int[Array, "*b p k"], Int[Array, "*b"]]:
        """Returns position ids relative to an image's first, and how many the whole image takes.

        Text has the same id on all axes, and what follows an image continues after its extent:
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
