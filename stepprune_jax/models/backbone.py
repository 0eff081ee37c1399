"""The interface of backbones, on which pipelines and trainers rely.

A family of backbones is a subclass of `Backbone`; a backbone is that class with a configuration. It
holds no weights: its methods are pure functions over a tree of them. No other code depends on a
model's family. The family decides, image by image, how many visual tokens an image has, their grid
and their position ids. The language model of every family is that of `models.decoder`, with its
weights under "language"; what concerns it alone needs the configuration, not the backbone.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int
from PIL import Image

from stepprune_jax.data.images import open_image
from stepprune_jax.data.prompts import IMAGE_MARK, marks_in_front
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import Json, ModelConfig, Tokenizer
from stepprune_jax.models.images import Pixels, Resized, normalise, stack_images
from stepprune_jax.models.stack import Execution, Params
from stepprune_jax.models.weights import WeightRule, WeightTarget, targets
from stepprune_jax.user_input import naming

Processor = Any  # settings of an image processor, of a type that only the family reads


@dataclasses.dataclass(frozen=True)
class Backbone(abc.ABC):
    """A vision-language model without its weights; hashable, and static under `jax.jit`.

    `raw` is a parsed ``config.json``. `settings` (of the image processor) and `Pixels` have types
    that only the family reads; pixels are an array, or a tuple of arrays, with a leading axis of
    images. They are bytes, a quarter of floats on the way to a device, and `encode_image`
    normalises them. Canonical names are the weight names of the family's published files, to which
    other dialects are translated.

    Attributes:
        config: the model's shape.
        name: short name of the family, such as "llava".
        SUPPORTED: description of the supported models, for error messages.
        CONTEXT_LIMIT: length that prompts are truncated to, including visual tokens.
        SHARDING_RULES: (pattern on the path, spec) of every weight, see `parallel.sharding`.
        VISION_PREFIX: what canonical names of the tower's weights begin with.
        MARK: text put in front of a prompt for each image.
    """

    config: ModelConfig
    name: ClassVar[str]
    SUPPORTED: ClassVar[str]
    CONTEXT_LIMIT: ClassVar[int]
    SHARDING_RULES: ClassVar[tuple[tuple[str, PartitionSpec], ...]]
    VISION_PREFIX: ClassVar[str]
    MARK: ClassVar[str] = IMAGE_MARK

    def replace(self, **fields: Any) -> "Backbone":
        """Returns the backbone with other values of its configuration's fields."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **fields))

    # Checkpoint folders.

    @classmethod
    @abc.abstractmethod
    def matches(cls, raw: Json) -> bool:
        """Returns whether this family reads such a folder."""

    @classmethod
    def vision_folder(cls, raw: Json) -> str | None:
        """Returns the folder or hub id of a tower that is stored elsewhere, "" if it is not told.

        None, as is usual, if the tower is part of the checkpoint.

        Raises:
            ValueError: a field of a checkpoint without its tower has an unsupported value.
        """
        del raw
        return None

    @classmethod
    @abc.abstractmethod
    def read(cls, raw: Json, vision: Json | None) -> "Backbone":
        """Builds the backbone of a checkpoint.

        Args:
            raw: ``config.json`` of the checkpoint.
            vision: ``config.json`` of the tower's own folder, if it has one.

        Returns:
            The backbone, with a checked configuration.

        Raises:
            ValueError: a field has an unsupported value; the message names it.
        """

    @classmethod
    @abc.abstractmethod
    def canonical_name(cls, name: str, of_vision_folder: bool = False) -> str | None:
        """Returns the canonical form of a weight's name; None for a weight to skip."""

    @classmethod
    def is_vision_name(cls, name: str) -> bool:
        """Returns whether a canonical name belongs to the tower."""
        return name.startswith(cls.VISION_PREFIX)

    @abc.abstractmethod
    def is_harmless(self, name: str) -> bool:
        """Returns whether an unused canonical name may be in the files, such as a tied head."""

    @abc.abstractmethod
    def weight_rules(self) -> tuple[WeightRule, ...]:
        """Returns the rules that map tensors of a checkpoint to weights."""

    def weight_targets(self, abstract: Params) -> list[WeightTarget]:
        """Lists the tensors that make up each leaf of the weights; see `weights.targets`."""
        return targets(abstract, self.weight_rules())

    def complete_vocabulary(self, tokenizer: Tokenizer) -> tuple["Backbone", Tokenizer]:
        """Adds tokens that a saved folder needs to configuration and tokenizer (or None).

        New rows of the vocabulary are filled with those of token 0.
        """
        return self, tokenizer

    # Images, on the host.

    @classmethod
    @abc.abstractmethod
    def image_settings(cls, folder: str | Path) -> Processor:
        """Reads the image processor's settings, with `images.read_processor`.

        Raises:
            FileNotFoundError: the folder has no image processor file.
            ValueError: it describes another kind of processor.
        """

    @abc.abstractmethod
    def hf_processor(self, settings: Processor) -> dict[str, Json]:
        """Describes how images are processed, as JSON values by file name."""

    @abc.abstractmethod
    def bound_images(
        self,
        folder: str | Path | None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> "Backbone":
        """Bounds the area of resized images, by the folder's processor or the user.

        Args:
            folder: folder with the image processor's file; None for the bounds of the
                configuration.
            min_pixels: smallest area, instead of the folder's.
            max_pixels: largest area, instead of the folder's.

        Returns:
            The backbone for these images, whose `config.max_image_tokens` follows.

        Raises:
            FileNotFoundError: the folder has no image processor file.
            ValueError: bounds that no image meets, or a smallest area for images of a fixed size.
        """

    @abc.abstractmethod
    def resize(self, settings: Processor, image: Image.Image) -> Resized:
        """Resizes an RGB image to what the tower sees.

        Raises:
            ValueError: an image that the model cannot take.
        """

    def cut(self, image: Resized) -> Pixels:
        """Returns a resized image as the family's pixels, without the axis of images."""
        return image

    def preprocess(self, settings: Processor, images: Sequence[Image.Image]) -> Pixels:
        """Converts RGB images, whose sizes may differ, to pixels.

        Images with fewer tokens than others are padded here, so that the pixels of a batch share a
        shape; a family pads to few different shapes, as each needs a compilation.

        Raises:
            ValueError: an image that the model cannot take.
        """
        resized = (self.resize(settings, image) for image in images)
        return stack_images([self.cut(image) for image in resized])

    def normalise(self, pixels: Pixels) -> Pixels:
        """Returns pixels as the tower sees them, float32, on the host or in a program."""
        return normalise(self.config.normalisation, pixels, -3)

    def squared(self, pixels: Pixels) -> Pixels:
        """Returns pixels of the shapes of `max_pixels` as those of square images."""
        return pixels

    def seen(self, settings: Processor, image: Image.Image) -> Image.Image:
        """Returns an RGB image as the tower sees it, covered by the grid of its tokens."""
        return Image.fromarray(self.resize(settings, image).transpose(1, 2, 0))

    def cells(
        self, grid: Sequence[int], tokens: Sequence[int] | Int[np.ndarray, "k"]
    ) -> Int[np.ndarray, "k"]:
        """Returns the cell of an image's grid that each of some tokens shows, -1 for none."""
        return np.asarray(tokens, int)

    def pixel_cache(self, settings: Processor, limit_bytes: int) -> Callable[[Path], Pixels]:
        """Returns a function from an image file to its pixels, without the axis of images.

        It returns the same as `preprocess`, and may be called by several threads. The pixels of the
        images used last are cached, of as many as fit into `limit_bytes` if all are of the largest
        size. A file that is missing raises a FileNotFoundError, one that the model cannot take a
        ValueError.
        """
        largest = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.max_pixels(1)))

        @functools.lru_cache(limit_bytes // largest)
        def read(path: Path) -> Pixels:
            with naming(str(path)):  # images are read while training continues
                image = self.cut(self.resize(settings, open_image(path)))
                return jax.tree.map(np.ascontiguousarray, image)  # not a view of what was cropped

        return read

    @abc.abstractmethod
    def max_pixels(self, count: int) -> Pixels:
        """Returns the shapes of the pixels of `count` images of the largest size.

        They are `jax.ShapeDtypeStruct`s, used to plan memory before any image is read.
        """

    def list_pixels(self, width: int, height: int) -> list[Pixels]:
        """Lists made-up pixels of one image each, of every shape that images up to a size have.

        Of each shape there are images with the fewest and the most tokens, and with the most tokens
        that leave padding.

        Args:
            width: width of the largest image; an image may also be turned.
            height: height of the largest image.
        """
        del width, height  # the images of most families have one shape
        return [jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), self.max_pixels(1))]

    @abc.abstractmethod
    def grids(self, pixels: Pixels) -> Int[np.ndarray, "i 2"]:
        """Returns rows and columns of each image's visual tokens, as the language model sees them.

        With a merger of 2 x 2 patches, that is half of the patches' rows and columns.
        """

    def num_tokens(self, grid: Int[Array | np.ndarray, "*b 2"]) -> Int[Array | np.ndarray, "*b"]:
        """Returns the number of visual tokens of unpruned images of these grids."""
        return (grid[..., 0] * grid[..., 1]).astype(np.int32)

    def padded_tokens(self, pixels: Pixels) -> int:
        """Returns n, the number of tokens that `encode_image` pads each of these images to."""
        del pixels
        return self.config.max_image_tokens

    # Prompts, on the host. `data.prompts` does the rest for all families.

    @classmethod
    def place_images(cls, message: str, num_images: int) -> str:
        """Puts an `IMAGE_MARK` for each image in front of the first user turn.

        Raises:
            ValueError: the message has marks, but not one per image.
        """
        return marks_in_front(message, num_images, cls.MARK)

    @classmethod
    @abc.abstractmethod
    def conversation(cls, turns: Sequence[str | None], system: str | None = None) -> str:
        """Formats a conversation, user first and then alternating, with its image marks.

        What the system says stands in the template's place for it; None is the template's own.
        A last turn of the assistant that is None, empty or missing is open. The text of a
        conversation's first turns is a prefix of the whole, so that the text added by a turn
        belongs to it.

        Raises:
            ValueError: a turn has a token that the template has for images or videos.
        """

    @classmethod
    def published_prompts(cls, turns: Sequence[str]) -> tuple[str, ...]:
        """Returns what a folder's chat template may make of a conversation without images."""
        return (cls.conversation(turns),)

    # Programs.

    @abc.abstractmethod
    def init_params(self, key: Array) -> Params:
        """Draws float32 weights; kernels are [in, out], layers stacked along a leading axis."""

    @abc.abstractmethod
    def encode_image(
        self,
        params: Params,
        pixels: Pixels,
        taps: Sequence[Tap] = (),
        execution: Execution = Execution(),
    ) -> tuple[Float[Array, "i n w"], dict[str, Array]]:
        """Computes the tokens that a pruner chooses from, before the projector.

        Args:
            params: the model's weights.
            pixels: result of `preprocess`.
            taps: intermediates of the tower.
            execution: how the tower's blocks are run.

        Returns:
            [i, n, w] tokens in raster order, whatever the tower's own order; n is that of the
            largest image that fits the pixels, and the tokens of a smaller one are a prefix of
            length `num_tokens`. Behind the d channels of a token are its deep features, if the
            model has any: for layer 0 of the language model, layer 1, ... And the taps by name.

        Raises:
            ValueError: images of another size, or an unknown tap.
        """

    @abc.abstractmethod
    def project(self, params: Params, features: Float[Array, "*b w"]) -> Float[Array, "*b e"]:
        """Maps visual tokens to the language model's width, token by token.

        Deep features remain behind each of them.

        A merger, which mixes neighbours, is part of `encode_image`; its last projection may be part
        of this function.
        """

    @abc.abstractmethod
    def image_positions(
        self, grid: Int[Array, "*b 2"], place: Int[Array, "*b k"]
    ) -> tuple[Int[Array, "*b p k"], Int[Array, "*b"]]:
        """Returns position ids relative to the image's first, and the image's extent.

        Text has the same id on all axes, and text after an image continues after its extent:
        n for consecutive ids, the longer side for (time, row, column).
        """

    @abc.abstractmethod
    def vision_flops(self, grid: tuple[int, int]) -> dict[str, int]:
        """Counts the operations of the `tower` and the `projector` for an image of this grid."""
