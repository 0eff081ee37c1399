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
    """Reads an image, pads it to a square with black, and resizes it to `side` pixels.

    Args:
        source: the image.
        side: pixels along an edge of the result. For a multiple of the longer side of the image,
            each pixel becomes a square of equal pixels; otherwise the image is interpolated.
    """
    image = open_image(source)
    is_multiple = side % max(image.size) == 0
    resampling = Image.Resampling.NEAREST if is_multiple else Image.Resampling.LANCZOS
    return np.asarray(pad_to_square(image, (0, 0, 0), side, resampling))


def dim(
    pixels: UInt8[np.ndarray, "side side 3"], kept: Bool[np.ndarray, "grid grid"]
) -> UInt8[np.ndarray, "side side 3"]:
    """Darkens and grays the patches of an image that are not kept.

    Args:
        pixels: [side, side, 3] the image.
        kept: [grid, grid] mask of the kept patches. `grid` need not divide `side`.
    """
    patch_index = np.arange(len(pixels)) * len(kept) // len(pixels)  # along an edge, by pixel
    is_kept_pixel = kept[np.ix_(patch_index, patch_index)][..., None]
    gray = pixels.mean(axis=-1, keepdims=True)
    # Dropped patches are dimmed and partly desaturated. The constant lifts black to dark gray.
    dark_pixels = _BRIGHTNESS * (0.55 * pixels + 0.45 * gray) + 12
    return np.where(is_kept_pixel, pixels, dark_pixels).astype(np.uint8)


def patch_box(token: int | np.integer, grid: int, side: int) -> tuple[int, int, int, int]:
    """Returns left, top, right and bottom of a patch in pixels; right and bottom are exclusive.

    Args:
        token: index of the patch, in row-major order.
        grid: patches along an edge of the square.
        side: pixels along an edge of the square.
    """

    def edge_pixel(index: int) -> int:
        # Rounds up, as `dim` assigns a pixel on the border of two patches.
        return -(-side * index // grid)

    row, column = divmod(int(token), grid)
    return edge_pixel(column), edge_pixel(row), edge_pixel(column + 1), edge_pixel(row + 1)


def square_patches(
    tokens: Sequence[int] | Int[np.ndarray, "t"], grid: tuple[int, int]
) -> Int[np.ndarray, "k"]:
    """Converts token indices of an image to patch indices of the image padded to a square.

    The square has max(rows, columns) patches along an edge, and the image is centered.

    Args:
        tokens: [t] indices of tokens in row-major order; -1 is a merged token, which has no patch.
        grid: rows and columns of tokens.

    Returns:
        [k] indices of patches in row-major order, without merged tokens.
    """
    (num_rows, num_columns), side = grid, max(grid)
    indices = np.asarray(tokens, int)
    row, column = np.divmod(indices[indices >= 0], num_columns)
    top_margin, left_margin = (side - num_rows) // 2, (side - num_columns) // 2
    return (top_margin + row) * side + left_margin + column


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
        order: [k] indices of the kept patches in the order of selection, for the image padded to a
            square.
        grid: patches along an edge of the square.
        side: pixels along an edge of the result.

    Returns:
        The square panel.
    """
    kept = np.isin(np.arange(grid * grid), order).reshape(grid, grid)
    panel = Image.fromarray(dim(read_square(source, side), kept))
    draw = ImageDraw.Draw(panel)
    _draw_outline(draw, kept, side)
    if len(order) <= _MAX_NUMBERED and side // grid >= 20:
        _draw_numbers(draw, order, grid, side)
    else:
        _draw_dots(draw, order, grid, side)
    return panel


def _draw_numbers(draw: ImageDraw.ImageDraw, order, grid: int, side: int) -> None:
    """Draws numbers from 1 into the kept patches, in the order of selection.

    Args:
        draw: canvas of the panel.
        order: [k] indices of the kept patches.
        grid: patches along an edge of the panel.
        side: pixels along an edge of the panel.
    """
    patch_side = side // grid
    typeface = font(max(9, round(0.43 * patch_side)), bold=True)  # two digits fit into a patch
    for number, patch in enumerate(order, 1):
        left, top, right, bottom = patch_box(patch, grid, side)
        draw.text(
            ((left + right) / 2, (top + bottom) / 2),
            str(number),
            fill="white",
            font=typeface,
            anchor="mm",
            stroke_width=max(1, patch_side // 14),
            stroke_fill=INK,
        )


def _draw_dots(draw: ImageDraw.ImageDraw, order, grid: int, side: int) -> None:
    """Draws a dot into each kept patch: dark for the first selected patch, bright for the last.

    Args:
        draw: canvas of the panel.
        order: [k] indices of the kept patches in the order of selection.
        grid: patches along an edge of the panel.
        side: pixels along an edge of the panel.
    """
    colors = colormaps[_COLORMAP](np.linspace(0, 0.95, max(len(order), 2)), bytes=True)
    radius = max(1.5, 0.2 * side / grid)
    for color, patch in zip(colors, order, strict=False):  # a single patch has two colors
        left, top, right, bottom = patch_box(patch, grid, side)
        x, y = (left + right) / 2, (top + bottom) / 2
        draw.ellipse(
            (x - radius, y - radius, x + radius, y + radius),
            fill=tuple(color[:3].tolist()),
            outline="white",
            width=max(1, round(radius / 4)),
        )


def _draw_outline(
    draw: ImageDraw.ImageDraw, kept: Bool[np.ndarray, "grid grid"], side: int
) -> None:
    """Draws white lines between kept and dropped patches, and at the edge of the panel.

    Args:
        draw: canvas of the panel.
        kept: [grid, grid] mask of the kept patches.
        side: pixels along an edge of the panel.
    """
    grid = len(kept)
    padded_kept = np.pad(kept, 1)  # patches outside the panel are not kept
    line_width = max(1, side // 168)
    for row, column in np.argwhere(kept):
        left, top, right, bottom = patch_box(row * grid + column, grid, side)
        right, bottom = right - 1, bottom - 1  # last pixels inside the patch
        for row_offset, column_offset, line in (
            (-1, 0, (left, top, right, top)),
            (1, 0, (left, bottom, right, bottom)),
            (0, -1, (left, top, left, bottom)),
            (0, 1, (right, top, right, bottom)),
        ):
            if not padded_kept[row + 1 + row_offset, column + 1 + column_offset]:
                draw.line(line, fill="white", width=line_width)
