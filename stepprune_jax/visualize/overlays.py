"""Images with the patches of their kept tokens."""

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

_SIDE, _GAP, _HEAD, _FOOT = 384, 28, 50, 116  # pixels


class Overlay(NamedTuple):
    """An image with its kept patches in the order of choice, question and answer.

    Attributes:
        image: the image.
        patches: kept patches of the square image, in the order of choice.
        title: text above the image, on the left.
        category: text above the image, on the right.
        text: the question.
        answer: the answer.
        is_correct: whether the answer is correct; None if unknown.
        grid: patches along an edge of the image, padded to a square.
    """

    image: str | Path | bytes | Image.Image
    patches: Sequence[int] | Int[np.ndarray, "k"]
    title: str
    category: str
    text: str
    answer: str
    is_correct: bool | None
    grid: int


def shortened(text: str, max_length: int) -> str:
    """Returns a text on one line, cut to `max_length` characters."""
    text = " ".join(text.split())
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def judged(answer: str, correct: str, is_correct: bool) -> str:
    """Shortens an answer, and adds the correct answer if they differ."""
    short_answer = shortened(answer, 24)
    return short_answer if is_correct else f"{short_answer}  (correct: {shortened(correct, 16)})"


def draw_answer(
    path: str | Path,
    model: VLM,
    images: Sequence[Image.Image],
    question: str,
    answer: Answer,
) -> Path:
    """Draws the images of a prompt as the model sees them, with the kept tokens, as a PNG."""
    overlays = []
    for image, grid, indices in zip(images, answer.grids, answer.kept_indices, strict=True):
        panel = seen_patches(model, image, grid, indices)
        merged = sum(index < 0 for index in indices)
        overlays.append(
            Overlay(
                image=panel.image,
                patches=panel.patches,
                title=f"{len(indices)} kept" + (f", {merged} merged" if merged else ""),
                category=f"of {model.backbone.num_tokens(np.array([grid]))[0]}",
                text=question,
                answer=shortened(answer.text, 40),
                is_correct=None,
                grid=panel.grid,
            )
        )
    draw_rows(path, [overlays])
    return Path(path)


class SquareImage(NamedTuple):
    """An image in the middle of a square with `grid` patches along an edge, and kept patches."""

    image: Image.Image
    grid: int
    patches: list[int]


def seen_patches(
    model: VLM, image: Image.Image, grid: tuple[int, int], indices: Sequence[int]
) -> SquareImage:
    """Pads an RGB image to a square, and returns it with the patches of its kept tokens.

    Merged tokens have no patch and are left out.
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
    """Draws rows of examples as a PNG, without resampling the panels."""
    if isinstance(out, str | Path):
        Path(out).parent.mkdir(parents=True, exist_ok=True)
    width, height = _SIDE + _GAP, _HEAD + _SIDE + _FOOT
    page = Image.new("RGB", (max(map(len, rows)) * width, len(rows) * height), "white")
    for r, members in enumerate(rows):
        for c, example in enumerate(members):
            page.paste(_draw_overlay(example), (_GAP // 2 + c * width, r * height))
    page.save(out, "PNG", optimize=True)


def _draw_overlay(example: Overlay) -> Image.Image:
    """Draws one panel: title and category above the image, question and answer below."""
    page = Image.new("RGB", (_SIDE, _HEAD + _SIDE + _FOOT), "white")
    page.paste(draw_panel(example.image, example.patches, example.grid, _SIDE), (0, _HEAD))
    draw, mark = (
        ImageDraw.Draw(page),
        {None: "", True: "✓ ", False: "✗ "}[example.is_correct],
    )
    colour = {None: style.INK, True: "#00735a", False: "#b54708"}[example.is_correct]
    small, bold = font(21), font(22, bold=True)
    draw.text((0, _HEAD - 12), example.title, style.INK, font(25, bold=True), anchor="ls")
    draw.text((_SIDE, _HEAD - 12), example.category, style.SOFT, small, anchor="rs")
    base = _HEAD + _SIDE + 28
    for line in wrap_pixels(example.text, _SIDE, small, max_lines=2):
        draw.text((0, base), line, style.INK, small, anchor="ls")
        base += 26
    for line in wrap_pixels(mark + example.answer, _SIDE, bold, max_lines=2):
        draw.text((0, base + 4), line, colour, bold, anchor="ls")
        base += 26
    return page


def wrap_pixels(
    text: str, width: int, typeface: ImageFont.FreeTypeFont, max_lines: int
) -> list[str]:
    """Breaks text into at most `max_lines` lines that fit a width in pixels."""
    lines = []
    for per_line in range(width // 4, 3, -1):
        lines = wrap(text, per_line, max_lines=max_lines, placeholder="…")
        if all(typeface.getlength(line) <= width for line in lines):
            break
    return lines
