"""Opens image files safely, converts them to RGB, and pads them to squares."""

import io
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from stepprune_jax.user_input import UserError

# Squares with more pixels are resampled in strips. The square of a 20,000 x 10 image would need
# 1.2 GB.
STRIP_PIXELS = 1 << 24
_STRIP_ROWS = 256
# Longest side of an image in pixels. Padding a column of 32,767 pixels to a square and resizing it
# takes 5 seconds. The time grows with the square of the side: 65,534 pixels take 22 seconds.
LONGEST_SIDE = 32_767
# Qwen's image processor refuses images with a larger ratio of the longer to the shorter side.
MAX_ASPECT = 200
# Advice about files that are often given instead of an image, by a pattern of their first bytes.
_NON_IMAGE_FILES = (
    (
        rb"....ftyp(hei|hev|mif|msf)",
        "is a HEIC photo, which Pillow cannot read: convert it to JPEG or PNG",
    ),
    (
        rb"....ftyp|....moov|\x1aE\xdf\xa3|RIFF....AVI |\x00\x00\x01[\xb3\xba]|FLV",
        "is a video; expected an image (videos are given as Video, or --video)",
    ),
    (rb"version https://git-lfs", "is a pointer of Git LFS: run `git lfs pull` to get the image"),
    (rb"\s*<(!doctype html|html)", "is a web page; expected an image: download it again"),
)
# Bytes that the patterns above are matched against. The longest match, of a web page, needs fewer.
_START_BYTES = 64
# Transposition that turns an image of each EXIF orientation upright. Orientation 1 is upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def open_image(source: str | Path | bytes | Image.Image, *, as_shown: bool = False) -> Image.Image:
    """Opens an image and converts it to RGB.

    Palettes and CMYK are converted by Pillow. 16-bit grey keeps its upper eight bits. An animation
    gives its first frame. 32-bit grey is refused, because the range of its values is unknown. EPS
    is refused, because it is a program that Pillow would run in Ghostscript.

    Args:
        source: a file, the bytes of a file, or a Pillow image.
        as_shown: True turns the image by its EXIF orientation and blends it with a white
            background, as image viewers, vLLM and Qwen's reader do. Answers to users need this.
            False ignores orientation and alpha, as LLaVA's programs for training and evaluation do.

    Returns:
        The decoded image in mode "RGB".

    Raises:
        FileNotFoundError: there is no such file.
        TypeError: the source has another type.
        ValueError: the image is damaged, too large or not supported.
    """
    if not isinstance(source, (str, Path, bytes, Image.Image)):
        raise TypeError(f"expected a path, bytes or a Pillow image, got {type(source).__name__}")
    # A file for Pillow, and the start of error messages.
    if isinstance(source, bytes):
        file, name = io.BytesIO(source), "the image"
    elif isinstance(source, Image.Image):
        file, name = "", repr(source)
    else:
        file, name = source, str(source)
        if not Path(source).is_file():
            raise FileNotFoundError(f"no image file at {name}")
    try:
        with warnings.catch_warnings():
            # Pillow warns above 89 Mpixel and raises above 179. Only the error matters here.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            if isinstance(source, Image.Image):
                return _to_rgb(source, as_shown)
            with Image.open(file) as image:
                if image.format == "EPS":
                    raise _RefusedError("is an EPS drawing: convert it to PNG")
                return _to_rgb(image, as_shown)
    except Exception as error:  # Pillow's decoders may raise any type of error
        if isinstance(error, UnidentifiedImageError):
            problem = _describe_unknown_file(file)
        else:
            problem = _describe_problem(error)
        raise UserError(f"{name} {problem}") from error


class _RefusedError(ValueError):
    """Raised for an image that is intact but not supported."""


def _describe_problem(error: Exception) -> str:
    """Describes why an image cannot be opened.

    Args:
        error: an error of Pillow, or a `_RefusedError`.

    Returns:
        The end of a message that begins with the name of the image, such as "is a damaged image".
    """
    reason = " ".join(str(error).split()) or type(error).__name__
    too_many_pixels = (
        f"unpacks to more pixels than Pillow allows ({reason}). A small file that grows to "
        "gigabytes can be an attack; if you trust it, raise PIL.Image.MAX_IMAGE_PIXELS"
    )
    png_limit = re.search("MAX_TEXT_[A-Z]+", reason)  # Pillow's limits on the metadata of a PNG
    if png_limit is not None:
        return (
            f"has more text or a larger colour profile than Pillow allows ({reason}): save it "
            f"without them; if you trust it, raise PIL.PngImagePlugin.{png_limit.group()}"
        )
    if isinstance(error, _RefusedError):
        return reason
    if isinstance(error, Image.DecompressionBombError):
        return too_many_pixels
    if isinstance(error, MemoryError):
        return "needs more memory than is available"
    return f"is a damaged image: {reason}"


def _describe_unknown_file(source: str | Path | io.BytesIO) -> str:
    """Describes a file that Pillow does not recognize.

    Returns:
        The end of a message that begins with the name of the file, such as "is a web page".
    """
    if isinstance(source, io.BytesIO):
        first_bytes = source.getvalue()[:_START_BYTES]
    else:
        with open(source, "rb") as file:
            first_bytes = file.read(_START_BYTES)
    for pattern, description in _NON_IMAGE_FILES:
        if re.match(pattern, first_bytes, re.DOTALL | re.I):
            return description
    hint = "" if first_bytes else ": the file is empty"
    return f"is not an image in a format that Pillow reads{hint}"


def is_shown_otherwise(path: str | Path) -> bool:
    """Returns whether `open_image` gives different pixels with and without `as_shown`.

    Such an image has an EXIF orientation, or is transparent.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        undecoded_image = Image.open(path)
    with undecoded_image as image:
        if _orientation(image) not in _UPRIGHT and not image.has_transparency_data:
            return False
    stored, displayed = (open_image(path, as_shown=as_shown) for as_shown in (False, True))
    return stored.size != displayed.size or stored.tobytes() != displayed.tobytes()


def _orientation(image: Image.Image) -> object:
    """Returns the EXIF orientation, or None if it is missing or the EXIF block is damaged."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # Pillow's parsers may raise any kind
        return None


def _to_rgb(image: Image.Image, as_shown: bool) -> Image.Image:
    """Decodes an opened image and converts it to RGB.

    Args:
        image: an image in any mode. Its pixels may not be decoded yet.
        as_shown: as in `open_image`.

    Returns:
        The image in mode "RGB".

    Raises:
        _RefusedError: the image is not supported. Pillow's decoders raise further errors.
    """
    if not 1 <= min(image.size) <= max(image.size) <= LONGEST_SIDE:
        raise _RefusedError(
            f"has {image.width} x {image.height} pixels, expected sides of 1 to {LONGEST_SIDE}"
        )
    if image.mode in ("I", "F"):
        raise _RefusedError("has 32-bit grey values, expected 8 or 16 bits a channel: convert it")
    image.load()  # Pillow turns a TIFF upright here, so the orientation is read afterwards
    orientation: Any = _orientation(image)
    transposition = _UPRIGHT.get(orientation) if as_shown else None
    if image.mode.startswith("I;16"):
        # Pillow would clip at 255 and make nearly every 16-bit image white.
        dtype = ">u2" if image.mode.endswith("B") else "<u2"
        grey_values = np.frombuffer(image.tobytes(), dtype).reshape(image.height, image.width)
        # A 16-bit grey PNG may declare one value to be transparent. It becomes white.
        is_transparent = as_shown and grey_values == image.info.get("transparency")
        image = Image.fromarray(np.where(is_transparent, 255, grey_values >> 8).astype(np.uint8))
    if as_shown and image.has_transparency_data:
        foreground = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.new("RGB", foreground.size, "white")
        image.paste(foreground, mask=foreground)
    elif image.mode == "P" and "transparency" in image.info:
        # A direct conversion gives the same colors, but Pillow warns about byte transparency.
        image = image.convert("RGBA")
    image = image if image.mode == "RGB" else image.convert("RGB")
    if transposition is not None:
        image = image.transpose(transposition)
        image.info = {}  # a kept orientation would turn the image again when it is reopened
    return image


def pad_to_square(
    image: Image.Image,
    fill: tuple[int, ...],
    size: int,
    resample: int,
) -> Image.Image:
    """Pads an image to a square and resizes the square.

    A square of more than `STRIP_PIXELS` is never built. Pillow resizes an image along its rows
    first, rounds to bytes, and then resizes along the columns. Therefore strips of the square are
    resized along their rows one after another, and the stack of resized strips is resized along its
    columns. The result is identical to the result for the complete square.

    Args:
        image: an RGB image.
        fill: color of the padding, one number per channel.
        size: side of the resized square in pixels.
        resample: a resampling filter of Pillow.

    Returns:
        The resized square, with `size` pixels on each side.
    """
    side = max(image.size)
    left, top = (side - image.width) // 2, (side - image.height) // 2
    if side * side <= STRIP_PIXELS:
        square = Image.new("RGB", (side, side), fill)
        square.paste(image, (left, top))
        return square.resize((size, size), resample)
    stacked_strips = Image.new("RGB", (size, side))  # the square, resized along its rows
    padding = Image.new("RGB", (side, _STRIP_ROWS), fill)
    resized_padding = padding.resize((size, _STRIP_ROWS), resample)
    for first_row in range(0, side, _STRIP_ROWS):
        num_rows = min(_STRIP_ROWS, side - first_row)
        if first_row + num_rows <= top or first_row >= top + image.height:  # no row of the image
            stacked_strips.paste(resized_padding, (0, first_row))
            continue
        strip = Image.new("RGB", (side, num_rows), fill)
        strip.paste(image, (left, top - first_row))
        stacked_strips.paste(strip.resize((size, num_rows), resample), (0, first_row))
    return stacked_strips.resize((size, size), resample)
