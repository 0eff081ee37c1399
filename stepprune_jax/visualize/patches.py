"""Images with bright kept patches and dimmed dropped patches."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from jaxtyping import Bool, Int, UInt8
from matplotlib import colormaps
from PIL import Image, ImageDraw, ImageFont

from stepprune_jax.data.images import open_image, pad_to_square
from stepprune_jax.visualize.style import INK

_BRIGHTNESS = 0.4  # brightness of dropped patches
_MAX_NUMBERED = 99  # three digits do not fit a patch
_RAMP = "plasma"


def font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Returns the typeface of the figures, `size` pixels high, from matplotlib."""
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", name)), size)


def read_square(
    source: str | Path | bytes | Image.Image, side: int
) -> UInt8[np.ndarray, "side side 3"]:
    """Reads an image as the vision tower sees it: padded to a square, and resized to `side`.

    A small image whose side divides `side` keeps its pixels, as squares.
    """
    image = open_image(source)
    resample = Image.Resampling.LANCZOS if side % max(image.size) else Image.Resampling.NEAREST
    return np.asarray(pad_to_square(image, (0, 0, 0), side, resample))


def dim(
    pixels: UInt8[np.ndarray, "side side 3"], kept: Bool[np.ndarray, "grid grid"]
) -> UInt8[np.ndarray, "side side 3"]:
    """Darkens and greys the patches that are not kept; `grid` need not divide the side."""
    index = np.arange(len(pixels)) * len(kept) // len(pixels)
    bright = kept[np.ix_(index, index)][..., None]
    grey = pixels.mean(axis=-1, keepdims=True)
    dark = _BRIGHTNESS * (0.55 * pixels + 0.45 * grey) + 12
    return np.where(bright, pixels, dark).astype(np.uint8)


def patch_box(token: int | np.integer, grid: int, side: int) -> tuple[int, int, int, int]:
    """Returns left, top, right and bottom of one of grid x grid patches in a square of pixels."""
    row, column = divmod(int(token), grid)
    left, top, right, bottom = (-(-side * i // grid) for i in (column, row, column + 1, row + 1))
    return left, top, right, bottom


def square_patches(
    tokens: Sequence[int] | Int[np.ndarray, "t"], grid: tuple[int, int]
) -> Int[np.ndarray, "k"]:
    """Finds the patches of tokens in the square that their image is padded to.

    The image lies in the middle of max(rows, columns) patches along an edge. Merged tokens, -1, are
    left out.
    """
    (rows, columns), side = grid, max(grid)
    place = np.asarray(tokens, int)
    row, column = np.divmod(place[place >= 0], columns)
    return ((side - rows) // 2 + row) * side + (side - columns) // 2 + column


def draw_panel(
    source: str | Path | bytes | Image.Image,
    order: Sequence[int] | Int[np.ndarray, "k"],
    grid: int,
    side: int,
) -> Image.Image:
    """Draws an image with its kept patches bright, outlined and marked in the order of choice.

    Marks are numbers if at most 99 patches are kept and a patch has at least 20 pixels. Otherwise
    marks are dots, from dark to bright.
    """
    kept = np.isin(np.arange(grid * grid), order).reshape(grid, grid)
    panel = Image.fromarray(dim(read_square(source, side), kept))
    draw = ImageDraw.Draw(panel)
    _outline(draw, kept, side)
    patch = side // grid
    if len(order) <= _MAX_NUMBERED and patch >= 20:
        typeface = font(max(9, round(0.43 * patch)), bold=True)
        for number, token in enumerate(order, 1):
            left, top, right, bottom = patch_box(token, grid, side)
            draw.text(
                ((left + right) / 2, (top + bottom) / 2),
                str(number),
                fill="white",
                font=typeface,
                anchor="mm",
                stroke_width=max(1, patch // 14),
                stroke_fill=INK,
            )
    else:
        _draw_dots(draw, order, grid, side)
    return panel


def _draw_dots(draw: ImageDraw.ImageDraw, order, grid: int, side: int) -> None:
    """Draws a dot in each kept patch: the first choice dark, the last bright."""
    ramp = colormaps[_RAMP](np.linspace(0, 0.95, max(len(order), 2)), bytes=True)
    radius = max(1.5, 0.2 * side / grid)
    for colour, token in zip(ramp, order, strict=False):
        left, top, right, bottom = patch_box(token, grid, side)
        x, y = (left + right) / 2, (top + bottom) / 2
        draw.ellipse(
            (x - radius, y - radius, x + radius, y + radius),
            fill=tuple(colour[:3].tolist()),
            outline="white",
            width=max(1, round(radius / 4)),
        )


def _outline(draw: ImageDraw.ImageDraw, kept: Bool[np.ndarray, "grid grid"], side: int) -> None:
    """Draws white lines where kept patches meet dropped ones or the edge of the image."""
    padded = np.pad(kept, 1)
    width = max(1, side // 168)
    for row, column in np.argwhere(kept):
        left, top, right, bottom = patch_box(row * len(kept) + column, len(kept), side)
        right, bottom = right - 1, bottom - 1
        for dy, dx, line in (
            (-1, 0, (left, top, right, top)),
            (1, 0, (left, bottom, right, bottom)),
            (0, -1, (left, top, left, bottom)),
            (0, 1, (right, top, right, bottom)),
        ):
            if not padded[row + 1 + dy, column + 1 + dx]:
                draw.line(line, fill="white", width=width)
