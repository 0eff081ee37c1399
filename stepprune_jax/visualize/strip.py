"""Draws a video as a strip of temporal patches, with kept tokens bright and dropped tokens dim."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image, ImageDraw

from stepprune_jax.user_input import expect
from stepprune_jax.visualize import style
from stepprune_jax.visualize.overlays import shorten
from stepprune_jax.visualize.patches import dim, font, patch_box

# Pixels: side of a frame, space between frames, and height of the text above a strip.
_SIDE, _GAP, _HEAD, _FOOT = 160, 6, 34, 22
_MAX_TEXT = 100  # characters of a title


class Strip(NamedTuple):
    """One row of the picture: a question about a video, and the tokens that were kept for it.

    Attributes:
        title: text above the frames, such as question and answer.
        kept: [k] indices of kept tokens in raster order of (time, row, column).
    """

    title: str
    kept: Sequence[int] | Int[np.ndarray, "k"]


def draw_strips(
    out: str | Path | io.BytesIO,
    frames: Sequence[Image.Image] | UInt8[np.ndarray, "f height width 3"],
    grid: tuple[int, int, int],
    strips: Sequence[Strip],
    *,
    times: Sequence[float] = (),
) -> None:
    """Writes a PNG picture with a strip of frames for each question about a video.

    Each temporal patch is shown by its first frame, resized to a square.

    Args:
        out: path of the file, or a buffer. The folder of the file is created if needed.
        frames: the sampled frames of the video.
        grid: temporal patches, rows and columns of the video's tokens. Rows and columns are equal.
        strips: the questions, from top to bottom.
        times: time of each temporal patch in seconds, drawn below the frames; empty for no times.

    Raises:
        UserError: the grid of a temporal patch is not square, or an index is outside of the grid.
    """
    num_patches, rows, columns = grid
    expect("grid", grid, rows == columns > 0, "as many rows as columns")
    step = max(1, -(-len(frames) // num_patches))
    squares = [
        np.asarray(_to_image(frame).resize((_SIDE, _SIDE), Image.Resampling.NEAREST))
        for frame in list(frames)[::step]
    ]
    height = _HEAD + _SIDE + (_FOOT if times else 0)
    size = num_patches * (_SIDE + _GAP) + _GAP, len(strips) * (height + _GAP)
    page = Image.new("RGB", size, "white")
    canvas = ImageDraw.Draw(page)
    for number, strip in enumerate(strips):
        kept = np.asarray(strip.kept, int)
        is_inside = bool(np.all((kept >= 0) & (kept < num_patches * rows * columns)))
        expect("kept", kept.tolist(), is_inside, f"indices below {num_patches * rows * columns}")
        top = number * (height + _GAP)
        title = shorten(strip.title, _MAX_TEXT)
        canvas.text((_GAP, top + _HEAD - 9), title, style.INK, font(19, bold=True), anchor="ls")
        is_kept = np.isin(np.arange(num_patches * rows * columns), kept).reshape(grid)
        for patch, (square, mask) in enumerate(zip(squares, is_kept, strict=True)):
            left = _GAP + patch * (_SIDE + _GAP)
            page.paste(_draw_frame(square, mask), (left, top + _HEAD))
            if times:
                place = left + _SIDE // 2, top + _HEAD + _SIDE + 16
                canvas.text(place, f"{times[patch]:.1f} s", style.SOFT, font(14), anchor="ms")
    if isinstance(out, str | Path):
        Path(out).parent.mkdir(parents=True, exist_ok=True)
    # A palette halves the size of the file.
    page.quantize(128, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)


def _to_image(frame: Image.Image | UInt8[np.ndarray, "height width 3"]) -> Image.Image:
    return frame if isinstance(frame, Image.Image) else Image.fromarray(frame)


def _draw_frame(square: UInt8[np.ndarray, "side side 3"], mask: np.ndarray) -> Image.Image:
    """Draws a frame with its kept tokens bright and outlined."""
    picture = Image.fromarray(dim(square, mask))
    canvas = ImageDraw.Draw(picture)
    for token in np.flatnonzero(mask):
        left, top, right, bottom = patch_box(token, len(mask), _SIDE)
        canvas.rectangle((left, top, right - 1, bottom - 1), outline="white", width=2)
    return picture
