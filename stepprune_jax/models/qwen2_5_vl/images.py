"""Image processor of the Qwen-VL families: an image becomes patches, at its own size.

An image is resized and cut into patches. Its sides become multiples of a merged patch and its area
is kept within limits. After normalization, every number equals the Pillow image processor of
``transformers`` bit for bit. The processor of ``transformers`` repeats an image as the second frame
of its patches; here patches have one frame, and the tower reads this frame twice.
"""

import math
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8
from PIL import Image

from stepprune_jax.models.config import (
    Json,
    Normalisation,
    choice_rule,
    object_rule,
    read_fields,
    size_rule,
)
from stepprune_jax.models.images import (
    RESAMPLE,
    Bytes,
    check_aspect,
    describe_normalisation,
    normalise,
)
from stepprune_jax.models.qwen2_5_vl.config import (
    PILLOW_MAX_PIXELS,
    PatchModelConfig,
    PatchTowerConfig,
)
from stepprune_jax.user_input import require

_KIND = "Qwen2VLImageProcessor"
_ONLY = {
    "kind": choice_rule(
        "image_processor_type", _KIND, f"{_KIND}Fast", f"{_KIND}Pil", "Qwen2_5_VLImageProcessor"
    ),
    "resize": choice_rule("do_resize", True),
    "rescale": choice_rule("do_rescale", True),
    "normalize": choice_rule("do_normalize", True),
}
# Defaults of the processor's class. The published files do not rely on these defaults.
_DEFAULT_AREA = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
# Images are padded to a multiple of this number of tokens. Their 64 patches are one block of the
# tower's attention within windows.
BLOCK_TOKENS = 16
# Padded numbers of tokens of images, multiples of `BLOCK_TOKENS`. Each size costs seconds of
# compilation, and fewer sizes cost padding: `python -m tools.bench.buckets` measures both.
IMAGE_SIZES = (
    *(16, 48, 160, 320, 608, 960, 1376, 1888),
    *(2496, 3264, 4224, 5504, 7168, 9344, 12288, 16384),
)


class VideoSettings(NamedTuple):
    """Settings of the video processor; see `videos.read_settings`.

    Attributes:
        min_pixels: smallest area in pixels: of a resized frame for Qwen2.5-VL, of all frames
            together for Qwen3-VL.
        max_pixels: largest area in pixels.
        fps: number of frames to sample per second.
        min_frames: smallest number of frames to sample at a rate.
        max_frames: largest number of frames to sample at a rate.
    """

    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 768 * 28 * 28
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768


class QwenImageSettings(NamedTuple):
    """Settings of the image processor that are not in `PatchModelConfig`.

    Attributes:
        resample: number of a Pillow resampling filter.
        video: settings of the video processor.
    """

    resample: int = 3
    video: VideoSettings = VideoSettings()


class Patches(NamedTuple):
    """Images as patches; the `Pixels` of the Qwen-VL families.

    Attributes:
        values: [i, m, v] values of the patches: bytes, or float32 after normalization. The patches
            of a merged patch are consecutive, and merged patches have raster order. The v values of
            a patch run over (channel, row, column), or over (frame, channel, row, column) in a
            batch with videos. Images are padded with zeros to m patches.
        grid: [i, 2] rows and columns of merged patches. A temporal patch of a video is one row i.
        of_video: [i] True = temporal patch of a video, whose bytes `transformers` normalizes with
            other roundings; None without videos.
    """

    values: UInt8[Array | np.ndarray, "*i m v"] | Float[Array, "*i m v"] | jax.ShapeDtypeStruct
    grid: Int[Array | np.ndarray, "*i 2"] | jax.ShapeDtypeStruct
    of_video: Bool[Array | np.ndarray, "*i"] | jax.ShapeDtypeStruct | None = None


def settings_from_hf(raw: Json, where: str) -> QwenImageSettings:
    """Translates the JSON object of a Hugging Face image processor.

    Args:
        raw: the parsed JSON object.
        where: its file, for error messages.

    Raises:
        ValueError: the kind of the processor or a field is not supported.
    """
    read_fields(raw, where, _ONLY)
    return QwenImageSettings(**read_fields(raw, where, RESAMPLE))


def read_area_bounds(vision: PatchTowerConfig, raw: Json, where: str) -> tuple[int, int]:
    """Reads the limits of an image's area from an image processor, and checks its patch sizes.

    Args:
        vision: shape of the tower.
        raw: the parsed JSON object of the image processor.
        where: its file, for error messages.

    Returns:
        The smallest and the largest area in pixels.

    Raises:
        ValueError: the limits are invalid, or the patches are not the patches of the model.
    """
    for field in ("patch_size", "temporal_patch_size", "merge_size"):
        expected = f"{getattr(vision, field)}, the model's"
        rule = choice_rule(field, getattr(vision, field))._replace(expected=expected)
        read_fields(raw, where, {field: rule})
    # The limits are fields of the processor, or entries of its field `size`, by other names.
    entry_names = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
    field_rules = {name: size_rule(name, None, PILLOW_MAX_PIXELS) for name in entry_names}
    bounds = read_fields(raw, where, field_rules)
    area = read_fields(raw, where, {"size": object_rule("size", _DEFAULT_AREA)})["size"]
    # Older versions repeat the fields of the processor in `size`.
    repeated = {name for name in entry_names if bounds[name]}
    unknown = sorted(area.keys() - {*entry_names.values()} - repeated)
    require(not unknown, f"{where}: size has {unknown}, expected {[*entry_names.values()]}")
    entry_rules = {
        name: size_rule(entry, None, PILLOW_MAX_PIXELS)._replace(optional=False)
        for name, entry in entry_names.items()
        if bounds[name] is None
    }
    bounds |= read_fields(area, f"{where}: size", entry_rules)
    return bounds["min_pixels"], bounds["max_pixels"]


def to_hf(config: PatchModelConfig, settings: QwenImageSettings, processor_class: str) -> Json:
    """Returns the JSON fields of the image processor, by the names of old and new versions.

    Args:
        config: configuration of the model.
        settings: settings of the image processor.
        processor_class: name of the processor's class in `transformers`.
    """
    return {
        "image_processor_type": _KIND,
        "processor_class": processor_class,
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
    """Returns the (height, width) of a resized image.

    Each side is rounded to the nearest multiple of a merged patch; ties go to the even multiple. If
    the area is then outside the model's limits, both sides of the image are scaled by one factor to
    meet the limit. They are rounded down to meet the upper limit, and up to meet the lower limit.

    Args:
        config: the model's configuration, with the limits of the area.
        height: height of the image in pixels.
        width: width of the image in pixels.

    Raises:
        ValueError: the image is too narrow.
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
    """Resizes an RGB image to its target size; returns its bytes."""
    height, width = target_size(config, image.height, image.width)
    return np.asarray(image.resize((width, height), settings.resample)).transpose(2, 0, 1)


def to_patches(config: PatchModelConfig, image: Bytes, max_tokens: int | None = None) -> Patches:
    """Cuts a resized image into patches and pads them; the result has no axis of images.

    Args:
        config: the model's configuration.
        image: [3, height, width] bytes. The sides are multiples of a merged patch, which is a
            square of k x k patches of p x p pixels.
        max_tokens: number of tokens of the largest image; None for `config.max_image_tokens`.

    Returns:
        The patches of the image, padded to one of few numbers of patches.
    """
    vision = config.vision
    p, k = vision.patch_size, vision.merge_size
    rows, columns = (side // vision.factor for side in image.shape[1:])  # of merged patches
    # The axes become (row and column of the merged patch, row and column of the patch in it,
    # channel, row and column of the pixel).
    patches = image.reshape(3, rows, k, p, columns, k, p).transpose(1, 4, 2, 5, 0, 3, 6)
    num_slots = num_padded_tokens(rows * columns, max_tokens or config.max_image_tokens)
    values = np.zeros((num_slots * vision.unit, 3 * p * p), np.uint8)
    image_values = values[: rows * columns * vision.unit].reshape(patches.shape)
    image_values[:] = patches  # writes to a view of `values`
    return Patches(values, np.array([rows, columns], np.int32))


def normalise_patches(config: PatchModelConfig, pixels: Patches) -> Patches:
    """Normalises the bytes of images to float32; padding remains 0."""
    values, grid = (cast(Array, leaf) for leaf in pixels[:2])
    *leading, m, v = values.shape
    num_values = config.vision.patch_size**2  # of a channel of one frame of a patch
    by_channel = values.reshape(*leading, m, v // (3 * num_values), 3, num_values)
    normalised = normalise(config.normalisation, by_channel, -2)
    where = normalised.__array_namespace__().where
    if pixels.of_video is not None:
        of_video = cast(Array, pixels.of_video)[..., None, None, None, None]
        fused = normalise_like_torch(config.normalisation, by_channel)
        normalised = where(of_video, fused, normalised)
    is_patch = np.arange(m) < config.vision.unit * grid.prod(-1)[..., None]
    return pixels._replace(values=where(is_patch[..., None], normalised.reshape(values.shape), 0))


def normalise_like_torch(
    normalisation: Normalisation, values: UInt8[Array | np.ndarray, "*b 3 v"]
) -> Float[Array | np.ndarray, "*b 3 v"]:
    """Normalises bytes of videos: (byte - mean / rescale) / (std / rescale), all in float32.

    Args:
        normalisation: constants for each color channel.
        values: [..., 3, v] bytes.
    """
    inverse_rescale = np.float32(1 / np.asarray(normalisation.rescale))
    mean, std = (
        (np.asarray(constant, np.float32) * inverse_rescale)[:, None]
        for constant in (normalisation.mean, normalisation.std)
    )
    if isinstance(values, np.ndarray):
        return (values.astype(np.float32) - mean) / std
    # XLA on a CPU may multiply by the reciprocal of a constant, so the program reads a table.
    table = ((np.arange(256, dtype=np.float32) - mean) / std).ravel()

    def look_up(values: Array) -> Array:
        channel_offset = 256 * np.arange(3, dtype=np.int32)[:, None]
        return jnp.take(table, values + channel_offset, mode="clip")

    def compute(values: Array) -> Array:
        return (values.astype(np.float32) - mean) * (1 / std)

    return jax.lax.platform_dependent(values, cpu=look_up, default=compute)


def num_padded_tokens(num_tokens: int, max_tokens: int) -> int:
    """Returns the padded number of tokens of an image with `num_tokens` tokens.

    This is the next of `IMAGE_SIZES`, but at most `max_tokens` rounded up to one of four numbers
    per doubling.

    Args:
        num_tokens: number of tokens of the image.
        max_tokens: number of tokens of the largest image.
    """
    size = next((size for size in IMAGE_SIZES if size >= num_tokens), _round_up(num_tokens))
    return min(size, _round_up(max_tokens))


def _round_up(count: int) -> int:
    """Rounds up to 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, and so on: four per doubling."""
    # Numbers in (2^(b - 1), 2^b] have the step 2^(b - 3), a quarter of the interval.
    step = max(BLOCK_TOKENS, 1 << max(0, (count - 1).bit_length() - 3))
    return -(-count // step) * step


def list_example_pixels(config: PatchModelConfig, width: int, height: int) -> list[Patches]:
    """Lists artificial images of every padded number of tokens; warm-up compiles for them.

    Args:
        config: the model's configuration.
        width: width of the largest image in pixels.
        height: height of the largest image in pixels.

    Returns:
        One or two images for each padded number of tokens: with the fewest tokens that are padded
        to it, and without padding.
    """
    vision = config.vision
    rows, columns = (max(1, round(side / vision.factor)) for side in (height, width))
    min_tokens = max(1, config.min_pixels // vision.factor**2)
    max_tokens = min(config.max_image_tokens, max(rows * columns, config.max_enlarged_tokens))
    examples = []
    while min_tokens <= max_tokens:
        num_slots = num_padded_tokens(min_tokens, config.max_image_tokens)
        values = np.zeros((1, num_slots * vision.unit, 3 * vision.patch_size**2), np.uint8)
        for num_tokens in sorted({min_tokens, num_slots}):
            examples.append(Patches(values, np.array([[1, num_tokens]], np.int32)))
        min_tokens = num_slots + 1  # the fewest tokens of the next padded number
    return examples
