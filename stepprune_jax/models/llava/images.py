"""Images to CLIP pixels: pad to a square, Pillow bicubic, crop, normalise.

Every number equals that of the Pillow image processor of ``transformers``, bit for bit.
Pillow's own resampling is the reference; torchvision's differs by up to one grey level.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8
from PIL import Image

from stepprune_jax.data.images import pad_to_square
from stepprune_jax.data.prompts import IMAGE_MARK
from stepprune_jax.models.config import LONGEST_SIDE, real, switch
from stepprune_jax.models.images import (
    CLIP_MEAN,
    CLIP_STD,
    read_channels,
    read_filter,
    read_processor,
)
from stepprune_jax.models.llava.config import LlavaConfig

# An unpadded image may grow to this many pixels, half a gigabyte, before it is cropped.
RESIZED_PIXELS = 2 * 89_478_485  # as many as Pillow opens


class ImageSettings(NamedTuple):
    """Steps of the image processor, in the order of the fields.

    Attributes:
        pad_to_square: pad to a square of side max(width, height) first. LLaVA-1.5 was trained this
            way, although the published processor files omit it.
        resize_to: length of the shorter edge after resizing, or (height, width), or None.
        crop_to: (height, width) of the centre crop, or None.
        rescale: factor on the 0 to 255 values, or None.
        mean: per-channel mean in rescaled units, subtracted; None for no normalisation.
        std: per-channel standard deviation in rescaled units.
        resample: number of the Pillow filter (3 is bicubic).
    """

    pad_to_square: bool = True
    resize_to: int | tuple[int, int] | None = 336
    crop_to: tuple[int, int] | None = (336, 336)
    rescale: float | None = 1 / 255
    mean: tuple[float, ...] | None = CLIP_MEAN
    std: tuple[float, ...] | None = CLIP_STD
    resample: int = 3

    @property
    def fill(self) -> tuple[int, ...]:
        """Colour of the padding: the mean truncated to integers, (122, 116, 104) for CLIP."""
        return tuple(int(value * 255) for value in self.mean or (0.0, 0.0, 0.0))


LLAVA_SETTINGS = ImageSettings()


def image_settings(folder: str | Path) -> ImageSettings:
    """Reads a checkpoint folder's image processor settings.

    Args:
        folder: folder with ``preprocessor_config.json``, or with a ``processor_config.json`` that
            has an ``image_processor`` entry (as newer `transformers` write it).

    Returns:
        The settings, with ``pad_to_square`` on (see `ImageSettings`).

    Raises:
        FileNotFoundError: neither file exists.
        ValueError: a file is not JSON or describes another kind of processor.
    """
    return settings_from_hf(*read_processor(folder))


def bound_images(
    config: LlavaConfig,
    folder: str | Path | None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> LlavaConfig:
    """Returns the configuration unchanged, as all images have the tower's size.

    Raises:
        ValueError: bounds are given.
    """
    del folder
    for name, value in (("min_pixels", min_pixels), ("max_pixels", max_pixels)):
        if value is not None:
            side = config.vision.image_size
            raise ValueError(
                f"{name} is {value}, but this model takes images of one size, {side} x {side}"
            )
    return config


def settings_from_hf(
    config: dict[str, Any], source: str = "image processor config"
) -> ImageSettings:
    """Translates a Hugging Face image processor dict.

    Args:
        config: the parsed JSON.
        source: its file, for error messages.

    Returns:
        The settings.

    Raises:
        ValueError: the processor is not CLIP's or LLaVA's, or a field has an unknown form.
    """
    kind = config.get("image_processor_type") or config.get("feature_extractor_type") or "CLIP"
    if not str(kind).startswith(("CLIP", "Llava")) or str(kind).startswith(
        ("LlavaNext", "LlavaOne")
    ):
        raise ValueError(
            f"{source}: unsupported image processor {kind!r}; supported: CLIPImageProcessor, "
            "LlavaImageProcessor"
        )
    normalise = switch(config, "do_normalize", True, source)
    rescale = switch(config, "do_rescale", True, source)
    return ImageSettings(
        resize_to=_edge(config, source) if switch(config, "do_resize", True, source) else None,
        crop_to=_crop(config, source) if switch(config, "do_center_crop", True, source) else None,
        rescale=real(config, "rescale_factor", 1 / 255, source) if rescale else None,
        mean=read_channels(config, "image_mean", CLIP_MEAN, -math.inf, source)
        if normalise
        else None,
        std=read_channels(config, "image_std", CLIP_STD, 0, source) if normalise else None,
        resample=read_filter(config, source),
    )


def _edge(config: dict[str, Any], source: str) -> int | tuple[int, int]:
    """Reads the resize target: a shorter edge, or (height, width)."""
    size = config.get("size", 224)
    if isinstance(size, dict) and size.get("shortest_edge"):
        return _side(size["shortest_edge"], config, "size", source)
    if isinstance(size, dict):
        return _height_width(size, config, "size", source)
    return _side(size, config, "size", source)


def _crop(config: dict[str, Any], source: str) -> tuple[int, int]:
    """Reads the (height, width) of the crop, from an object or one number."""
    size = config.get("crop_size", 224)
    if isinstance(size, dict):
        return _height_width(size, config, "crop_size", source)
    side = _side(size, config, "crop_size", source)
    return side, side


def _height_width(
    size: dict[str, Any], config: dict[str, Any], field: str, source: str
) -> tuple[int, int]:
    height, width = (_side(size.get(name), config, field, source) for name in ("height", "width"))
    return height, width


def _side(value: Any, config: dict[str, Any], field: str, source: str) -> int:
    """Reads a side in pixels, of a plausible size."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LONGEST_SIDE:
        edge = ", {shortest_edge}" if field == "size" else ""
        raise ValueError(
            f"{source}: {field} is {config.get(field)!r}, expected a number{edge} or "
            f"{{height, width}}, of 1 to {LONGEST_SIDE} pixels"
        )
    return value


def preprocess_clip(
    image: Image.Image, settings: ImageSettings = LLAVA_SETTINGS
) -> Float[np.ndarray, "3 height width"]:
    """Converts an RGB image to the pixels that CLIP sees.

    Args:
        image: an RGB image of any size.
        settings: the processor's settings.

    Returns:
        float32 `[3, height, width]`, normalised; 336 x 336 for LLaVA-1.5.

    Raises:
        ValueError: the image is not in mode RGB, or so narrow that its longer edge would become
            huge.
    """
    pixels = _resize(image, settings)
    # Scaled in float64 and normalised in float32: the reference's order, to the last bit.
    if settings.rescale is not None:
        pixels = (pixels.astype(np.float64) * settings.rescale).astype(np.float32)
    pixels = pixels.astype(np.float32)
    if settings.mean is not None and settings.std is not None:
        mean = np.asarray(settings.mean, np.float32)[:, None, None]
        std = np.asarray(settings.std, np.float32)[:, None, None]
        pixels = (pixels - mean) / std
    return np.ascontiguousarray(pixels)


def seen(config: LlavaConfig, settings: ImageSettings, image: Image.Image) -> Image.Image:
    """Returns an image as the tower sees it: padded, resized and cropped."""
    del config
    return Image.fromarray(_resize(image, settings).transpose(1, 2, 0))


def _resize(image: Image.Image, settings: ImageSettings) -> UInt8[np.ndarray, "3 height width"]:
    """Pads, resizes and crops an image."""
    if image.mode != "RGB":
        raise ValueError(f"expected an RGB image, got mode {image.mode!r}; use open_image first")
    side = max(image.size)
    if settings.pad_to_square and image.width != image.height:
        size = None
        if settings.resize_to is not None:
            size = _target(side, side, settings.resize_to)
        image = pad_to_square(image, settings.fill, size, settings.resample)
    elif settings.resize_to is not None:
        height, width = _target(image.height, image.width, settings.resize_to)
        if height * width > RESIZED_PIXELS:
            raise ValueError(
                f"an image of {image.width} x {image.height} pixels is too narrow: it would be "
                f"resized to {width} x {height}"
            )
        image = image.resize((width, height), settings.resample)
    pixels = np.asarray(image).transpose(2, 0, 1)
    if settings.crop_to is not None:
        pixels = _center_crop(pixels, *settings.crop_to)
    return pixels


def preprocess(
    config: LlavaConfig, settings: ImageSettings, images: Sequence[Image.Image]
) -> Float[np.ndarray, "i 3 height width"]:
    """Converts images to the pixels that a model takes.

    Args:
        config: the model's configuration.
        settings: the processor's settings.
        images: at least one RGB image; sizes may differ.

    Returns:
        float32 `[i, 3, height, width]`.

    Raises:
        ValueError: there are no images, or the settings give a size other than the tower's.
    """
    if not images:
        raise ValueError("expected at least one image, got none")
    pixels = [preprocess_clip(image, settings) for image in images]
    side = config.vision.image_size
    for _, height, width in (image.shape for image in pixels):
        if (height, width) != (side, side):
            raise ValueError(
                f"the image processor makes {height} x {width} pixels, the model takes "
                f"{side} x {side}: crop_size of preprocessor_config.json is wrong"
            )
    return np.stack(pixels)


def grids(config: LlavaConfig, pixels: Float[np.ndarray, "i 3 H W"]) -> Int[np.ndarray, "i 2"]:
    """Returns rows and columns of the patches of each image."""
    return np.tile(np.array(config.grid, np.int32), (len(pixels), 1))


def hf_processor(config: LlavaConfig, settings: ImageSettings) -> dict[str, dict[str, Any]]:
    """Describes the image processor in the files of old and new versions of `transformers`.

    Args:
        config: the model's configuration.
        settings: the processor's settings.

    Returns:
        JSON values by file name.
    """
    edge, crop = settings.resize_to, settings.crop_to or (336, 336)
    size = {"height": edge[0], "width": edge[1]} if isinstance(edge, tuple) else None
    processor = {
        "image_processor_type": "LlavaImageProcessor",  # CLIP's with a switch for the padding
        "do_convert_rgb": True,
        "do_pad": settings.pad_to_square,
        "do_resize": edge is not None,
        "size": size or {"shortest_edge": edge or config.vision.image_size},
        "resample": settings.resample,
        "do_center_crop": settings.crop_to is not None,
        "crop_size": {"height": crop[0], "width": crop[1]},
        "do_rescale": settings.rescale is not None,
        "rescale_factor": settings.rescale or 1 / 255,
        "do_normalize": settings.mean is not None,
        "image_mean": list(settings.mean or CLIP_MEAN),
        "image_std": list(settings.std or CLIP_STD),
    }
    combined = {
        "processor_class": "LlavaProcessor",
        "image_processor": processor,
        "image_token": IMAGE_MARK,
        "num_additional_image_tokens": 1,
        "patch_size": config.vision.patch_size,
        "vision_feature_select_strategy": config.feature_select,
    }
    return {
        "preprocessor_config.json": {**processor, "processor_class": "LlavaProcessor"},
        "processor_config.json": combined,
    }


def _target(height: int, width: int, resize_to: int | tuple[int, int]) -> tuple[int, int]:
    """Returns (height, width) after resizing; an integer is the shorter edge."""
    if isinstance(resize_to, tuple):
        return resize_to
    longer = int(resize_to * max(height, width) / min(height, width))
    return (longer, resize_to) if width <= height else (resize_to, longer)


def _center_crop(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Crops the centre of `[3, rows, columns]`; smaller images are padded with zeros."""
    rows, columns = pixels.shape[1:]
    if rows < height or columns < width:
        canvas = np.zeros((3, max(rows, height), max(columns, width)), pixels.dtype)
        # Rounded up, as in the reference.
        top, left = -((rows - canvas.shape[1]) // 2), -((columns - canvas.shape[2]) // 2)
        canvas[:, top : top + rows, left : left + columns] = pixels
        pixels, (rows, columns) = canvas, canvas.shape[1:]
    top, left = (rows - height) // 2, (columns - width) // 2
    return pixels[:, top : top + height, left : left + width]
