"""Images to the patches that Qwen2.5-VL's tower takes, each image at its own size.

An image is resized so that its sides are multiples of a merged patch and its area is within bounds,
scaled, normalised and cut into patches. Every number equals that of the Pillow image processor of
``transformers``, bit for bit. That processor repeats an image as the second frame of its patches;
here patches have one frame, which the tower reads twice.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int, UInt8
from PIL import Image

from stepprune_jax.data.images import MAX_ASPECT, open_image
from stepprune_jax.models.config import checked, positive, real
from stepprune_jax.models.images import (
    CLIP_MEAN,
    CLIP_STD,
    ByteCache,
    read_channels,
    read_filter,
    read_processor,
    stack_images,
)
from stepprune_jax.models.qwen2_5_vl.config import MOST_PIXELS, QwenConfig, QwenVisionConfig

_KINDS = (
    "Qwen2VLImageProcessor",
    "Qwen2VLImageProcessorFast",
    "Qwen2VLImageProcessorPil",
    "Qwen2_5_VLImageProcessor",
)
# Images are padded to a multiple of this many tokens, whose patches are a block of the tower's
# attention.
BLOCK_TOKENS = 16


class ImageSettings(NamedTuple):
    """Settings of the image processor, except the bounds of resizing, which are in `QwenConfig`.

    Attributes:
        rescale: factor on the 0 to 255 values.
        mean: per-channel mean in rescaled units, subtracted.
        std: per-channel standard deviation in rescaled units.
        resample: number of the Pillow filter (3 is bicubic).
    """

    rescale: float = 1 / 255
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    resample: int = 3

    @property
    def table(self) -> Float[np.ndarray, "3 256"]:
        """Value of each byte in each channel after normalisation."""
        # Scaled in float64 and normalised in float32: the reference's order, to the last bit.
        scaled = (np.arange(256).astype(np.float64) * self.rescale).astype(np.float32)
        mean, std = (np.asarray(x, np.float32)[:, None] for x in (self.mean, self.std))
        return (scaled - mean) / std


class Patches(NamedTuple):
    """Images as patches, padded to one length.

    Attributes:
        values: [i, m, v] float32 normalised patches, grouped by merged patch in raster order; the v
            values run over channel, row and column. Zeros in the padding.
        grid: [i, 2] int32 rows and columns of merged patches.
    """

    values: Float[Array | np.ndarray, "*i m v"] | jax.ShapeDtypeStruct
    grid: Int[Array | np.ndarray, "*i 2"] | jax.ShapeDtypeStruct


def image_settings(folder: str | Path) -> ImageSettings:
    """Reads a checkpoint folder's image processor settings.

    Args:
        folder: folder with ``preprocessor_config.json`` or ``processor_config.json``.

    Returns:
        The settings.

    Raises:
        FileNotFoundError: neither file exists.
        ValueError: a file is not JSON or describes another kind of processor.
    """
    return _settings_from_hf(*read_processor(folder))


def _settings_from_hf(config: dict[str, Any], source: str) -> ImageSettings:
    """Translates a Hugging Face image processor dict."""
    kind = config.get("image_processor_type", _KINDS[0])
    if kind not in _KINDS:
        raise ValueError(
            f"{source}: unsupported image processor {kind!r}; supported: {', '.join(_KINDS)}"
        )
    for field in ("do_resize", "do_rescale", "do_normalize"):
        checked(config, field, True, (True,), source)
    return ImageSettings(
        rescale=real(config, "rescale_factor", 1 / 255, source),
        mean=read_channels(config, "image_mean", CLIP_MEAN, -math.inf, source),
        std=read_channels(config, "image_std", CLIP_STD, 0, source),
        resample=read_filter(config, source),
    )


def bound_images(
    config: QwenConfig,
    folder: str | Path | None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> QwenConfig:
    """Bounds the area of resized images, by the folder's processor or the user.

    Args:
        config: the model's configuration.
        folder: the checkpoint's folder; None for the bounds of the configuration.
        min_pixels: smallest area, instead of the folder's.
        max_pixels: largest area, instead of the folder's.

    Returns:
        The configuration with these bounds.

    Raises:
        FileNotFoundError: the folder has no image processor file.
        ValueError: invalid bounds, or a processor for patches other than the model's.
    """
    least, most = config.min_pixels, config.max_pixels
    if folder is not None:
        least, most = _processor_bounds(config.vision, *read_processor(folder))
    least = least if min_pixels is None else min_pixels
    most = most if max_pixels is None else max_pixels
    try:
        return dataclasses.replace(config, min_pixels=least, max_pixels=most)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}" if folder is not None else str(error)) from error


def _processor_bounds(
    vision: QwenVisionConfig, processor: dict[str, Any], source: str
) -> tuple[int, int]:
    """Reads the bounds of a Hugging Face image processor dict, and checks its patch sizes."""
    for field, value in (
        ("patch_size", vision.patch_size),
        ("temporal_patch_size", vision.temporal_patch_size),
        ("merge_size", vision.merge_size),
    ):
        checked(processor, field, value, (value,), source)
    # Defaults of the processor's class, which the published files do not rely on.
    bounds, size = [], processor.get("size") or {}
    if not isinstance(size, dict):
        raise ValueError(f"{source}: size is {size!r}, expected an object")
    for name, edge, default in (
        ("min_pixels", "shortest_edge", 56 * 56),
        ("max_pixels", "longest_edge", 28 * 28 * 1280),
    ):
        given = next((x for x in (processor.get(name), size.get(name)) if x is not None), None)
        area = positive(size, edge, default, source, MOST_PIXELS) if given is None else given
        bounds.append(positive({name: area}, name, default, source, MOST_PIXELS))
    return bounds[0], bounds[1]


def hf_processor(config: QwenConfig, settings: ImageSettings) -> dict[str, dict[str, Any]]:
    """Describes the image processor, in the field names of old and new versions of `transformers`.

    Args:
        config: the model's configuration.
        settings: the processor's settings.

    Returns:
        JSON values by file name.
    """
    processor = {
        "image_processor_type": _KINDS[0],
        "processor_class": "Qwen2_5_VLProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "min_pixels": config.min_pixels,
        "max_pixels": config.max_pixels,
        "size": {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels},
        "resample": settings.resample,
        "do_rescale": True,
        "rescale_factor": settings.rescale,
        "do_normalize": True,
        "image_mean": list(settings.mean),
        "image_std": list(settings.std),
        "patch_size": config.vision.patch_size,
        "temporal_patch_size": config.vision.temporal_patch_size,
        "merge_size": config.vision.merge_size,
    }
    return {"preprocessor_config.json": processor}


def target_size(config: QwenConfig, height: int, width: int) -> tuple[int, int]:
    """Returns the size to which an image is resized.

    Each side is rounded to the nearest multiple of a merged patch, halves to even. If the area is
    then out of bounds, both sides are scaled by one factor to meet the bound, and rounded down or
    up.

    Args:
        config: the model's configuration.
        height: height of the image in pixels.
        width: width of the image in pixels.

    Returns:
        (height, width) in pixels.

    Raises:
        ValueError: one side is more than 200 times the other.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ValueError(
            f"an image of {width} x {height} pixels is too narrow: expected sides of at most "
            f"{MAX_ASPECT} to 1"
        )
    factor, sides = config.vision.factor, (height, width)
    rounded = [round(side / factor) * factor for side in sides]
    area = math.prod(rounded)
    if area > config.max_pixels:
        scale = math.sqrt((height * width) / config.max_pixels)
        rounded = [max(factor, math.floor(side / scale / factor) * factor) for side in sides]
    if area < config.min_pixels:
        scale = math.sqrt(config.min_pixels / (height * width))
        rounded = [math.ceil(side * scale / factor) * factor for side in sides]
    return rounded[0], rounded[1]


def _resize(
    config: QwenConfig, settings: ImageSettings, image: Image.Image
) -> UInt8[np.ndarray, "3 height width"]:
    """Returns the bytes of an RGB image at its target size."""
    if image.mode != "RGB":
        raise ValueError(f"expected an RGB image, got mode {image.mode!r}; use open_image first")
    height, width = target_size(config, image.height, image.width)
    return np.asarray(image.resize((width, height), settings.resample)).transpose(2, 0, 1)


def _to_patches(
    vision: QwenVisionConfig,
    table: Float[np.ndarray, "3 256"],
    image: UInt8[np.ndarray, "3 height width"],
) -> Patches:
    """Normalises a resized image and cuts it into padded patches, without the axis of images."""
    p, k = vision.patch_size, vision.merge_size
    rows, columns = (side // vision.factor for side in image.shape[1:])
    parts = image.reshape(3, rows, k, p, columns, k, p).transpose(1, 4, 2, 5, 0, 3, 6)
    patches = np.zeros((padded_tokens(rows * columns) * vision.unit, 3 * p * p), np.float32)
    filled = patches[: rows * columns * vision.unit].reshape(parts.shape)
    for channel in range(3):
        filled[..., channel, :, :] = table[channel][parts[..., channel, :, :]]
    return Patches(patches, np.array([rows, columns], np.int32))


def padded_tokens(count: int) -> int:
    """Returns the bucket of an image with `count` tokens: four per doubling, at least 16.

    16, 32, 48, 64, 80, 96, 112, 128, 160, 192, ...: padding adds at most a quarter to an image of
    64 tokens or more.
    """
    step = max(BLOCK_TOKENS, 1 << max(0, (count - 1).bit_length() - 3))
    return -(-count // step) * step


def preprocess(
    config: QwenConfig, settings: ImageSettings, images: Sequence[Image.Image]
) -> Patches:
    """Converts images to the patches that a model takes.

    Args:
        config: the model's configuration.
        settings: the processor's settings.
        images: at least one RGB image; sizes may differ.

    Returns:
        The patches, padded to the bucket of the largest image.

    Raises:
        ValueError: there are no images, or one is too narrow.
    """
    if not images:
        raise ValueError("expected at least one image, got none")
    table = settings.table
    parts = [
        _to_patches(config.vision, table, _resize(config, settings, image)) for image in images
    ]
    return stack_images(parts)


def seen(config: QwenConfig, settings: ImageSettings, image: Image.Image) -> Image.Image:
    """Returns an image as the tower sees it, resized to its target size."""
    return Image.fromarray(_resize(config, settings, image).transpose(1, 2, 0))


class PatchCache(ByteCache):
    """A cache of the patches of images by path."""

    def __init__(self, config: QwenConfig, settings: ImageSettings, limit_bytes: int):
        """Starts empty; the arguments are those of `pixel_cache`."""
        super().__init__(limit_bytes)
        self._config, self._settings, self._table = config, settings, settings.table

    def __call__(self, path: Path) -> Patches:
        """Returns the patches of an image, padded to its bucket; without the axis of images.

        Args:
            path: the file.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: not an image, or one that is damaged or too narrow.
        """
        return _to_patches(self._config.vision, self._table, self._bytes(path))

    def _decode(self, path: Path) -> UInt8[np.ndarray, "3 height width"]:
        return _resize(self._config, self._settings, open_image(path))


def pixel_cache(config: QwenConfig, settings: ImageSettings, limit_bytes: int) -> PatchCache:
    """Returns a cache of preprocessed image files.

    Args:
        config: the model's configuration.
        settings: the processor's settings.
        limit_bytes: size of the cache; the least recently used images are dropped.
    """
    return PatchCache(config, settings, limit_bytes)


def max_pixels(config: QwenConfig, count: int) -> Patches:
    """Returns the shapes of the patches of `count` images of the largest size."""
    vision = config.vision
    patches = padded_tokens(config.max_image_tokens) * vision.unit
    return Patches(
        jax.ShapeDtypeStruct((count, patches, 3 * vision.patch_size**2), np.float32),
        jax.ShapeDtypeStruct((count, 2), np.int32),
    )


def grids(config: QwenConfig, pixels: Patches) -> Int[np.ndarray, "i 2"]:
    """Returns rows and columns of the merged patches of each image."""
    del config
    return np.asarray(pixels.grid, np.int32)
