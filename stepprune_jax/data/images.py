"""Opens image files safely, converts them to RGB, and pads them to squares."""

import io
import re
import warnings
from pathlib import Path

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
        "is a video; expected an image, as videos are not supported",
    ),
    (rb"version https://git-lfs", "is a pointer of Git LFS: run `git lfs pull` to get the image"),
    (rb"\s*<(!doctype html|html)", "is a web page; expected an image: download it again"),
)
# Bytes that the patterns above are matched against. The longest match, of a web page, needs fewer.
_START_BYTES = 64
# Transposition that undoes each EXIF orientation. Orientation 1 is upright.
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

    Palettes are resolved, and Pillow converts CMYK. 16-bit grey keeps its upper eight bits. An
    animation gives its first frame. 32-bit grey is refused, because the range of its values is
    unknown. EPS is refused, because it is a program that Pillow would run in Ghostscript.

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
            # Pillow warns above 89 Mpixel and raises above 179. Only the error matters here.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            if isinstance(source, Image.Image):
                return _to_rgb(source, as_shown)
            with Image.open(source) as image:
                if image.format == "EPS":
                    raise _RefusedError("is an EPS drawing: convert it to PNG")
                return _to_rgb(image, as_shown)
    except Exception as error:  # Pillow's decoders may raise any kind
        if isinstance(error, UnidentifiedImageError):
            problem = _describe_unknown_file(source)
        else:
            problem = _describe_problem(error)
        raise UserError(f"{name} {problem}") from error


class _RefusedError(ValueError):
    """Raised for an image that is intact but not supported."""


def _describe_problem(error: Exception) -> str:
    """Returns the predicate of a message about an image that cannot be opened."""
    reason = " ".join(str(error).split()) or type(error).__name__
    bomb = (
        f"unpacks to more pixels than Pillow allows ({reason}). A small file that grows to "
        "gigabytes can be an attack; if you trust it, raise PIL.Image.MAX_IMAGE_PIXELS"
    )
    png_limit = re.search("MAX_TEXT_[A-Z]+", reason)  # Pillow's limits on the metadata of a PNG
    if png_limit is not None:
        return (
            f"has more text or a larger colour profile than Pillow allows ({reason}): save it "
            f"without them; if you trust it, raise PIL.PngImagePlugin.{png_limit.group()}"
        )
    messages = {
        _RefusedError: reason,
        Image.DecompressionBombError: bomb,
        MemoryError: "needs more memory than is available",
    }
    return next(
        (text for kind, text in messages.items() if isinstance(error, kind)),
        f"is a damaged image: {reason}",
    )


def _describe_unknown_file(source: str | Path | io.BytesIO) -> str:
    """Returns the predicate of a message about a file that Pillow does not recognize."""
    if isinstance(source, io.BytesIO):
        start = source.getvalue()[:_START_BYTES]
    else:
        with open(source, "rb") as file:
            start = file.read(_START_BYTES)
    for pattern, description in _NON_IMAGE_FILES:
        if re.match(pattern, start, re.DOTALL | re.I):
            return description
    hint = "" if start else ": the file is empty"
    return f"is not an image in a format that Pillow reads{hint}"


def is_shown_otherwise(path: str | Path) -> bool:
    """Returns whether `open_image` with and without `as_shown` gives different pixels.

    Such an image has an EXIF orientation, or is transparent.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        undecoded = Image.open(path)
    with undecoded as image:
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
    """Decodes an opened image and converts it to RGB, as described in `open_image`."""
    if not 1 <= min(image.size) <= max(image.size) <= LONGEST_SIDE:
        raise _RefusedError(
            f"has {image.width} x {image.height} pixels, expected sides of 1 to {LONGEST_SIDE}"
        )
    if image.mode in ("I", "F"):
        raise _RefusedError("has 32-bit grey values, expected 8 or 16 bits a channel: convert it")
    image.load()  # Pillow turns a TIFF upright here, so the orientation is read afterwards
    transposition = _UPRIGHT.get(_orientation(image)) if as_shown else None
    if image.mode.startswith("I;16"):
        # Pillow would clip at 255 and make nearly every 16-bit image white.
        dtype = ">u2" if image.mode.endswith("B") else "<u2"
        values = np.frombuffer(image.tobytes(), dtype).reshape(image.height, image.width)
        is_transparent = as_shown and values == image.info.get("transparency")
        image = Image.fromarray(np.where(is_transparent, 255, values >> 8).astype(np.uint8))
    if as_shown and image.has_transparency_data:
        foreground = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.new("RGB", foreground.size, "white")
        image.paste(foreground, mask=foreground)
    elif image.mode == "P" and "transparency" in image.info:
        # A direct conversion gives the same colours, but Pillow warns about byte transparency.
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

    A very large square is never built. Pillow resamples rows first, rounds to bytes, and then
    resamples columns. Therefore strips of the square can be resampled along their rows one by one,
    and the stack of strips along its columns, with identical bytes.

    Args:
        image: an RGB image.
        fill: colour of the padding.
        size: side of the result in pixels.
        resample: a resampling filter of Pillow.

    Returns:
        The image [size, size].
    """
    side = max(image.size)
    left, top = (side - image.width) // 2, (side - image.height) // 2
    if side * side <= STRIP_PIXELS:
        square = Image.new("RGB", (side, side), fill)
        square.paste(image, (left, top))
        return square.resize((size, size), resample)
    stack = Image.new("RGB", (size, side))  # the square, resampled along its rows
    padding = Image.new("RGB", (side, _STRIP_ROWS), fill)
    padding = padding.resize((size, _STRIP_ROWS), resample)
    for row in range(0, side, _STRIP_ROWS):
        num_rows = min(_STRIP_ROWS, side - row)
        if row + num_rows <= top or row >= top + image.height:
            stack.paste(padding, (0, row))
            continue
        strip = Image.new("RGB", (side, num_rows), fill)
        strip.paste(image, (left, top - row))
        stack.paste(strip.resize((size, num_rows), resample), (0, row))
    return stack.resize((size, size), resample)
