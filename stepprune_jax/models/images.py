"""Image code shared by the model families: processor files, normalization, mixed-size batches."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, PyTree, UInt8

from stepprune_jax.data.images import MAX_ASPECT
from stepprune_jax.data.json_files import read_json_object
from stepprune_jax.models.config import (
    FieldRule,
    Json,
    Normalisation,
    choice_rule,
    number_rule,
    object_rule,
    read_fields,
    write_fields,
)
from stepprune_jax.settings import is_number
from stepprune_jax.user_input import require, warn_once

PROCESSOR_FILE = "processor_config.json"
_ENTRY = object_rule("image_processor")._replace(optional=True)

# Arrays with a leading axis of images. Each family defines its own type.
Pixels = PyTree
Bytes = UInt8[np.ndarray, "3 height width"]  # a resized image
# One resized image: `Bytes`, or a type that only the family reads.
Resized = PyTree


class Clip(NamedTuple):
    """The sampled frames of a video, as the tower of a family reads them.

    Attributes:
        pixels: [t, ...] the t temporal patches. Each is one row of the tower's input, as an image.
        times: time of each temporal patch in seconds.
        interval: float32 number of temporal position ids between two temporal patches.
    """

    pixels: Pixels
    times: tuple[float, ...]
    interval: float


def read_processor(folder: str | Path) -> tuple[Json, str]:
    """Reads the image processor of a checkpoint folder.

    Newer versions of `transformers` write it as the entry ``image_processor`` of
    ``processor_config.json``; older versions write ``preprocessor_config.json``. A folder that was
    saved over an older one contains both files. The newer file then takes precedence.

    Returns:
        The JSON object of the image processor, and the path of its file.

    Raises:
        FileNotFoundError: the folder has no image processor.
    """
    newer, older = Path(folder, PROCESSOR_FILE), Path(folder, "preprocessor_config.json")
    newer_raw = read_json_object(newer) if newer.is_file() else {}
    entry = read_fields(newer_raw, str(newer), {"entry": _ENTRY})["entry"]
    older_raw = read_json_object(older) if older.is_file() else {}
    if entry is None and older.is_file():
        return older_raw, str(older)
    if entry is None:
        raise FileNotFoundError(
            f"{folder} has no preprocessor_config.json (nor a processor_config.json with an "
            "image_processor entry), which defines how images are resized and normalised"
        )
    # The same processor has class names that differ between versions.
    shared_fields = (entry.keys() & older_raw.keys()) - {"image_processor_type"}
    conflicts = ", ".join(sorted(name for name in shared_fields if entry[name] != older_raw[name]))
    if conflicts:
        warn_once(f"{older} is not read: image_processor of {newer} has another {conflicts}")
    return entry, str(newer)


def channels_rule(field: str, default: tuple[float, ...], above: float = -math.inf) -> FieldRule:
    """Returns the rule for three finite numbers, one per color channel, greater than `above`."""

    def read(value: object) -> tuple[float, ...] | None:
        entries = value if isinstance(value, list | tuple) else ()
        numbers = tuple(float(entry) for entry in entries if is_number(entry) and entry > above)
        return numbers if len(numbers) == len(entries) == 3 else None

    return FieldRule(field, default, read, "three finite numbers" + " above 0" * (above == 0))


RESAMPLE = {"resample": choice_rule("resample", 3, 0, 1, 2, 4, 5)}  # the number of a Pillow filter
_NORMALISATION = {
    "rescale": number_rule("rescale_factor", Normalisation().rescale),
    "mean": channels_rule("image_mean", Normalisation().mean),
    "std": channels_rule("image_std", Normalisation().std, 0.0),
}


def read_normalisation(folder: str | Path) -> Normalisation:
    """Reads the byte normalization from the image processor of a checkpoint folder.

    Raises:
        FileNotFoundError: the folder has no image processor file.
        ValueError: a field of the image processor is invalid.
    """
    return Normalisation(**read_fields(*read_processor(folder), _NORMALISATION))


def describe_normalisation(normalisation: Normalisation) -> Json:
    """Returns the image processor's JSON fields for a normalization."""
    fields = write_fields(normalisation, _NORMALISATION)
    return {"do_rescale": True, "do_normalize": True, **fields}


def normalise(
    normalisation: Normalisation, values: UInt8[Array | np.ndarray, "*b"], axis: int
) -> Float[Array | np.ndarray, "*b"]:
    """Normalises bytes: (byte * rescale - mean) / std.

    Numpy arrays are normalized on the host, jax arrays in the program. Results on the host and on a
    CPU equal `transformers` in every bit; results on an accelerator may differ in the last bits.

    Args:
        normalisation: constants for each color channel.
        values: uint8 bytes; `axis` has length 3.
        axis: axis of the color channels, as a negative number.

    Returns:
        float32 values of the same shape.
    """
    # `transformers` scales in float64 and normalizes in float32; this order gives the same bits.
    rescale, mean, std = (np.asarray(constant)[..., None] for constant in normalisation)
    scaled = (np.arange(256) * rescale).astype(np.float32)
    table = (scaled - mean.astype(np.float32)) / std.astype(np.float32)
    channel_shape = (3, *[1] * (-1 - axis))

    def look_up(values: Array | np.ndarray) -> Array | np.ndarray:
        channel_offset = 256 * np.arange(3, dtype=np.int32).reshape(channel_shape)
        numpy_api = values.__array_namespace__()
        return numpy_api.take(table.ravel(), values + channel_offset, mode="clip")

    def compute(values: Array) -> Array:
        slope, offset = (rescale / std).reshape(-1), (mean / std).reshape(-1)
        slope = slope.astype(np.float32).reshape(channel_shape)
        offset = offset.astype(np.float32).reshape(channel_shape)
        return values.astype(np.float32) * slope - offset

    if isinstance(values, np.ndarray):
        return look_up(values)
    # XLA multiplies by the reciprocal of a constant where the host divides, so programs on a CPU
    # read the table. Accelerators gather slowly and compute the values instead.
    return jax.lax.platform_dependent(values, cpu=look_up, default=compute)


def check_aspect(width: int, height: int) -> None:
    """Raises a ValueError if an image has a side ratio above `MAX_ASPECT`."""
    message = f"expected sides of at most {MAX_ASPECT} to 1"
    too_narrow = f"an image of {width} x {height} pixels is too narrow: {message}"
    require(max(height, width) <= MAX_ASPECT * min(height, width), too_narrow)


def join_images(parts: Sequence[Pixels]) -> Pixels:
    """Concatenates pixels along the axis of images.

    Images may differ in size. Smaller images are padded with zeros to the largest size.
    """
    return jax.tree.map(lambda *arrays: _concatenate_padded(arrays), *parts)


def stack_images(images: Sequence[Pixels]) -> Pixels:
    """Stacks pixels without the axis of images along a new leading axis; pads as `join_images`."""
    return join_images([jax.tree.map(lambda array: array[None], image) for image in images])


def _concatenate_padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates arrays [i, ...], padded with zeros to the largest trailing shape."""
    shape = np.max([array.shape[1:] for array in arrays], axis=0, initial=0).astype(int)
    if all(array.shape[1:] == tuple(shape) for array in arrays):
        return np.concatenate(arrays)
    num_images = sum(map(len, arrays))
    joined = np.zeros((num_images, *shape), arrays[0].dtype)
    first_image = 0
    for array in arrays:
        # The array fills the corner at the start of all trailing axes.
        image_slice = slice(first_image, first_image + len(array))
        joined[(image_slice, *map(slice, array.shape[1:]))] = array
        first_image += len(array)
    return joined
