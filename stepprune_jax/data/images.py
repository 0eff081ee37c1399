"""Image files, opened safely and converted to RGB, and padded to squares."""

import io
import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, UnidentifiedImageError

# Squares with more pixels are resampled in strips: a 20,000 x 10 image would need 1.2 GB as one.
STRIP_PIXELS = 1 << 24
_STRIP_ROWS = 256
# Longest side of an image in pixels. Time grows with its square: padded to a square and resized, a
# single column of 32,767 pixels takes 5 seconds, one of twice as many 22.
LONGEST_SIDE = 32_767
# Largest ratio of the longer side to the shorter one that Qwen2.5-VL takes.
MAX_ASPECT = 200
# Tags of a TIFF.
_LEAST_VALUE, _LARGEST_VALUE = 340, 341


def open_image(source: str | Path | bytes | Image.Image) -> Image.Image:
    """Opens an image, a file or the bytes of one, and converts it to RGB.

    Alpha is dropped (not blended), palettes are resolved, CMYK is converted by Pillow, 16-bit grey
    keeps its upper eight bits, 32-bit grey is scaled by the range that a TIFF declares or has to be
    within 0 to 255, an animation gives its first frame. The EXIF orientation is not applied, as in
    the reference programs.
    """
    if not isinstance(source, (str, Path, bytes, Image.Image)):
        raise TypeError(f"expected a path, bytes or a Pillow image, got {type(source).__name__}")
    if isinstance(source, bytes):
        source, name = io.BytesIO(source), "the image"
    elif isinstance(source, Image.Image):
        name = repr(source)
    else:
        name = str(source)
        if not Path(source).is_file():
            raise FileNotFoundError(f"no image file at {name}")
    try:
        with warnings.catch_warnings():
            # Pillow warns above 89 Mpixel and raises above 179; large is fine, a bomb is not.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            if isinstance(source, Image.Image):
                return _to_rgb(source)
            with Image.open(source) as image:
                return _to_rgb(image)
    except Exception as error:  # Pillow's decoders may raise any kind
        raise ValueError(f"{name} {_problem(error)}") from error


class _RefusedError(ValueError):
    """An image that is intact, but not supported."""


def _problem(error: Exception) -> str:
    """Describes why an image cannot be opened."""
    reason = " ".join(str(error).split()) or type(error).__name__
    bomb = (
        f"unpacks to more pixels than Pillow allows ({reason}). A small file that grows to "
        "gigabytes can be an attack; if you trust it, raise PIL.Image.MAX_IMAGE_PIXELS"
    )
    known = {
        _RefusedError: reason,
        Image.DecompressionBombError: bomb,
        UnidentifiedImageError: "is not an image in a format that Pillow reads",
        MemoryError: "needs more memory than is available",
    }
    return next(
        (text for kind, text in known.items() if isinstance(error, kind)),
        f"is a damaged image: {reason}",
    )


def _to_rgb(image: Image.Image) -> Image.Image:
    """Decodes and converts to RGB."""
    if not 1 <= min(image.size) <= max(image.size) <= LONGEST_SIDE:
        raise _RefusedError(
            f"has {image.width} x {image.height} pixels, expected sides of 1 to {LONGEST_SIDE}"
        )
    image.load()
    if image.mode.startswith("I;16"):
        # Pillow would clip at 255 and turn nearly every 16-bit image white.
        order = ">u2" if image.mode.endswith("B") else "<u2"
        values = np.frombuffer(image.tobytes(), order).reshape(image.height, image.width)
        image = Image.fromarray((values >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        image = Image.fromarray(_grey_levels(image))
    if image.mode == "P" and "transparency" in image.info:
        # The same colours as a direct conversion, without Pillow's warning on byte transparency.
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def _grey_levels(image: Image.Image) -> UInt8[np.ndarray, "h w"]:
    """Converts 32-bit values to grey levels: 0 to 255 unchanged, others by a TIFF's range.

    Pillow would clip them: an image of 0 to 1 would be black, and one of large values white.
    """
    rows = max(1, STRIP_PIXELS // image.width)  # at a time: a number here takes eight bytes
    parts = [(0, y, image.width, min(y + rows, image.height)) for y in range(0, image.height, rows)]

    def strips() -> Iterator[np.ndarray]:
        return (np.asarray(image.crop(part), np.float64) for part in parts)

    ends = np.array([(strip.min(), strip.max()) for strip in strips()])
    low, high = float(ends[:, 0].min()), float(ends[:, 1].max())
    tags = getattr(image, "tag_v2", {})
    start, end = (float(np.ravel(tags.get(x, math.nan))[0]) for x in (_LEAST_VALUE, _LARGEST_VALUE))
    scale = 255 / (end - start) if start < end else math.nan
    if not (math.isfinite(high - low) and 0 < scale < math.inf):
        start, end, scale = 0.0, 255.0, 1.0
        if not (0 <= low <= high <= 255 and (image.mode == "I" or high == 0 or high > 1)):
            raise _RefusedError(
                f"has values from {low:g} to {high:g}, expected 0 to 255, or a TIFF that "
                "declares their range (SMinSampleValue, SMaxSampleValue)"
            )
    levels = (np.rint((np.clip(strip, start, end) - start) * scale) for strip in strips())
    return np.concatenate([strip.astype(np.uint8) for strip in levels])


def pad_to_square(
    image: Image.Image,
    fill: tuple[int, ...],
    size: tuple[int, int] | None = None,
    resample: int = Image.Resampling.BICUBIC,
) -> Image.Image:
    """Pads an image to a square and resizes it, without ever holding a very large square.

    Pillow resamples rows first, then columns, rounding to bytes in between. So strips of the square
    can be resampled along their rows one after another, and the stack of strips along its columns,
    with the same bytes as a result.
    """
    side = max(image.size)
    left, top = (side - image.width) // 2, (side - image.height) // 2
    if size is None or side * side <= STRIP_PIXELS:
        square = Image.new("RGB", (side, side), fill)
        square.paste(image, (left, top))
        return square if size is None else square.resize(size[::-1], resample)
    height, width = size
    narrow = Image.new("RGB", (width, side))
    blank = Image.new("RGB", (side, _STRIP_ROWS), fill)
    blank = blank.resize((width, _STRIP_ROWS), resample)
    for row in range(0, side, _STRIP_ROWS):
        rows = min(_STRIP_ROWS, side - row)
        if row + rows <= top or row >= top + image.height:
            narrow.paste(blank, (0, row))
            continue
        strip = Image.new("RGB", (side, rows), fill)
        strip.paste(image, (left, top - row))
        narrow.paste(strip.resize((width, rows), resample), (0, row))
    return narrow.resize((width, height), resample)
