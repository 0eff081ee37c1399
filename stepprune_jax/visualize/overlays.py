"""Draws images with their kept patches, question and answer."""

import io
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from PIL import Image, ImageDraw, ImageFont

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.inference.generate import Answer
from stepprune_jax.visualize import style
from stepprune_jax.visualize.patches import draw_panel, font, square_patches

# Pixels: side of an image, space between panels, and space for text above and below an image.
_SIDE, _GAP, _HEAD, _FOOT = 384, 28, 50, 116


class Overlay(NamedTuple):
    """The content of one panel: an image with its kept tokens, question and answer.

    Drawn by `draw_rows`.

    Attributes:
        image: the image.
        patches: [k] indices of the kept patches of the padded square image, in the order of
            selection.
        title: text above the image, on the left.
        category: text above the image, on the right.
        text: the question.
        answer: the answer.
        is_correct: whether the answer is correct; None if this is unknown.
        grid: patches along an edge of the padded square image.
    """

    image: str | Path | bytes | Image.Image
    patches: Sequence[int] | Int[np.ndarray, "k"]
    title: str
    category: str
    text: str
    answer: str
    is_correct: bool | None
    grid: int


def shorten(text: str, max_length: int) -> str:
    """Returns a text on one line, cut to `max_length` characters."""
    text = " ".join(text.split())
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def format_answer(answer: str, correct: str, is_correct: bool) -> str:
    """Shortens an answer, and appends the correct answer if the answer is wrong."""
    short_answer = shorten(answer, 24)
    return short_answer if is_correct else f"{short_answer}  (correct: {shorten(correct, 16)})"


def draw_answer(
    path: str | Path,
    model: VLM,
    images: Sequence[Image.Image],
    question: str,
    answer: Answer,
) -> Path:
    """Draws the images of a prompt with their kept tokens, and writes a PNG file.

    Args:
        path: the PNG file.
        model: the model that answered the prompt.
        images: the images of the prompt, in RGB.
        question: the question, which is drawn below each image.
        answer: the answer, with the kept tokens of each image.

    Returns:
        `path`.
    """
    overlays = []
    for image, grid, indices in zip(images, answer.grids, answer.kept_indices, strict=True):
        panel = square_image(model, image, (grid[0], grid[1]), indices)
        num_tokens = model.backbone.num_tokens(np.array([grid]))[0]
        num_merged = sum(index < 0 for index in indices)
        overlays.append(
            Overlay(
                image=panel.image,
                patches=panel.patches,
                title=f"{len(indices)} kept" + (f", {num_merged} merged" if num_merged else ""),
                category=f"of {num_tokens}",
                text=question,
                answer=shorten(answer.text, 40),
                is_correct=None,
                grid=panel.grid,
            )
        )
    draw_rows(path, [overlays])
    return Path(path)


class SquareImage(NamedTuple):
    """An image padded to a square, with its kept patches. Built by `square_image`.

    Attributes:
        image: the square image.
        grid: patches along an edge of the square.
        patches: indices of the kept patches of the square, in the order of selection.
    """

    image: Image.Image
    grid: int
    patches: list[int]


def square_image(
    model: VLM, image: Image.Image, grid: tuple[int, int], indices: Sequence[int]
) -> SquareImage:
    """Pads an image to a square as `square_patches` does, and finds its kept patches.

    Args:
        model: the model. Only the part of the image that the model sees is drawn.
        image: an image in RGB.
        grid: rows and columns of the image's tokens.
        indices: indices of kept tokens; -1 is a merged token, which has no patch.
    """
    # At least 1, because the lengths are divisors below.
    num_rows, num_columns = (max(1, length) for length in grid)
    cells = model.backbone.token_cells(grid, indices)
    image = model.backbone.visible_image(model.image_settings, image)
    side = max(grid)
    # The margins are integer numbers of patches, as in `square_patches`.
    top_margin, left_margin = (side - num_rows) // 2, (side - num_columns) // 2
    square_size = image.width * side // num_columns, image.height * side // num_rows
    square = Image.new("RGB", square_size, "white")
    left, top = image.width * left_margin // num_columns, image.height * top_margin // num_rows
    square.paste(image, (left, top))
    return SquareImage(square, side, square_patches(cells, grid).tolist())


def draw_rows(out: str | Path | io.BytesIO, rows: Sequence[Sequence[Overlay]]) -> None:
    """Draws rows of panels and writes a PNG image.

    Args:
        out: path of the file, or a buffer. The folder of the file is created if needed.
        rows: panels of each row, from left to right. Rows may have different lengths.
    """
    if isinstance(out, str | Path):
        Path(out).parent.mkdir(parents=True, exist_ok=True)
    panel_width, panel_height = _SIDE + _GAP, _HEAD + _SIDE + _FOOT
    num_columns = max(map(len, rows))
    page = Image.new("RGB", (num_columns * panel_width, len(rows) * panel_height), "white")
    for row_index, overlays in enumerate(rows):
        for column_index, overlay in enumerate(overlays):
            position = _GAP // 2 + column_index * panel_width, row_index * panel_height
            page.paste(_draw_overlay(overlay), position)
    page.save(out, "PNG", optimize=True)


def _draw_overlay(overlay: Overlay) -> Image.Image:
    """Draws one panel: title and category above the image, question and answer below the image."""
    panel = Image.new("RGB", (_SIDE, _HEAD + _SIDE + _FOOT), "white")
    panel.paste(draw_panel(overlay.image, overlay.patches, overlay.grid, _SIDE), (0, _HEAD))
    draw = ImageDraw.Draw(panel)
    mark = {None: "", True: "✓ ", False: "✗ "}[overlay.is_correct]
    answer_color = {None: style.INK, True: "#00735a", False: "#b54708"}[overlay.is_correct]
    small_font, bold_font = font(21), font(22, bold=True)
    # The anchors "ls" and "rs" are the left and right ends of a text's baseline.
    draw.text((0, _HEAD - 12), overlay.title, style.INK, font(25, bold=True), anchor="ls")
    draw.text((_SIDE, _HEAD - 12), overlay.category, style.SOFT, small_font, anchor="rs")
    baseline = _HEAD + _SIDE + 28
    for text, color, typeface in (
        (overlay.text, style.INK, small_font),
        (mark + overlay.answer, answer_color, bold_font),
    ):
        for line in wrap_pixels(text, _SIDE, typeface, max_lines=2):
            draw.text((0, baseline), line, color, typeface, anchor="ls")
            baseline += 26
        baseline += 4  # space between question and answer
    return panel


def wrap_pixels(
    text: str, width: int, typeface: ImageFont.FreeTypeFont, max_lines: int
) -> list[str]:
    """Breaks a text into at most `max_lines` lines; text without room is replaced by "…".

    Args:
        text: the text.
        width: maximum width of a line in pixels.
        typeface: font that the text is drawn with.
        max_lines: maximum number of lines.
    """
    lines = []
    # Reduces the number of characters until all lines fit. A character has at least 4 pixels.
    for num_characters in range(width // 4, 3, -1):
        lines = wrap(text, num_characters, max_lines=max_lines, placeholder="…")
        if all(typeface.getlength(line) <= width for line in lines):
            break
    return lines
