"""Image code shared by model families: processor files, normalisation, batches of mixed sizes."""

import math
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Float, PyTree, UInt8

from stepprune_jax.data.images import MAX_ASPECT
from stepprune_jax.data.json_files import read_json_object
from stepprune_jax.models.config import (
    FieldRule,
    Json,
    Normalisation,
    number,
    one_of,
    part,
    read_fields,
    written,
)
from stepprune_jax.settings import is_number
from stepprune_jax.user_input import require, warn_once

PROCESSOR_FILE = "processor_config.json"
_ENTRY = part("image_processor")._replace(optional=True)

Pixels = PyTree  # arrays with a leading axis of images, of a type that only their family reads
Bytes = UInt8[np.ndarray, "3 height width"]  # a resized image
Resized = PyTree  # what an image is resized to: Bytes, or what else only its family reads


def read_processor(folder: str | Path) -> tuple[Json, str]:
    """Returns the image processor's JSON object of a checkpoint folder, and the file it is from.

    It is the ``image_processor`` entry of ``processor_config.json``, which newer `transformers`
    write, or else ``preprocessor_config.json``. A folder that was saved over an older one has both.
    """
    newer, older = Path(folder, PROCESSOR_FILE), Path(folder, "preprocessor_config.json")
    raw = read_json_object(newer) if newer.is_file() else {}
    entry = read_fields(raw, str(newer), {"entry": _ENTRY})["entry"]
    older_raw = read_json_object(older) if older.is_file() else {}
    if entry is None and older.is_file():
        return older_raw, str(older)
    if entry is None:
        raise FileNotFoundError(
            f"{folder} has no preprocessor_config.json (nor a processor_config.json with an "
            "image_processor entry), which defines how images are resized and normalised"
        )
    both = (entry.keys() & older_raw.keys()) - {"image_processor_type"}  # classes of one processor
    other = ", ".join(sorted(name for name in both if entry[name] != older_raw[name]))
    if other:
        warn_once(f"{older} is not read: image_processor of {newer} has another {other}")
    return entry, str(newer)


def channels(field: str, default: tuple[float, ...], above: float = -math.inf) -> FieldRule:
    """Three finite numbers above a limit."""

    def read(value: object) -> tuple[float, ...] | None:
        given = value if isinstance(value, list | tuple) else ()
        numbers = tuple(float(x) for x in given if is_number(x) and x > above)
        return numbers if len(numbers) == len(given) == 3 else None

    return FieldRule(field, default, read, "three finite numbers" + " above 0" * (above == 0))


RESAMPLE = {"resample": one_of("resample", 3, 0, 1, 2, 4, 5)}  # the number of a Pillow filter
_NORMALISATION = {
    "rescale": number("rescale_factor", Normalisation().rescale),
    "mean": channels("image_mean", Normalisation().mean),
    "std": channels("image_std", Normalisation().std, 0.0),
}


def read_normalisation(folder: str | Path) -> Normalisation:
    """Reads how the image processor of a folder normalises bytes.

    Raises:
        FileNotFoundError: the folder has no image processor file.
        ValueError: a field does not fit.
    """
    return Normalisation(**read_fields(*read_processor(folder), _NORMALISATION))


def describe_normalisation(normalisation: Normalisation) -> Json:
    """Returns the fields of an image processor that rescales and normalises."""
    return {"do_rescale": True, "do_normalize": True, **written(normalisation, _NORMALISATION)}


def normalise(
    normalisation: Normalisation, values: UInt8[Array | np.ndarray, "*b"], axis: int
) -> Float[Array | np.ndarray, "*b"]:
    """Normalises bytes to float32, on the host or in a program; `axis` < 0 is that of channels."""
    # Scaled in float64 and normalised in float32: the reference's order, to the last bit.
    rescale, mean, std = (np.asarray(x)[..., None] for x in normalisation)
    scaled = (np.arange(256) * rescale).astype(np.float32)
    table = (scaled - mean.astype(np.float32)) / std.astype(np.float32)
    by_channel = (3, *[1] * (-1 - axis))

    def look_up(values: Array | np.ndarray) -> Array | np.ndarray:
        channel = 256 * np.arange(3, dtype=np.int32).reshape(by_channel)
        return values.__array_namespace__().take(table.ravel(), values + channel, mode="clip")

    def compute(values: Array) -> Array:
        slope, offset = (rescale / std).reshape(-1), (mean / std).reshape(-1)
        slope, offset = (x.astype(np.float32).reshape(by_channel) for x in (slope, offset))
        return values.astype(np.float32) * slope - offset

    if isinstance(values, np.ndarray):
        return look_up(values)
    # XLA multiplies by a constant's reciprocal where the host divides, so programs of CPUs have the
    # table, too. Accelerators, which gather slowly, are some last bits away from it.
    return jax.lax.platform_dependent(values, cpu=look_up, default=compute)


def check_aspect(width: int, height: int) -> None:
    """Refuses an image that would be much longer than wide after it is resized."""
    most = MAX_ASPECT * min(height, width)
    message = f"expected sides of at most {MAX_ASPECT} to 1"
    narrow = f"an image of {width} x {height} pixels is too narrow: {message}"
    require(max(height, width) <= most, narrow)


def join_images(parts: Sequence[Pixels]) -> Pixels:
    """Joins arrays [i, ...] of images whose sizes may differ, padded with zeros to the largest."""
    return jax.tree.map(lambda *arrays: _concatenate(arrays), *parts)


def stack_images(parts: Sequence[Pixels]) -> Pixels:
    """Stacks images, which may differ in size; as `join_images`, without their first axis."""
    return join_images([jax.tree.map(lambda array: array[None], part) for part in parts])


def _concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    shape = np.max([array.shape[1:] for array in arrays], axis=0, initial=0).astype(int)
    if all(array.shape[1:] == tuple(shape) for array in arrays):
        return np.concatenate(arrays)
    joined = np.zeros((sum(map(len, arrays)), *shape), arrays[0].dtype)
    first = 0
    for array in arrays:
        inner = tuple(map(slice, array.shape[1:]))
        joined[(slice(first, first + len(array)), *inner)] = array
        first += len(array)
    return joined
