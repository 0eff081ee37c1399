"""A row of images with their kept patches, drawn quickly during training."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from PIL import Image, ImageDraw

from stepprune_jax.benchmarks.shapes import is_right
from stepprune_jax.visualize.overlays import tick_colour, wrap_pixels
from stepprune_jax.visualize.patches import draw_panel, font
from stepprune_jax.visualize.style import INK

_SIDE, _GAP, _LINE, _TYPE = 336, 16, 22, 16  # pixels
_QUESTION_LINES = 2


class Example(NamedTuple):
    """One panel.

    Attributes:
        image: the image.
        order: kept patches, the first choice first.
        grid: rows and columns of patches.
        question: the question.
        answer: the model's answer.
        right: the correct answer.
    """

    image: Path
    order: Int[np.ndarray, "k"]
    grid: tuple[int, int]
    question: str
    answer: str
    right: str


def draw_strip(path: str | Path, examples: Sequence[Example]) -> Path:
    """Draws images side by side, each with K, the question and the answer below.

    Args:
        path: the PNG to write; parent folders are created.
        examples: at least one.

    Returns:
        The path.

    Raises:
        FileNotFoundError: an image is missing.
        ValueError: an image cannot be read.
    """
    height = _SIDE + _GAP + (2 + _QUESTION_LINES) * _LINE
    strip = Image.new("RGB", (len(examples) * (_SIDE + _GAP) - _GAP, height), "white")
    draw = ImageDraw.Draw(strip)
    for number, example in enumerate(examples):
        left = number * (_SIDE + _GAP)
        strip.paste(draw_panel(example.image, example.order, example.grid, _SIDE), (left, 0))
        good = is_right(example.answer, example.right)
        said = shorten(example.answer, 24, placeholder="…")
        if not good:
            said += f"  (correct: {shorten(example.right, 16, placeholder='…')})"
        lines = [(f"K = {len(example.order)}", INK, True)]
        asked = wrap_pixels(example.question, _SIDE, _TYPE, most=_QUESTION_LINES)
        lines += [(text, INK, False) for text in asked]
        lines.append((("✓ " if good else "✗ ") + said, tick_colour(good), True))
        for row, (text, colour, bold) in enumerate(lines):
            at = (left, _SIDE + _GAP // 2 + row * _LINE)
            draw.text(at, text, fill=colour, font=font(_TYPE, bold))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    strip.save(path)
    return path
