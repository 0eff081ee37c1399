"""LLaVA-NeXT's image processor: an image becomes an overview and the tiles of a larger version.

The overview is the image resized to the side of a tile. The larger version is resized to fit one of
the model's sizes, padded with black, and cut into tiles, row by row. After normalization, every
number equals the Pillow image processor of ``transformers`` bit for bit.
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
    """Images as tiles; the `Pixels` of LLaVA-NeXT.

    Attributes:
        values: [i, t, 3, s, s] bytes of the tiles, the overview first. Images with fewer tiles are
            padded with zeros.
        grid: [i, 2] rows and columns of the patches of the larger version, without patches that
            contain only padding.
        tile_grid: [i, 2] rows and columns of tiles, without the overview.
    """

    values: UInt8[Array | np.ndarray, "*i t 3 s s"] | jax.ShapeDtypeStruct
    grid: Int[Array | np.ndarray, "*i 2"] | jax.ShapeDtypeStruct
    tile_grid: Int[Array | np.ndarray, "*i 2"] | jax.ShapeDtypeStruct


class ResizedVersions(NamedTuple):
    """Both resized versions of an image.

    Attributes:
        overview: bytes of the image at the size of a tile.
        padded: bytes of the larger version, with its padding.
        grid: [2] see `Tiles.grid`.
    """

    overview: Bytes
    padded: Bytes
    grid: Int[np.ndarray, "2"]


def settings_from_hf(raw: Json, where: str) -> LlavaImageSettings:
    """Translates the JSON object of a Hugging Face image processor.

    Args:
        raw: the parsed JSON object.
        where: its file, for error messages.

    Returns:
        The settings.

    Raises:
        ValueError: the kind of the processor or a field is not supported.
    """
    kind = str(raw.get("image_processor_type") or raw.get("feature_extractor_type") or _KIND)
    supported = f"supported: {_KIND}, CLIPImageProcessor"
    is_supported = kind.startswith((_KIND, "CLIP"))
    require(is_supported, f"{where}: unsupported image processor {kind!r}; {supported}")
    # `do_pad` pads batches in this processor, while it pads images to squares in LLaVA's processor.
    llava_fields = {"image_processor_type": None, "feature_extractor_type": None, "do_pad": False}
    settings = images.settings_from_hf(raw | llava_fields, where)
    size, crop = settings.resize_to, settings.crop_to
    require(size == crop, f"{where}: crop_size is {crop}, expected size, {size}")
    return settings


def to_hf(settings: LlavaImageSettings, normalisation: Normalisation, sizes: Sizes) -> Json:
    """Returns the JSON fields of the image processor, which `settings_from_hf` reads."""
    return images.to_hf(settings, normalisation) | {
        "image_processor_type": _KIND,
        "image_grid_pinpoints": [list(size) for size in sizes],
        "do_pad": True,  # of batches
    }


def best_size(height: int, width: int, sizes: Sizes) -> tuple[int, int]:
    """Returns the (height, width) that preserves the most pixels when an image is fitted into it.

    Among sizes that preserve equally many pixels, the size with the smallest area is returned.

    Args:
        height: height of the image in pixels.
        width: width of the image in pixels.
        sizes: (height, width) pairs to choose from.
    """

    def preference(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        # Enlarging an image adds no information, so its own number of pixels is the maximum.
        num_preserved = min(int(width * scale) * int(height * scale), width * height)
        num_wasted = math.prod(size) - num_preserved
        return num_preserved, -num_wasted

    # `max` returns the first of equally good sizes, as `transformers` does.
    return max(sizes, key=preference)


def fitted_size(height: int, width: int, size: tuple[int, int]) -> tuple[int, int]:
    """Returns the (height, width) of an image that is scaled to fit into a (height, width)."""
    scale = min(size[0] / height, size[1] / width)
    return min(math.ceil(height * scale), size[0]), min(math.ceil(width * scale), size[1])


def unpadded_grid(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Returns the rows and columns of patches that contain the image, as `transformers` counts.

    The image was scaled to fill one side of a larger image, and centered with equal padding on both
    sides of the other axis.

    Args:
        height: height of the original image in pixels.
        width: width of the original image in pixels.
        rows: rows of patches of the padded image.
        columns: columns of patches of the padded image.

    Returns:
        Rows and columns without the padding.
    """
    is_padded_vertically = width / height > columns / rows
    # The same number of patches is removed on both sides, hence `// 2 * 2`. `transformers` rounds
    # to 7 decimals before it rounds down.
    if is_padded_vertically:
        filled_rows = int(round(height * (columns / width), 7))
        return rows - (rows - filled_rows) // 2 * 2, columns
    filled_columns = int(round(width * (rows / height), 7))
    return rows, columns - (columns - filled_columns) // 2 * 2


def resize(
    config: LlavaNextConfig, settings: LlavaImageSettings, image: Image.Image
) -> ResizedVersions:
    """Resizes an RGB image to the overview and to the best of the model's sizes.

    Args:
        config: the model's configuration, which lists the sizes.
        settings: settings of the image processor.
        image: RGB image of any size.

    Returns:
        The overview, and the larger version with black padding.
    """
    tile_side, patch_size = config.vision.image_size, config.vision.patch_size
    size = best_size(image.height, image.width, config.sizes)
    height, width = fitted_size(image.height, image.width, size)
    padded = Image.new("RGB", (size[1], size[0]))
    fitted = image.resize((width, height), settings.resample)
    padded.paste(fitted, ((size[1] - width) // 2, (size[0] - height) // 2))
    overview = image.resize((tile_side, tile_side), settings.resample)
    rows, columns = (length // tile_side * (tile_side // patch_size) for length in size)
    grid = np.array(unpadded_grid(image.height, image.width, rows, columns), np.int32)
    return ResizedVersions(
        np.asarray(overview).transpose(2, 0, 1), np.asarray(padded).transpose(2, 0, 1), grid
    )


def to_tiles(image: ResizedVersions) -> Tiles:
    """Cuts a resized image into tiles; the result has no axis of images."""
    side = image.overview.shape[1]
    rows, columns = (length // side for length in image.padded.shape[1:])
    tiles = image.padded.reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4)
    values = np.concatenate([image.overview[None], tiles.reshape(-1, 3, side, side)])
    return Tiles(values, image.grid, np.array([rows, columns], np.int32))
