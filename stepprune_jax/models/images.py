"""Image code shared by model families: processor files, pixels of bytes, batches of mixed sizes."""

import math
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float, PyTree, UInt8

from stepprune_jax.data.images import MAX_ASPECT
from stepprune_jax.data.json_files import read_json_object
from stepprune_jax.models.config import FieldRule, Json, number, one_of, part, read_fields
from stepprune_jax.settings import is_number
from stepprune_jax.user_input import require, warn_once

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

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


# How bytes become pixels; the filter is a number of Pillow's.
NORMALISATION = {
    "rescale": number("rescale_factor", 1 / 255),
    "mean": channels("image_mean", CLIP_MEAN),
    "std": channels("image_std", CLIP_STD, 0.0),
    "resample": one_of("resample", 3, 0, 1, 2, 4, 5),
}


def byte_table(
    rescale: float, mean: Sequence[float], std: Sequence[float]
) -> Float[np.ndarray, "3 256"]:
    """Returns the pixel of each byte in each channel."""
    # Scaled in float64 and normalised in float32: the reference's order, to the last bit.
    scaled = (np.arange(256).astype(np.float64) * rescale).astype(np.float32)
    return (scaled - np.asarray(mean, np.float32)[:, None]) / np.asarray(std, np.float32)[:, None]


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
