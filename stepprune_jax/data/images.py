"""Image files, opened safely and converted to RGB, and padded to squares."""

import io
import re
import warnings
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from stepprune_jax.user_input import UserError

# Squares with more pixels are resampled in strips: a 20,000 x 10 image would need 1.2 GB as one.
STRIP_PIXELS = 1 << 24
_STRIP_ROWS = 256
# Longest side of an image in pixels. Time grows with its square: padded to a square and resized, a
# single column of 32,767 pixels takes 5 seconds, one of twice as many 22.
LONGEST_SIDE = 32_767
# Largest ratio of the longer side to the shorter one that Qwen's models take.
MAX_ASPECT = 200
# Files that data sets and users often hold in the place of an image, by their first bytes.
_OTHER_FILES = (
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
_LONGEST_START = 64  # bytes
# What undoes the orientations of EXIF.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def open_image(source: str | Path | bytes | Image.Image, *, as_shown: bool = False) -> Image.Image:
    """Opens an image, a file or the bytes of one, and converts it to RGB.

    Palettes are resolved, CMYK is converted by Pillow, 16-bit grey keeps its upper eight bits,
    32-bit grey is refused, as its range is not known, an animation gives its first frame. EPS is
    refused: Pillow would let Ghostscript run the program that the file is.

    Args:
        source: a file, the bytes of one, or a Pillow image.
        as_shown: turns the image by its EXIF orientation and blends it with a white ground, as a
            viewer, vLLM and Qwen's own reader do. Answers to users need that. Without it both
            orientation and alpha are ignored, as by the programs that LLaVA is trained and
            evaluated with.
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
                return _to_rgb(source, as_shown)
            with Image.open(source) as image:
                if image.format == "EPS":
                    raise _RefusedError("is an EPS drawing: convert it to PNG")
                return _to_rgb(image, as_shown)
    except Exception as error:  # Pillow's decoders may raise any kind
        unknown = isinstance(error, UnidentifiedImageError)
        problem = _unknown_format(source) if unknown else _problem(error)
        raise UserError(f"{name} {problem}") from error


class _RefusedError(ValueError):
    """An image that is intact, but not supported."""


def _problem(error: Exception) -> str:
    """Describes why an image cannot be opened."""
    reason = " ".join(str(error).split()) or type(error).__name__
    bomb = (
        f"unpacks to more pixels than Pillow allows ({reason}). A small file that grows to "
        "gigabytes can be an attack; if you trust it, raise PIL.Image.MAX_IMAGE_PIXELS"
    )
    limit = re.search("MAX_TEXT_[A-Z]+", reason)  # Pillow's limits on the metadata of a PNG
    if limit is not None:
        return (
            f"has more text or a larger colour profile than Pillow allows ({reason}): save it "
            f"without them; if you trust it, raise PIL.PngImagePlugin.{limit.group()}"
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


def _unknown_format(source: str | Path | io.BytesIO) -> str:
    """Says what a file is that Pillow does not recognize, by its first bytes."""
    if isinstance(source, io.BytesIO):
        start = source.getvalue()[:_LONGEST_START]
    else:
        with open(source, "rb") as file:
            start = file.read(_LONGEST_START)
    kinds = (text for form, text in _OTHER_FILES if re.match(form, start, re.DOTALL | re.I))
    empty = "" if start else ": the file is empty"
    return next(kinds, f"is not an image in a format that Pillow reads{empty}")


def is_shown_otherwise(path: str | Path) -> bool:
    """Returns whether an image file's two readings differ: it is turned, or transparent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        opened = Image.open(path)
    with opened as image:
        if _orientation(image) not in _TURNS and not image.has_transparency_data:
            return False
    stored, shown = (open_image(path, as_shown=wanted) for wanted in (False, True))
    return stored.size != shown.size or stored.tobytes() != shown.tobytes()


def _orientation(image: Image.Image) -> object:
    """Returns the EXIF orientation, None if there is none or the block is damaged."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # Pillow's parsers may raise any kind
        return None


def _to_rgb(image: Image.Image, as_shown: bool) -> Image.Image:
    """Decodes and converts to RGB."""
    if not 1 <= min(image.size) <= max(image.size) <= LONGEST_SIDE:
        raise _RefusedError(
            f"has {image.width} x {image.height} pixels, expected sides of 1 to {LONGEST_SIDE}"
        )
    if image.mode in ("I", "F"):
        raise _RefusedError("has 32-bit grey values, expected 8 or 16 bits a channel: convert it")
    image.load()  # Pillow turns a TIFF here
    turn = _TURNS.get(_orientation(image)) if as_shown else None
    if image.mode.startswith("I;16"):
        # Pillow would clip at 255 and turn nearly every 16-bit image white.
        order = ">u2" if image.mode.endswith("B") else "<u2"
        values = np.frombuffer(image.tobytes(), order).reshape(image.height, image.width)
        clear = as_shown and values == image.info.get("transparency")
        image = Image.fromarray(np.where(clear, 255, values >> 8).astype(np.uint8))
    if as_shown and image.has_transparency_data:
        ink = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.new("RGB", ink.size, "white")
        image.paste(ink, mask=ink)
    elif image.mode == "P" and "transparency" in image.info:
        # The same colours as a direct conversion, without Pillow's warning on byte transparency.
        image = image.convert("RGBA")
    image = image if image.mode == "RGB" else image.convert("RGB")
    if turn is not None:
        image = image.transpose(turn)
        image.info = {}  # without the orientation, or it would be turned again
    return image


def pad_to_square(
    image: Image.Image,
    fill: tuple[int, ...],
    size: int,
    resample: int,
) -> Image.Image:
    """Pads an image to a square and resizes that, without ever holding a very large square.

    Pillow resamples rows first, then columns, rounding to bytes in between. So strips of the square
    can be resampled along their rows one after another, and the stack of strips along its columns,
    with the same bytes as a result.
    """
    side = max(image.size)
    left, top = (side - image.width) // 2, (side - image.height) // 2
    if side * side <= STRIP_PIXELS:
        square = Image.new("RGB", (side, side), fill)
        square.paste(image, (left, top))
        return square.resize((size, size), resample)
    narrow = Image.new("RGB", (size, side))
    blank = Image.new("RGB", (side, _STRIP_ROWS), fill)
    blank = blank.resize((size, _STRIP_ROWS), resample)
    for row in range(0, side, _STRIP_ROWS):
        rows = min(_STRIP_ROWS, side - row)
        if row + rows <= top or row >= top + image.height:
            narrow.paste(blank, (0, row))
            continue
        strip = Image.new("RGB", (side, rows), fill)
        strip.paste(image, (left, top - row))
        narrow.paste(strip.resize((size, rows), resample), (0, row))
    return narrow.resize((size, size), resample)
