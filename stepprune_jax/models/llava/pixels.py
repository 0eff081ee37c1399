"""Pixels of a data set's images, each decoded once as long as memory lasts."""

from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from stepprune_jax.data.images import open_image
from stepprune_jax.models.images import ByteCache
from stepprune_jax.models.llava.config import LlavaConfig
from stepprune_jax.models.llava.images import ImageSettings, preprocess_clip


class PixelCache(ByteCache):
    """Preprocessed images by path.

    A table of 256 numbers per channel maps cached bytes to exactly the pixels of `preprocess_clip`.
    """

    def __init__(self, settings: ImageSettings, side: int, limit_bytes: int):
        """Starts empty.

        Args:
            settings: settings of the model's image processor.
            side: height and width that the model takes.
            limit_bytes: size of the cache; the least recently used images are dropped.
        """
        super().__init__(limit_bytes)
        # The mean is kept: it is the colour of the padding.
        self._bytes_only = settings._replace(rescale=None, std=None)
        self._table = _table(settings)
        self._side = side

    def __call__(self, path: Path) -> Float[np.ndarray, "3 H W"]:
        """Returns the pixels of an image.

        Args:
            path: the file.

        Returns:
            float32 `[3, side, side]`, normalised, equal to `preprocess_clip` of it.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: not an image, a damaged one, or one that the settings give another size.
        """
        channels = zip(self._table, self._bytes(path), strict=True)
        return np.stack([row[channel] for row, channel in channels])

    def _decode(self, path: Path) -> UInt8[np.ndarray, "3 H W"]:
        pixels = preprocess_clip(open_image(path), self._bytes_only)
        if pixels.shape[1:] != (self._side, self._side):
            raise ValueError(
                f"the image processor makes {pixels.shape[1]} x {pixels.shape[2]} pixels, "
                f"the model takes {self._side} x {self._side}: crop_size of "
                "preprocessor_config.json is wrong"
            )
        return pixels.astype(np.uint8)


def pixel_cache(config: LlavaConfig, settings: ImageSettings, limit_bytes: int) -> PixelCache:
    """Returns a cache of preprocessed image files.

    Args:
        config: the model's configuration.
        settings: the processor's settings.
        limit_bytes: size of the cache; the least recently used images are dropped.
    """
    return PixelCache(settings, config.vision.image_size, limit_bytes)


def max_pixels(config: LlavaConfig, count: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of the pixels of `count` images."""
    side = config.vision.image_size
    return jax.ShapeDtypeStruct((count, 3, side, side), np.float32)


def _table(settings: ImageSettings) -> Float[np.ndarray, "3 256"]:
    """Returns the value of each byte in each channel after the processor."""
    ramp = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2)
    same_size = settings._replace(pad_to_square=False, resize_to=None, crop_to=None)
    return preprocess_clip(Image.fromarray(ramp), same_size).reshape(3, 256)
