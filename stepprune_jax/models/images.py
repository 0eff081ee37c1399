"""Image code shared by model families: processor files, cached bytes, batches of mixed sizes."""

import abc
import collections
import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt8
from PIL import Image

from stepprune_jax.data.json_files import read_json_object
from stepprune_jax.models.config import checked
from stepprune_jax.settings import is_number
from stepprune_jax.user_input import user_input

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def read_processor(folder: str | Path) -> tuple[dict[str, Any], str]:
    """Reads the image processor of a checkpoint folder.

    Args:
        folder: folder with ``preprocessor_config.json``, or with a ``processor_config.json`` that
            has an ``image_processor`` entry (as newer `transformers` write it).

    Returns:
        The image processor's JSON object, and the file it is from.

    Raises:
        FileNotFoundError: neither file exists.
        ValueError: a file is not a JSON object.
    """
    folder = Path(folder)
    path = folder / "preprocessor_config.json"
    if path.is_file():
        return read_json_object(path), str(path)
    path = folder / "processor_config.json"
    if path.is_file():
        processor = read_json_object(path).get("image_processor")
        if isinstance(processor, dict):
            return processor, str(path)
    raise FileNotFoundError(
        f"{folder} has no preprocessor_config.json (nor a processor_config.json with an "
        "image_processor entry), which defines how images are resized and normalised"
    )


def read_channels(
    config: dict[str, Any], field: str, default: tuple[float, ...], above: float | int, source: str
) -> tuple[float, ...]:
    """Reads a field of an image processor that must be three finite numbers above a limit."""
    values = config.get(field, default)
    good = isinstance(values, list | tuple) and len(values) == 3
    if not (good and all(is_number(value) and value > above for value in values)):
        limit = "" if above == -math.inf else f" above {above}"
        raise ValueError(f"{source}: {field} is {values!r}, expected three finite numbers{limit}")
    return tuple(map(float, values))


def read_filter(config: dict[str, Any], source: str) -> int:
    """Reads the number of the Pillow filter that an image processor resizes with."""
    filters = tuple(sorted(map(int, Image.Resampling)))
    return int(checked(config, "resample", int(Image.Resampling.BICUBIC), filters, source))


@contextlib.contextmanager
def naming(image: str) -> Iterator[None]:
    """Puts the name of an image in front of errors about it, unless they have it already.

    Args:
        image: its file, or another name by which a user finds it.

    Raises:
        ValueError: one was raised inside.
    """
    try:
        yield
    except ValueError as error:
        if str(error).startswith(image):
            raise
        raise ValueError(f"{image}: {error}") from error


class ByteCache(abc.ABC):
    """A cache of resized images by path, stored as bytes.

    Image processors resample to bytes and then scale and normalise each of them separately. So
    bytes are cached, which take a quarter of the memory of the resulting pixels. May be used by
    several threads.
    """

    def __init__(self, limit_bytes: int):
        """Starts empty.

        Args:
            limit_bytes: size of the cache; the least recently used images are dropped.
        """
        self._limit = limit_bytes
        self._clear()

    def __getstate__(self):
        # Another process begins with an empty cache and its own lock.
        own = ("_kept", "_size", "_lock")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state):
        vars(self).update(state)
        self._clear()

    def _clear(self):
        self._kept: collections.OrderedDict[Path, np.ndarray] = collections.OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    @abc.abstractmethod
    def _decode(self, path: Path) -> UInt8[np.ndarray, "3 height width"]:
        """Decodes and resizes an image."""

    def _bytes(self, path: Path) -> UInt8[np.ndarray, "3 height width"]:
        """Returns a cached image, or decodes it."""
        with self._lock:
            pixels = self._kept.get(path)
            if pixels is not None:
                self._kept.move_to_end(path)
        if pixels is None:
            # Images are read while training continues.
            with user_input(), naming(str(path)):
                pixels = self._decode(path)
            self._keep(path, pixels)
        return pixels

    def _keep(self, path: Path, pixels: np.ndarray):
        with self._lock:
            if path not in self._kept:
                self._kept[path] = pixels
                self._size += pixels.nbytes
            while self._size > self._limit and self._kept:
                self._size -= self._kept.popitem(last=False)[1].nbytes


def join_images(parts: Sequence[Any]) -> Any:
    """Joins arrays of images whose sizes may differ, padded with zeros to the largest.

    Args:
        parts: trees of equal structure of arrays [i, ...]; i may differ, too.

    Returns:
        A tree of arrays [sum of i, ...].
    """
    return jax.tree.map(lambda *arrays: _concatenate(arrays), *parts)


def stack_images(parts: Sequence[Any]) -> Any:
    """Stacks images, which may differ in size; as `join_images`, without their first axis."""
    return join_images([jax.tree.map(lambda array: array[None], part) for part in parts])


def _concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates along the first axis, padding the others at their ends."""
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
