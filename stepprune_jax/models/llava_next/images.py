"""Images to tiles: the whole image resized to a tile, then the tiles of a larger one, row by row.

The larger one is resized to fit one of the model's sizes and padded with black. Every number,
normalised, equals that of the Pillow image processor of ``transformers``, bit for bit.
"""

import math
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int, UInt8
from PIL import Image

from stepprune_jax.models.config import Json, Normalisation
from stepprune_jax.models.images import Bytes
from stepprune_jax.models.llava import images
from stepprune_jax.models.llava.images import LlavaImageSettings
from stepprune_jax.models.llava_next.config import LlavaNextConfig, Sizes
from stepprune_jax.user_input import require

_KIND = "LlavaNextImageProcessor"


class Tiles(NamedTuple):
    """Images as tiles of bytes, padded to one number of tiles with zeros.

    The grid counts the patches of the tiles without those that hold padding alone, the plan tiles.
    """

    values: UInt8[Array | np.ndarray, "*i t 3 s s"] | jax.ShapeDtypeStruct
    grid: Int[Array | np.ndarray, "*i 2"] | jax.ShapeDtypeStruct
    plan: Int[Array | np.ndarray, "*i 2"] | jax.ShapeDtypeStruct


class BothSizes(NamedTuple):
    """Bytes of the whole image at the size of a tile, and of the larger one, with its grid."""

    whole: Bytes
    padded: Bytes
    grid: Int[np.ndarray, "2"]


def settings_from_hf(raw: Json, where: str) -> LlavaImageSettings:
    """Translates a Hugging Face image processor dict of the file `where`."""
    kind = str(raw.get("image_processor_type") or raw.get("feature_extractor_type") or _KIND)
    supported = f"supported: {_KIND}, CLIPImageProcessor"
    known = kind.startswith((_KIND, "CLIP"))
    require(known, f"{where}: unsupported image processor {kind!r}; {supported}")
    own = raw | {"image_processor_type": None, "feature_extractor_type": None, "do_pad": False}
    settings = images.settings_from_hf(own, where)
    size, crop = settings.resize_to, settings.crop_to
    require(size == crop, f"{where}: crop_size is {crop}, expected size, {size}")
    return settings


def to_hf(settings: LlavaImageSettings, normalisation: Normalisation, sizes: Sizes) -> Json:
    """Describes the image processor; `do_pad` is about batches there."""
    pinpoints = [list(size) for size in sizes]
    own = {"image_processor_type": _KIND, "image_grid_pinpoints": pinpoints, "do_pad": True}
    return images.to_hf(settings, normalisation) | own


def best_size(height: int, width: int, sizes: Sizes) -> tuple[int, int]:
    """Returns the size that shows most of an image's pixels, and of those the smallest."""

    def rank(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        return shown, shown - math.prod(size)

    return max(sizes, key=rank)  # the first of equal ones


def fitted_size(height: int, width: int, size: tuple[int, int]) -> tuple[int, int]:
    """Returns height and width of an image that is resized to fit a size."""
    scale = min(size[0] / height, size[1] / width)
    return min(math.ceil(height * scale), size[0]), min(math.ceil(width * scale), size[1])


def unpadded_grid(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Returns the patches of an image in a grid of them, as `transformers` counts them."""
    if width / height > columns / rows:
        filled = int(round(height * (columns / width), 7))
        return rows - (rows - filled) // 2 * 2, columns
    filled = int(round(width * (rows / height), 7))
    return rows, columns - (columns - filled) // 2 * 2


def resize(config: LlavaNextConfig, settings: LlavaImageSettings, image: Image.Image) -> BothSizes:
    """Resizes an RGB image to a tile, and to fit the best of the model's sizes."""
    side, patch = config.vision.image_size, config.vision.patch_size
    down, across = best_size(image.height, image.width, config.sizes)
    height, width = fitted_size(image.height, image.width, (down, across))
    padded = Image.new("RGB", (across, down))
    fitted = image.resize((width, height), settings.resample)
    padded.paste(fitted, ((across - width) // 2, (down - height) // 2))
    whole = image.resize((side, side), settings.resample)
    whole, padded = (np.asarray(part).transpose(2, 0, 1) for part in (whole, padded))
    rows, columns = (length // side * (side // patch) for length in (down, across))
    grid = np.array(unpadded_grid(image.height, image.width, rows, columns), np.int32)
    return BothSizes(whole, padded, grid)


def to_tiles(image: BothSizes) -> Tiles:
    """Cuts a resized image into tiles, without the axis of images."""
    side = image.whole.shape[1]
    rows, columns = (length // side for length in image.padded.shape[1:])
    tiles = image.padded.reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4)
    values = np.concatenate([image.whole[None], tiles.reshape(-1, 3, side, side)])
    return Tiles(values, image.grid, np.array([rows, columns], np.int32))
