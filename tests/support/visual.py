"""Random images, and pixels and visual tokens for models of the LLaVA family."""

import jax.numpy as jnp
import numpy as np
from PIL import ExifTags, Image

from stepprune_jax.models.config import Normalisation
from stepprune_jax.models.images import normalise
from stepprune_jax.models.llava.images import LlavaImageSettings, resize
from stepprune_jax.models.sequence import Kept


def noise(seed, size=(24, 24)):
    """Returns an image of random pixels; `size` is (rows, columns)."""
    return Image.fromarray(random_bytes(seed, *size, 3))


def random_bytes(seed, *shape):
    """Returns random bytes, such as the pixels of an image processor."""
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def as_a_phone_stores(image):
    """Returns the image rotated by 90 degrees, with the EXIF orientation that rotates it back."""
    stored = image.transpose(Image.Transpose.ROTATE_90)
    stored.getexif()[ExifTags.Base.Orientation] = 6
    return stored


def preprocess_clip(
    image,
    settings=LlavaImageSettings(),  # noqa: B008  it is frozen
    normalisation=Normalisation(),  # noqa: B008
):
    """Returns the normalized pixels [3, height, width] of an RGB image, as input of CLIP."""
    return normalise(normalisation, resize(image, settings, normalisation), -3)


def visual_of(config, tokens, index=None, valid=None):
    """Returns tokens [b, j, k, e] of images of one grid as `Kept`, and the grid of each image.

    The tokens have the indices `index` in their images, by default 0 to k - 1.
    """
    b, j, k = tokens.shape[:3]
    index = jnp.arange(k, dtype=jnp.int32) if index is None else jnp.asarray(index, jnp.int32)
    index = jnp.broadcast_to(index, (b, j, k))
    valid = jnp.ones((b, j, k), bool) if valid is None else jnp.asarray(valid)
    grid = jnp.broadcast_to(jnp.array(config.grid, jnp.int32), (b, j, 2))
    return kept_at(jnp.asarray(tokens), valid, index), grid


def kept_at(tokens, valid, index):
    """Returns tokens [b, j, k, e] as `Kept`, with the position ids of their own indices."""
    return Kept(index, index, tokens, valid, valid.sum(-1))
