"""The interface between model families and the pipelines and trainers.

A model family is a subclass of `Backbone`. A backbone is an instance: the class with a
configuration and without weights. Its methods are pure functions of a tree of weights. Only the
family knows how many visual tokens an image has, their grid and their position ids; no code outside
`models` depends on the family. All families share the language model of `models.decoder`, whose
weights are under "language". Code that uses only the language model takes the configuration instead
of the backbone.
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
from stepprune_jax.data.videos import ClipShape, NoVideosError, Video
from stepprune_jax.models.attention import Tap
from stepprune_jax.models.config import Json, ModelConfig, Tokenizer
from stepprune_jax.models.images import Clip, Pixels, Resized, normalise, stack_images
from stepprune_jax.models.stack import Execution, Params
from stepprune_jax.models.weights import WeightRule, WeightTarget, list_targets
from stepprune_jax.user_input import naming

Processor = Any  # settings of an image processor; each family defines its own type


@dataclasses.dataclass(frozen=True)
class Backbone(abc.ABC):
    """A vision-language model without its weights; hashable, and static under `jax.jit`.

    Terms of the methods:

    * `raw` is a parsed ``config.json``.
    * `settings` are the settings of the image processor; the family defines their type.
    * `Pixels` are preprocessed images: an array or a tuple of arrays with a leading axis of images;
      the family defines their type. They contain bytes, because bytes are a quarter of the size of
      floats on the way to a device. `encode_image` normalizes them.
    * A canonical name is the name of a weight in the family's published files. Other naming schemes
      are translated to it.

    Attributes:
        config: the model's shape.
        name: short name of the family, such as "llava".
        SUPPORTED: description of the supported models, for error messages.
        CONTEXT_LIMIT: maximum number of tokens of a prompt, including visual tokens; longer prompts
            are truncated.
        SHARDING_RULES: (pattern of the path, spec) for every weight; see `parallel.sharding`.
        VISION_PREFIX: prefix of the canonical names of the tower's weights.
        MARK: text that `place_images` inserts for each image.
        MARKS_PATCHES: whether a prompt has a mark for each temporal patch of a video, with text
            between the marks, instead of one mark for the video.
    """

    config: ModelConfig
    name: ClassVar[str]
    SUPPORTED: ClassVar[str]
    CONTEXT_LIMIT: ClassVar[int]
    SHARDING_RULES: ClassVar[tuple[tuple[str, PartitionSpec], ...]]
    VISION_PREFIX: ClassVar[str]
    MARK: ClassVar[str] = IMAGE_MARK
    MARKS_PATCHES: ClassVar[bool] = False

    def replace(self, **fields: Any) -> "Backbone":
        """Returns the backbone with changed fields of its configuration."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **fields))

    # Checkpoint folders.

    @classmethod
    @abc.abstractmethod
    def matches(cls, raw: Json) -> bool:
        """Returns whether this family reads a checkpoint with the configuration `raw`."""

    @classmethod
    def vision_folder(cls, raw: Json) -> str | None:
        """Returns the folder or hub id of a tower that is stored outside the checkpoint.

        Returns:
            The folder or hub id; "" if the configuration does not name it; None if the tower is
            part of the checkpoint, which is the usual case.

        Raises:
            ValueError: the tower is not part of the checkpoint, and a field of the configuration
                has an unsupported value.
        """
        del raw
        return None

    @classmethod
    @abc.abstractmethod
    def read(cls, raw: Json, vision: Json | None) -> "Backbone":
        """Builds the backbone of a checkpoint.

        Args:
            raw: ``config.json`` of the checkpoint.
            vision: ``config.json`` of the tower's folder; None if the tower is part of the
                checkpoint.

        Returns:
            The backbone, with a checked configuration.

        Raises:
            ValueError: a field has an unsupported value; the message names the field.
        """

    @classmethod
    @abc.abstractmethod
    def canonical_name(cls, name: str, of_vision_folder: bool = False) -> str | None:
        """Returns the canonical name of a weight; None for a weight to skip.

        Args:
            name: name of the weight in a file.
            of_vision_folder: whether the file is in the folder of a separate tower.
        """

    @classmethod
    def is_vision_name(cls, name: str) -> bool:
        """Returns whether a canonical name belongs to the tower."""
        return name.startswith(cls.VISION_PREFIX)

    @abc.abstractmethod
    def may_be_unused(self, name: str) -> bool:
        """Returns whether a checkpoint may contain a weight that the model does not use.

        An example is the output head of a model that ties the head to the embeddings.

        Args:
            name: canonical name of the weight.
        """

    @abc.abstractmethod
    def weight_rules(self) -> tuple[WeightRule, ...]:
        """Returns the rules that map tensors of a checkpoint to weights."""

    def weight_targets(self, abstract: Params) -> list[WeightTarget]:
        """Lists the tensors that make up each leaf of the weights; see `weights.list_targets`."""
        return list_targets(abstract, self.weight_rules())

    def complete_vocabulary(self, tokenizer: Tokenizer) -> tuple["Backbone", Tokenizer]:
        """Adds tokens that a saved folder needs to the configuration and the tokenizer.

        The embeddings of added tokens are copies of the embedding of token 0.

        Args:
            tokenizer: the model's tokenizer, or None.

        Returns:
            The backbone and the tokenizer with these tokens.
        """
        return self, tokenizer

    # Images, on the host.

    @classmethod
    @abc.abstractmethod
    def image_settings(cls, folder: str | Path) -> Processor:
        """Reads the image processor's settings, with `images.read_processor`.

        Raises:
            FileNotFoundError: the folder has no image processor file.
            ValueError: the image processor is of an unsupported kind.
        """

    @abc.abstractmethod
    def hf_processor(self, settings: Processor) -> dict[str, Json]:
        """Returns the image processor's JSON files of a saved folder, by file name."""

    @abc.abstractmethod
    def bound_images(
        self,
        folder: str | Path | None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> "Backbone":
        """Limits the area of resized images.

        Args:
            folder: folder with the image processor's file, which defines the limits; None for the
                limits of the configuration.
            min_pixels: smallest area in pixels; replaces the folder's limit.
            max_pixels: largest area in pixels; replaces the folder's limit.

        Returns:
            The backbone with these limits. `config.max_image_tokens` depends on them.

        Raises:
            FileNotFoundError: the folder has no image processor file.
            ValueError: no image is within the limits, or `min_pixels` is set for a model with a
                fixed image size.
        """

    @abc.abstractmethod
    def resize(self, settings: Processor, image: Image.Image) -> Resized:
        """Resizes an RGB image to the input size of the tower.

        Raises:
            ValueError: the model does not support the size of the image.
        """

    def to_pixels(self, image: Resized) -> Pixels:
        """Converts a resized image to the family's pixels, without the axis of images."""
        return image

    def preprocess(self, settings: Processor, images: Sequence[Image.Image]) -> Pixels:
        """Converts RGB images, whose sizes may differ, to pixels.

        Images with fewer tokens are padded, so the pixels of a batch share a shape. A family pads
        to few different shapes, because each shape needs a compilation.

        Raises:
            ValueError: the model does not support the size of an image.
        """
        resized = (self.resize(settings, image) for image in images)
        return stack_images([self.to_pixels(image) for image in resized])

    def normalise(self, pixels: Pixels) -> Pixels:
        """Normalises pixels to the tower's float32 input, on the host or in a program."""
        return normalise(self.config.normalisation, pixels, -3)

    def with_square_grids(self, pixels: Pixels) -> Pixels:
        """Returns pixels of the largest shape with grids of square images.

        Args:
            pixels: pixels with the shapes of `largest_pixel_shapes`.
        """
        return pixels

    def visible_image(self, settings: Processor, image: Image.Image) -> Image.Image:
        """Returns the resized part of an RGB image that the grid of its tokens covers."""
        return Image.fromarray(self.resize(settings, image).transpose(1, 2, 0))

    def token_cells(
        self, grid: Sequence[int], tokens: Sequence[int] | Int[np.ndarray, "k"]
    ) -> Int[np.ndarray, "k"]:
        """Maps visual tokens to the cells of an image's grid, for figures and statistics.

        Args:
            grid: rows and columns of the image.
            tokens: [k] indices of visual tokens; -1 for a token without an index.

        Returns:
            [k] raster index of each token's cell; -1 for a token that shows no cell.
        """
        return np.asarray(tokens, int)

    def pixel_cache(self, settings: Processor, limit_bytes: int) -> Callable[[Path], Pixels]:
        """Returns a cached function that maps an image file to its pixels.

        The function returns one image of `preprocess`, without the axis of images. It may be called
        from several threads, and raises a FileNotFoundError for a missing file and a ValueError for
        an image that the model does not support.

        Args:
            settings: settings of the image processor.
            limit_bytes: size of the cache. The cache stores the images that were used last; their
                number is the number of images of the largest size that fit into this limit.
        """
        shapes = jax.tree.leaves(self.largest_pixel_shapes(1))
        largest_bytes = sum(shape.size * shape.dtype.itemsize for shape in shapes)

        @functools.lru_cache(limit_bytes // largest_bytes)
        def read(path: Path) -> Pixels:
            with naming(str(path)):  # images are read while training continues
                image = self.to_pixels(self.resize(settings, open_image(path)))
                # A view would keep the memory of the uncropped image alive.
                return jax.tree.map(np.ascontiguousarray, image)

        return read

    @abc.abstractmethod
    def largest_pixel_shapes(self, count: int) -> Pixels:
        """Returns the shapes of the pixels of `count` images of the largest size.

        The leaves are `jax.ShapeDtypeStruct`s. They serve to plan memory before any image is read.
        """

    def list_example_pixels(self, width: int, height: int) -> list[Pixels]:
        """Lists artificial pixels that cover all shapes of images up to a size.

        Each entry holds one image. For each shape there are images with the fewest and the most
        tokens, and with the most tokens that leave padding.

        Args:
            width: width of the largest image in pixels. The image may be rotated by 90 degrees.
            height: height of the largest image in pixels.
        """
        del width, height  # most families have a single shape
        shapes = self.largest_pixel_shapes(1)
        return [jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)]

    @abc.abstractmethod
    def grids(self, pixels: Pixels) -> Int[np.ndarray, "i 2"]:
        """Returns rows and columns of each image's visual tokens after merging.

        For example, a merger of 2 x 2 patches halves the rows and columns of the patches.
        """

    def num_tokens(self, grid: Int[Array | np.ndarray, "*b 2"]) -> Int[Array | np.ndarray, "*b"]:
        """Returns the number of visual tokens of unpruned images with the given grids."""
        return (grid[..., 0] * grid[..., 1]).astype(np.int32)

    def num_padded_tokens(self, pixels: Pixels) -> int:
        """Returns the padded number n of tokens per image in the result of `encode_image`."""
        del pixels
        return self.config.max_image_tokens

    # Videos, on the host. A video is a sequence of temporal patches, and each of them is encoded as
    # an image. Pruners and prompts see a video as one image, whose grid stacks the grids of its
    # temporal patches from top to bottom.

    @property
    def reads_videos(self) -> bool:
        """Whether the model reads videos, by its configuration."""
        return self.config.reads_videos

    def no_videos(self) -> NoVideosError:
        """Returns the error of a model that reads no videos. The message names who reads them."""
        return NoVideosError(
            f"{self.name} reads images only, and no videos; Qwen2.5-VL and Qwen3-VL read videos"
        )

    def read_video(self, settings: Processor, video: Video) -> Clip:
        """Reads the sampled frames of a video.

        Raises:
            FileNotFoundError: there is no such file.
            NoVideosError: the model reads no videos.
            ValueError: the video cannot be read.
        """
        raise self.no_videos()

    def inspect_video(self, settings: Processor, video: Video) -> ClipShape:
        """Returns the times and sizes of the frames that `read_video` would read.

        Decodes only the first frame. Raises the errors of `read_video`, except for later frames
        that are damaged.
        """
        raise self.no_videos()

    def as_patch_of_clip(self, pixels: Pixels) -> Pixels:
        """Returns the pixels of images in the form of temporal patches, for a batch with videos."""
        return pixels

    def patch_shapes(self, count: int, num_tokens: int) -> Pixels:
        """Returns the shapes of the pixels of `count` temporal patches of `num_tokens` tokens.

        The leaves are `jax.ShapeDtypeStruct`s.
        """
        del num_tokens
        return self.largest_pixel_shapes(count)

    def num_padded_patch_tokens(self, num_tokens: int) -> int:
        """Returns the padded number of tokens of a temporal patch in the pixels of `read_video`."""
        return num_tokens

    def num_padded_clip_tokens(self, num_tokens: int) -> int:
        """Returns the padded number of tokens of a video in the input of a pruner."""
        return num_tokens

    @classmethod
    def place_videos(cls, text: str, clips: Sequence[Clip | ClipShape | None]) -> str:
        """Replaces the mark of each video in the text of a prompt by the marks of the family.

        Args:
            text: result of `conversation`, with an `IMAGE_MARK` for each image and video.
            clips: for each mark, its video; None for an image.
        """
        return text

    # Prompts, on the host. `data.prompts` contains the code that all families share.

    @classmethod
    def place_images(cls, message: str, num_images: int) -> str:
        """Inserts an `IMAGE_MARK` for each image in front of the first user turn.

        Raises:
            ValueError: the message contains marks, but their number is not `num_images`.
        """
        return marks_in_front(message, num_images, cls.MARK)

    @classmethod
    @abc.abstractmethod
    def conversation(cls, turns: Sequence[str | None], system: str | None = None) -> str:
        """Formats a conversation, with its image marks, as the text of a prompt.

        The text of the first turns of a conversation is a prefix of the text of all turns.
        Therefore the text that a turn adds belongs to this turn.

        Args:
            turns: messages of the user and the assistant in turn; the user begins. If the
                assistant's last turn is None, empty or missing, the text ends where the assistant's
                answer begins.
            system: replaces the template's system prompt; None for the template's system prompt.

        Raises:
            ValueError: a turn contains a token that the template reserves for images or videos.
        """

    @classmethod
    def published_prompts(cls, turns: Sequence[str]) -> tuple[str, ...]:
        """Returns the accepted results of a folder's chat template for turns without images."""
        return (cls.conversation(turns),)

    # Programs.

    @abc.abstractmethod
    def init_params(self, key: Array) -> Params:
        """Initialises random float32 weights.

        Kernels are [in, out]. The weights of layers are stacked along a leading axis.
        """

    @abc.abstractmethod
    def encode_image(
        self,
        params: Params,
        pixels: Pixels,
        taps: Sequence[Tap] = (),
        execution: Execution = Execution(),
    ) -> tuple[Float[Array, "i n w"], dict[str, Array]]:
        """Computes the visual tokens that a pruner selects from, before the projector.

        Args:
            params: the model's weights.
            pixels: result of `preprocess`.
            taps: requested intermediates of the tower.
            execution: how the tower's blocks are run.

        Returns:
            [i, n, w] tokens in raster order, regardless of the tower's internal order, and the taps
            by name. n is the number of tokens of the largest image that fits the pixels; the tokens
            of a smaller image are a prefix of length `num_tokens`. The d channels of a token are
            followed by its DeepStack features, if the model has them: for layer 0 of the language
            model, for layer 1, and so on.

        Raises:
            ValueError: the images have another size, or a tap is unknown.
        """

    @abc.abstractmethod
    def project(self, params: Params, features: Float[Array, "*b w"]) -> Float[Array, "*b e"]:
        """Maps visual tokens, token by token, to the width of the language model.

        DeepStack features remain appended to each token. A merger mixes neighboring tokens and is
        therefore part of `encode_image`; its last projection may be part of this function.
        """

    @abc.abstractmethod
    def image_positions(
        self, grid: Int[Array, "*b 2"], place: Int[Array, "*b k"]
    ) -> tuple[Int[Array, "*b p k"], Int[Array, "*b"]]:
        """Returns the position ids of an image's tokens and the extent of the image.

        Args:
            grid: [..., 2] rows and columns of the images.
            place: [..., k] index of each token among the image's unpruned tokens.

        Returns:
            [..., p, k] int32 position ids relative to the image's first position id, and the [...]
            extent: the text after an image continues at the first position id plus the extent. The
            extent is n for consecutive ids and the longer side of the grid for (time, row, column).
        """

    def clip_positions(
        self,
        grid: Int[Array, "*b 2"],
        place: Int[Array, "*b k"],
        frames: Int[Array, "*b"],
        interval: Float[Array, "*b"],
    ) -> tuple[Int[Array, "*b p k"], Int[Array, "*b"]]:
        """Returns position ids and extents of images and videos; see `image_positions`.

        If `MARKS_PATCHES`, position ids and extents refer to a temporal patch.

        Args:
            grid: [..., 2] rows and columns; the rows of all temporal patches of a video.
            place: [..., k] index of each token among the unpruned tokens.
            frames: [...] number of temporal patches; 1 for an image.
            interval: [...] `Clip.interval`; 0 for an image.
        """
        del frames, interval
        return self.image_positions(grid, place)

    @abc.abstractmethod
    def vision_flops(self, grid: tuple[int, int]) -> dict[str, int]:
        """Counts the FLOPs of the `tower` and the `projector` for an image with the given grid."""
