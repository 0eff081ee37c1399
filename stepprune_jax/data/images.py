"""Image files, opened safely and converted to RGB, and padded to squares."""

import warnings
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

# Squares with more pixels are resampled in strips: a 20,000 x 10 image would need 1.2 GB as one.
STRIP_PIXELS = 1 << 24
_STRIP_ROWS = 256


def open_image(source: str | Path | Image.Image) -> Image.Image:
    """Opens an image and converts it to RGB.

    Alpha is dropped (not blended), palettes are resolved, CMYK is converted by Pillow, 16-bit grey
    keeps its upper eight bits, an animation gives its first frame. The EXIF orientation is not
    applied: the reference programs do not apply it.

    Args:
        source: a path, or an already opened Pillow image.

    Returns:
        The image in mode RGB, fully decoded.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no image, is damaged, or decodes to more than twice Pillow's
            ``Image.MAX_IMAGE_PIXELS``.
    """
    name = str(source) if isinstance(source, (str, Path)) else repr(source)
    if not isinstance(source, Image.Image) and not Path(source).is_file():
        raise FileNotFoundError(f"no image file at {name}")
    try:
        with warnings.catch_warnings():
            # Pillow warns above 89 Mpixel and refuses above 179; large is fine, a bomb is not.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            if isinstance(source, Image.Image):
                return _to_rgb(source)
            with Image.open(source) as image:
                return _to_rgb(image)
    except Image.DecompressionBombError as error:
        raise ValueError(
            f"{name} unpacks to more pixels than Pillow allows ({error}). A small file that grows "
            "to gigabytes can be an attack; if you trust it, raise PIL.Image.MAX_IMAGE_PIXELS"
        ) from error
    except UnidentifiedImageError as error:
        raise ValueError(f"{name} is not an image in a format that Pillow reads") from error
    except (OSError, SyntaxError, EOFError) as error:
        raise ValueError(f"{name} is a damaged image: {error}") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    """Decodes and converts to RGB."""
    image.load()
    if image.mode.startswith("I;16"):
        # Pillow would clip at 255 and turn nearly every 16-bit image white.
        order = ">u2" if image.mode.endswith("B") else "<u2"
        values = np.frombuffer(image.tobytes(), order).reshape(image.height, image.width)
        image = Image.fromarray((values >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        # The same colours as the direct way, without Pillow's warning about byte transparency.
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def pad_to_square(
    image: Image.Image,
    fill: tuple[int, ...],
    size: tuple[int, int] | None = None,
    resample: int = Image.Resampling.BICUBIC,
) -> Image.Image:
    """Pads an image to a square and resizes it, without ever holding a very large square.

    Pillow resamples rows first, then columns, rounding to bytes between. So strips of the square
    can be resampled along their rows one after another, and the stack of strips along its columns,
    with the same bytes as a result.

    Args:
        image: an RGB image, which is put in the middle.
        fill: the colour around it.
        size: (height, width) of the result; None for the square as it is.
        resample: number of the Pillow filter.

    Returns:
        The RGB image.
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
