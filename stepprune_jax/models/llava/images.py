"""Images to CLIP pixels: pad to a square, Pillow bicubic, crop, normalise.

Every number equals that of the Pillow image processor of ``transformers``, bit for bit.
Pillow's own resampling is the reference; torchvision's differs by up to one grey level.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from PIL import Image

from stepprune_jax.data.images import pad_to_square
from stepprune_jax.models.config import LONGEST_SIDE, Json, Rule, read_fields, require, switch
from stepprune_jax.models.images import CLIP_MEAN, CLIP_STD, NORMALISATION, Bytes, byte_table
from stepprune_jax.settings import is_count

# An unpadded image may grow to this many pixels, half a gigabyte, before it is cropped.
RESIZED_PIXELS = 2 * 89_478_485  # as many as Pillow opens


class ImageSettings(NamedTuple):
    """Steps of the image processor, in the order of the fields; None leaves one out.

    LLaVA-1.5 was trained with padding to a square, although the published processor files omit it.
    `resize_to` is the shorter edge or (height, width), `crop_to` (height, width); mean and standard
    deviation are in rescaled units; `resample` is the number of a Pillow filter.
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


def _side(value: object) -> int | None:
    return value if is_count(value) and value <= LONGEST_SIDE else None


def _height_width(value: object) -> tuple[int, int] | None:
    """Reads a number or {height, width}."""
    given = value if isinstance(value, dict) else {"height": value, "width": value}
    height, width = _side(given.get("height")), _side(given.get("width"))
    return None if height is None or width is None else (height, width)


def _edge(value: object) -> int | tuple[int, int] | None:
    """Reads a number, {shortest_edge} or {height, width}."""
    edge = value.get("shortest_edge") if isinstance(value, dict) else value
    return _side(edge) if edge else _height_width(value)


_SIDES = f"{{height, width}}, of 1 to {LONGEST_SIDE} pixels"
_SETTINGS = {
    **NORMALISATION,
    "resize_to": Rule("size", 224, _edge, f"a number, {{shortest_edge}} or {_SIDES}"),
    "crop_to": Rule("crop_size", (224, 224), _height_width, f"a number or {_SIDES}"),
}
# The steps that a processor may leave out.
_STEPS = {
    "resize_to": switch("do_resize", True),
    "crop_to": switch("do_center_crop", True),
    "rescale": switch("do_rescale", True),
    "mean": switch("do_normalize", True),
}


def settings_from_hf(raw: Json, where: str = "image processor config") -> ImageSettings:
    """Translates a Hugging Face image processor dict of the file `where`."""
    kind = str(raw.get("image_processor_type") or raw.get("feature_extractor_type") or "CLIP")
    known = kind.startswith(("CLIP", "Llava")) and not kind.startswith(("LlavaNext", "LlavaOne"))
    supported = "supported: CLIPImageProcessor, LlavaImageProcessor"
    require(where, (known, f"unsupported image processor {kind!r}; {supported}"))
    steps = read_fields(raw, where, _STEPS)
    skipped = {name for name, done in steps.items() if not done}
    skipped |= {"std"} if "mean" in skipped else set()
    rules = {name: rule for name, rule in _SETTINGS.items() if name not in skipped}
    return ImageSettings(**dict.fromkeys(skipped), **read_fields(raw, where, rules))


def to_hf(settings: ImageSettings, side: int) -> Json:
    """Describes the image processor of a tower with images of a side."""
    edge, crop = settings.resize_to, settings.crop_to or (336, 336)
    size = {"height": edge[0], "width": edge[1]} if isinstance(edge, tuple) else None
    return {
        "image_processor_type": "LlavaImageProcessor",  # CLIP's with a switch for the padding
        "do_convert_rgb": True,
        "do_pad": settings.pad_to_square,
        "do_resize": edge is not None,
        "size": size or {"shortest_edge": edge or side},
        "resample": settings.resample,
        "do_center_crop": settings.crop_to is not None,
        "crop_size": {"height": crop[0], "width": crop[1]},
        "do_rescale": settings.rescale is not None,
        "rescale_factor": settings.rescale or 1 / 255,
        "do_normalize": settings.mean is not None,
        "image_mean": list(settings.mean or CLIP_MEAN),
        "image_std": list(settings.std or CLIP_STD),
    }


def resize(image: Image.Image, settings: ImageSettings) -> Bytes:
    """Pads, resizes and crops an RGB image, unless its longer edge would become huge."""
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


def normalise(image: Bytes, settings: ImageSettings) -> Float[np.ndarray, "3 height width"]:
    """Scales and normalises a resized image."""
    table = byte_table(settings.rescale, settings.mean, settings.std)
    return np.stack([row[channel] for row, channel in zip(table, image, strict=True)])


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
