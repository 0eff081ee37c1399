"""Draws images with bright kept patches and dimmed dropped patches."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from jaxtyping import Bool, Int, UInt8
from matplotlib import colormaps
from PIL import Image, ImageDraw, ImageFont

from stepprune_jax.data.images import open_image, pad_to_square
from stepprune_jax.visualize.style import INK

_BRIGHTNESS = 0.4  # Brightness of dropped patches: clearly dark, but still recognizable.
_MAX_NUMBERED = 99  # Three digits do not fit into a patch.
_COLORMAP = "plasma"


def font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Returns matplotlib's typeface at a height of `size` pixels."""
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", name)), size)


def read_square(
    source: str | Path | bytes | Image.Image, side: int
) -> UInt8[np.ndarray, "side side 3"]:
    """Reads an image as the vision tower does: padded to a square and resized to `side`.

    If the longer side of the image divides `side`, each pixel becomes a square of pixels.
    """
    image = open_image(source)
    resampling = Image.Resampling.LANCZOS if side % max(image.size) else Image.Resampling.NEAREST
    return np.asarray(pad_to_square(image, (0, 0, 0), side, resampling))


def dim(
    pixels: UInt8[np.ndarray, "side side 3"], kept: Bool[np.ndarray, "grid grid"]
) -> UInt8[np.ndarray, "side side 3"]:
    """Darkens the patches that are not kept. `grid` need not divide the side."""
    patch_index = np.arange(len(pixels)) * len(kept) // len(pixels)
    is_kept = kept[np.ix_(patch_index, patch_index)][..., None]
    gray = pixels.mean(axis=-1, keepdims=True)
    dark_pixels = _BRIGHTNESS * (0.55 * pixels + 0.45 * gray) + 12
    return np.where(is_kept, pixels, dark_pixels).astype(np.uint8)


def patch_box(token: int | np.integer, grid: int, side: int) -> tuple[int, int, int, int]:
    """Returns left, top, right and bottom of a patch in pixels.

    Args:
        token: number of the patch, in row-major order.
        grid: patches along an edge of the square.
        side: pixels along an edge of the square.
    """
    row, column = divmod(int(token), grid)
    left, top, right, bottom = (-(-side * i // grid) for i in (column, row, column + 1, row + 1))
    return left, top, right, bottom


def square_patches(
    tokens: Sequence[int] | Int[np.ndarray, "t"], grid: tuple[int, int]
) -> Int[np.ndarray, "k"]:
    """Returns the patches of tokens in the padded square image.

    The square has max(rows, columns) patches along an edge, and the image is in its middle.

    Args:
        tokens: numbers of tokens in the image; -1 is a merged token, which has no patch.
        grid: rows and columns of tokens.
    """
    (rows, columns), side = grid, max(grid)
    indices = np.asarray(tokens, int)
    row, column = np.divmod(indices[indices >= 0], columns)
    return ((side - rows) // 2 + row) * side + (side - columns) // 2 + column


def draw_panel(
    source: str | Path | bytes | Image.Image,
    order: Sequence[int] | Int[np.ndarray, "k"],
    grid: int,
    side: int,
) -> Image.Image:
    """Draws an image with its kept patches bright, outlined and marked in the order of selection.

    The marks are numbers if at most 99 patches are kept and the side of a patch has at least 20
    pixels. Otherwise the marks are dots from dark to bright.

    Args:
        source: the image.
        order: kept patches in the order of selection.
        grid: patches along an edge.
        side: pixels along an edge of the result.
    """
    kept = np.isin(np.arange(grid * grid), order).reshape(grid, grid)
    panel = Image.fromarray(dim(read_square(source, side), kept))
    draw = ImageDraw.Draw(panel)
    _outline(draw, kept, side)
    patch_side = side // grid
    if len(order) <= _MAX_NUMBERED and patch_side >= 20:
        typeface = font(max(9, round(0.43 * patch_side)), bold=True)
        for number, token in enumerate(order, 1):
            left, top, right, bottom = patch_box(token, grid, side)
            draw.text(
                ((left + right) / 2, (top + bottom) / 2),
                str(number),
                fill="white",
                font=typeface,
                anchor="mm",
                stroke_width=max(1, patch_side // 14),
                stroke_fill=INK,
            )
    else:
        _draw_dots(draw, order, grid, side)
    return panel


def _draw_dots(draw: ImageDraw.ImageDraw, order, grid: int, side: int) -> None:
    """Draws a dot in each kept patch: dark for the first selected patch, bright for the last."""
    colors = colormaps[_COLORMAP](np.linspace(0, 0.95, max(len(order), 2)), bytes=True)
    radius = max(1.5, 0.2 * side / grid)
    for color, token in zip(colors, order, strict=False):
        left, top, right, bottom = patch_box(token, grid, side)
        x, y = (left + right) / 2, (top + bottom) / 2
        draw.ellipse(
            (x - radius, y - radius, x + radius, y + radius),
            fill=tuple(color[:3].tolist()),
            outline="white",
            width=max(1, round(radius / 4)),
        )


def _outline(draw: ImageDraw.ImageDraw, kept: Bool[np.ndarray, "grid grid"], side: int) -> None:
    """Draws white lines between kept and dropped patches, and at the edge of the image."""
    padded = np.pad(kept, 1)
    line_width = max(1, side // 168)
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
                draw.line(line, fill="white", width=line_width)
