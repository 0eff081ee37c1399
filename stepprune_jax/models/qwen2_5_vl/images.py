"""Images to the patches that the towers of Qwen's models take, each image at its own size.

An image is resized so that its sides are multiples of a merged patch and its area is within bounds,
and cut into patches. Every number, normalised, equals that of the Pillow image processor of
``transformers``, bit for bit. That processor repeats an image as the second frame of its patches;
here patches have one frame, which the tower reads twice.
"""

import math
from typing import NamedTuple, cast

import jax
import numpy as np
from jaxtyping import Array, Float, Int, UInt8
from PIL import Image

from stepprune_jax.models.config import Json, one_of, part, read_fields, size
from stepprune_jax.models.images import (
    RESAMPLE,
    Bytes,
    check_aspect,
    describe_normalisation,
    normalise,
)
from stepprune_jax.models.qwen2_5_vl.config import (
    MOST_PIXELS,
    PatchModelConfig,
    PatchTowerConfig,
)
from stepprune_jax.user_input import require

_KIND = "Qwen2VLImageProcessor"
_ONLY = {
    "kind": one_of(
        "image_processor_type", _KIND, f"{_KIND}Fast", f"{_KIND}Pil", "Qwen2_5_VLImageProcessor"
    ),
    "resize": one_of("do_resize", True),
    "rescale": one_of("do_rescale", True),
    "normalize": one_of("do_normalize", True),
}
# Defaults of the processor's class, which the published files do not rely on.
_AREA = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
# Images are padded to a multiple of this many tokens, whose patches are a block of the tower's
# attention.
BLOCK_TOKENS = 16
# Tokens that images are padded to, multiples of `BLOCK_TOKENS`. Each size is a program of several
# seconds of compilation, and padding costs time: `python -m tools.bench.buckets` counts both.
IMAGE_SIZES = (
    *(16, 48, 160, 320, 608, 960, 1376, 1888),
    *(2496, 3264, 4224, 5504, 7168, 9344, 12288, 16384),
)


class QwenImageSettings(NamedTuple):
    """Settings of the image processor, without those in `PatchModelConfig`."""

    resample: int = 3


class Patches(NamedTuple):
    """Images as patches, padded to one length with zeros.

    Values are bytes until they are normalised, which leaves the padding; they are grouped by merged
    patch in raster order and run over channel, row and column. The grid counts merged patches.
    """

    values: UInt8[Array | np.ndarray, "*i m v"] | Float[Array, "*i m v"] | jax.ShapeDtypeStruct
    grid: Int[Array | np.ndarray, "*i 2"] | jax.ShapeDtypeStruct


def settings_from_hf(raw: Json, where: str) -> QwenImageSettings:
    """Translates a Hugging Face image processor dict of the file `where`."""
    read_fields(raw, where, _ONLY)
    return QwenImageSettings(**read_fields(raw, where, RESAMPLE))


def processor_bounds(vision: PatchTowerConfig, raw: Json, where: str) -> tuple[int, int]:
    """Reads the bounds of an image's area from an image processor dict, and checks its patches."""
    sides = ("patch_size", "temporal_patch_size", "merge_size")
    for side in sides:
        expected = f"{getattr(vision, side)}, the model's"
        rule = one_of(side, getattr(vision, side))._replace(expected=expected)
        read_fields(raw, where, {side: rule})
    edges = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
    outside = {pixels: size(pixels, None, MOST_PIXELS) for pixels in edges}
    bounds = read_fields(raw, where, outside)
    area = read_fields(raw, where, {"size": part("size", _AREA)})["size"]
    # Older versions repeat the bounds in `size`, by their own names.
    others = sorted(area.keys() - {*edges.values()} - {x for x in edges if bounds[x]})
    require(not others, f"{where}: size has {others}, expected {[*edges.values()]}")
    inside = {
        pixels: size(edge, None, MOST_PIXELS)._replace(optional=False)
        for pixels, edge in edges.items()
        if bounds[pixels] is None
    }
    bounds |= read_fields(area, f"{where}: size", inside)
    return bounds["min_pixels"], bounds["max_pixels"]


def to_hf(config: PatchModelConfig, settings: QwenImageSettings, kind: str) -> Json:
    """Describes the image processor of a kind, in the field names of old and new versions."""
    return {
        "image_processor_type": _KIND,
        "processor_class": kind,
        "do_convert_rgb": True,
        "do_resize": True,
        "min_pixels": config.min_pixels,
        "max_pixels": config.max_pixels,
        "size": {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels},
        "resample": settings.resample,
        **describe_normalisation(config.normalisation),
        "patch_size": config.vision.patch_size,
        "temporal_patch_size": config.vision.temporal_patch_size,
        "merge_size": config.vision.merge_size,
    }


def target_size(config: PatchModelConfig, height: int, width: int) -> tuple[int, int]:
    """Returns the (height, width) to which an image is resized, unless it is too narrow.

    Each side is rounded to the nearest multiple of a merged patch, halves to even. If the area is
    then out of bounds, both sides are scaled by one factor to meet the bound, and rounded down or
    up.
    """
    check_aspect(width, height)
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


def resize(config: PatchModelConfig, settings: QwenImageSettings, image: Image.Image) -> Bytes:
    """Returns the bytes of an RGB image at its target size."""
    height, width = target_size(config, image.height, image.width)
    return np.asarray(image.resize((width, height), settings.resample)).transpose(2, 0, 1)


def to_patches(config: PatchModelConfig, image: Bytes) -> Patches:
    """Cuts a resized image into padded patches, without the axis of images."""
    vision = config.vision
    p, k = vision.patch_size, vision.merge_size
    rows, columns = (side // vision.factor for side in image.shape[1:])
    parts = image.reshape(3, rows, k, p, columns, k, p).transpose(1, 4, 2, 5, 0, 3, 6)
    slots = padded_tokens(rows * columns, config.max_image_tokens)
    patches = np.zeros((slots * vision.unit, 3 * p * p), np.uint8)
    filled = patches[: rows * columns * vision.unit].reshape(parts.shape)
    filled[:] = parts
    return Patches(patches, np.array([rows, columns], np.int32))


def normalise_patches(config: PatchModelConfig, pixels: Patches) -> Patches:
    """Normalises images, except their padding."""
    values, grid = (cast(Array, part) for part in pixels)
    *before, m, v = values.shape
    parts = normalise(config.normalisation, values.reshape(*before, m, 3, v // 3), -2)
    real = np.arange(m) < config.vision.unit * grid.prod(-1)[..., None]
    where = parts.__array_namespace__().where
    return Patches(where(real[..., None], parts.reshape(values.shape), 0), grid)


def padded_tokens(count: int, largest: int) -> int:
    """Returns the number of tokens that an image with `count` tokens is padded to.

    The number is the next of `IMAGE_SIZES`, but not above the padded number of the `largest` image:
    `largest` rounded up to one of four numbers per doubling.
    """
    size = next((size for size in IMAGE_SIZES if size >= count), _quarter_step(count))
    return min(size, _quarter_step(largest))


def _quarter_step(count: int) -> int:
    """Rounds up to 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, ...: four sizes per doubling."""
    step = max(BLOCK_TOKENS, 1 << max(0, (count - 1).bit_length() - 3))
    return -(-count // step) * step


def list_pixels(config: PatchModelConfig, width: int, height: int) -> list[Patches]:
    """Lists made-up patches of every padded number; see `Backbone.list_pixels`."""
    vision = config.vision
    rows, columns = (max(1, round(side / vision.factor)) for side in (height, width))
    count = max(1, config.min_pixels // vision.factor**2)
    most = min(config.max_image_tokens, max(rows * columns, config.enlarged_tokens))
    listed = []
    while count <= most:
        padded = padded_tokens(count, config.max_image_tokens)
        values = np.zeros((1, padded * vision.unit, 3 * vision.patch_size**2), np.uint8)
        for tokens in sorted({count, padded}):
            listed.append(Patches(values, np.array([[1, tokens]], np.int32)))
        count = padded + 1
    return listed
