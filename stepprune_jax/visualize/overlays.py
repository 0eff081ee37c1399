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
    """The content of one panel. Drawn by `draw_rows`.

    Attributes:
        image: the image.
        patches: kept patches of the square image, in the order of selection.
        title: text above the image, on the left.
        category: text above the image, on the right.
        text: the question.
        answer: the answer.
        is_correct: whether the answer is correct; None without an annotation.
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
    """Shortens an answer, and adds the correct answer if the answer is wrong."""
    short_answer = shorten(answer, 24)
    return short_answer if is_correct else f"{short_answer}  (correct: {shorten(correct, 16)})"


def draw_answer(
    path: str | Path,
    model: VLM,
    images: Sequence[Image.Image],
    question: str,
    answer: Answer,
) -> Path:
    """Draws the preprocessed images of a prompt with their kept tokens, and writes a PNG.

    Args:
        path: the file.
        model: the model.
        images: the images of the prompt, in RGB.
        question: the question, which is drawn below each image.
        answer: the answer, with the kept tokens of each image.

    Returns:
        The path of the file.
    """
    overlays = []
    for image, grid, indices in zip(images, answer.grids, answer.kept_indices, strict=True):
        panel = square_image(model, image, grid, indices)
        num_merged = sum(index < 0 for index in indices)
        overlays.append(
            Overlay(
                image=panel.image,
                patches=panel.patches,
                title=f"{len(indices)} kept" + (f", {num_merged} merged" if num_merged else ""),
                category=f"of {model.backbone.num_tokens(np.array([grid]))[0]}",
                text=question,
                answer=shorten(answer.text, 40),
                is_correct=None,
                grid=panel.grid,
            )
        )
    draw_rows(path, [overlays])
    return Path(path)


class SquareImage(NamedTuple):
    """An image that is padded to a square.

    Attributes:
        image: the square image.
        grid: patches along an edge of the square.
        patches: kept patches of the square.
    """

    image: Image.Image
    grid: int
    patches: list[int]


def square_image(
    model: VLM, image: Image.Image, grid: tuple[int, int], indices: Sequence[int]
) -> SquareImage:
    """Pads a preprocessed image to a square, and finds the patches of its kept tokens.

    Args:
        model: the model.
        image: an image in RGB.
        grid: rows and columns of the image's tokens.
        indices: kept tokens; -1 is a merged token, which has no patch.
    """
    rows, columns = (max(1, length) for length in grid)
    cells = model.backbone.token_cells(grid, indices)
    image = model.backbone.visible_image(model.image_settings, image)
    side = max(grid)
    top_margin, left_margin = (side - rows) // 2, (side - columns) // 2
    square = Image.new("RGB", (image.width * side // columns, image.height * side // rows), "white")
    square.paste(image, (image.width * left_margin // columns, image.height * top_margin // rows))
    return SquareImage(square, side, square_patches(cells, grid).tolist())


def draw_rows(out: str | Path | io.BytesIO, rows: Sequence[Sequence[Overlay]]) -> None:
    """Draws rows of panels and writes a PNG to a file or buffer."""
    if isinstance(out, str | Path):
        Path(out).parent.mkdir(parents=True, exist_ok=True)
    width, height = _SIDE + _GAP, _HEAD + _SIDE + _FOOT
    page = Image.new("RGB", (max(map(len, rows)) * width, len(rows) * height), "white")
    for row, overlays in enumerate(rows):
        for column, example in enumerate(overlays):
            page.paste(_draw_overlay(example), (_GAP // 2 + column * width, row * height))
    page.save(out, "PNG", optimize=True)


def _draw_overlay(example: Overlay) -> Image.Image:
    """Draws one panel: title and category above the image, question and answer below it."""
    page = Image.new("RGB", (_SIDE, _HEAD + _SIDE + _FOOT), "white")
    page.paste(draw_panel(example.image, example.patches, example.grid, _SIDE), (0, _HEAD))
    draw, mark = ImageDraw.Draw(page), {None: "", True: "✓ ", False: "✗ "}[example.is_correct]
    answer_color = {None: style.INK, True: "#00735a", False: "#b54708"}[example.is_correct]
    small, bold = font(21), font(22, bold=True)
    draw.text((0, _HEAD - 12), example.title, style.INK, font(25, bold=True), anchor="ls")
    draw.text((_SIDE, _HEAD - 12), example.category, style.SOFT, small, anchor="rs")
    baseline = _HEAD + _SIDE + 28
    for line in wrap_pixels(example.text, _SIDE, small, max_lines=2):
        draw.text((0, baseline), line, style.INK, small, anchor="ls")
        baseline += 26
    for line in wrap_pixels(mark + example.answer, _SIDE, bold, max_lines=2):
        draw.text((0, baseline + 4), line, answer_color, bold, anchor="ls")
        baseline += 26
    return page


def wrap_pixels(
    text: str, width: int, typeface: ImageFont.FreeTypeFont, max_lines: int
) -> list[str]:
    """Breaks text into at most `max_lines` lines that fit a width in pixels."""
    lines = []
    for characters in range(width // 4, 3, -1):
        lines = wrap(text, characters, max_lines=max_lines, placeholder="…")
        if all(typeface.getlength(line) <= width for line in lines):
            break
    return lines
