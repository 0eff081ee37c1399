"""Images with the patches of their kept tokens."""

import io
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten, wrap
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from matplotlib.figure import Figure
from PIL import Image

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.inference.answer import Answer
from stepprune_jax.visualize import style
from stepprune_jax.visualize.patches import draw_panel, font, square_patches

_SIDE, _GAP, _HEAD, _FOOT = 384, 28, 50, 116  # pixels


class Overlay(NamedTuple):
    """An image with its kept patches in the order of choice, question and answer.

    `title` and `category` stand above it; `right` is None if unknown; `grid` counts patches along
    an edge, once the image is padded to a square.
    """

    image: str | Path | bytes | Image.Image
    patches: Sequence[int] | Int[np.ndarray, "k"]
    title: str
    category: str
    text: str
    answer: str
    right: bool | None
    grid: int


def judged(answer: str, correct: str, right: bool) -> str:
    """Shortens an answer, and adds the correct one unless the answer is right."""
    said = shorten(answer, 24, placeholder="…")
    return said if right else f"{said}  (correct: {shorten(correct, 16, placeholder='…')})"


def draw_answer(
    path: str | Path,
    model: VLM,
    images: Sequence[Image.Image],
    question: str,
    answer: Answer,
) -> Path:
    """Draws the images of a prompt as the model sees them, with the kept tokens, as a PNG."""
    shown = []
    for image, grid, indices in zip(images, answer.grids, answer.kept_indices, strict=True):
        panel = seen_patches(model, image, grid, indices)
        merged = sum(index < 0 for index in indices)
        shown.append(
            Overlay(
                image=panel.image,
                patches=panel.patches,
                title=f"{len(indices)} kept" + (f", {merged} merged" if merged else ""),
                category=f"of {_num_tokens(model, grid)}",
                text=question,
                answer=shorten(answer.text, 40, placeholder="…"),
                right=None,
                grid=panel.grid,
            )
        )
    draw_rows(path, [shown])
    return Path(path)


class Seen(NamedTuple):
    """A square of `grid` patches along an edge with the image in its middle, and kept patches."""

    image: Image.Image
    grid: int
    patches: list[int]


def seen_patches(
    model: VLM, image: Image.Image, grid: tuple[int, int], indices: Sequence[int]
) -> Seen:
    """Finds the patches of an RGB image's kept tokens, and pads both to a square.

    Merged tokens and a class token, which are no patch, are left out.
    """
    config, (rows, columns) = model.config, grid
    image = config.family.seen(config, model.image_settings, image)
    # Some models have a class token in front of the patches.
    first = _num_tokens(model, grid) - rows * columns
    side = max(grid)
    top, left = (side - rows) // 2, (side - columns) // 2
    square = Image.new("RGB", (image.width * side // columns, image.height * side // rows), "white")
    square.paste(image, (image.width * left // columns, image.height * top // rows))
    return Seen(square, side, square_patches(indices, grid, first).tolist())


def _num_tokens(model: VLM, grid: tuple[int, int]) -> int:
    """Returns the visual tokens of an image with a grid."""
    return int(model.config.family.num_tokens(model.config, np.array([grid]))[0])


def draw_rows(out: str | Path | io.BytesIO, rows: Sequence[Sequence[Overlay]]) -> None:
    """Draws rows of examples as a PNG, laid out in pixels so that none is resampled."""
    if isinstance(out, str | Path):
        Path(out).parent.mkdir(parents=True, exist_ok=True)
    row_height = _HEAD + _SIDE + _FOOT
    width, height = max(map(len, rows)) * (_SIDE + _GAP), len(rows) * row_height
    with style.canvas(width / style.DPI, height / style.DPI) as figure:
        for r, members in enumerate(rows):
            for c, example in enumerate(members):
                left, top = _GAP // 2 + c * (_SIDE + _GAP), r * row_height + _HEAD
                _draw_overlay(figure, example, left, top)
        style.save(figure, out)


def _draw_overlay(figure: Figure, example: Overlay, left: int, top: int) -> None:
    """Draws one panel, with K above it and the question and the answers below."""
    width, height = (round(inches * style.DPI) for inches in figure.get_size_inches())
    panel = draw_panel(example.image, example.patches, example.grid, _SIDE)
    # figimage counts from below, in pixels of the figure.
    figure.figimage(np.asarray(panel), left, height - top - _SIDE, origin="upper")

    def write(x: int, y: int, text: str, **look) -> None:
        figure.text((left + x) / width, 1 - y / height, text, **look)

    write(0, top - 12, example.title, weight="bold", fontsize=9, va="baseline")
    write(
        _SIDE, top - 12, example.category, ha="right", va="baseline", fontsize=7.5, color=style.SOFT
    )
    lines = wrap_pixels(example.text, _SIDE, 21, most=2)
    for n, line in enumerate(lines):
        write(0, top + _SIDE + 28 + 26 * n, line, va="baseline", fontsize=7.5)
    mark = "" if example.right is None else "✓ " if example.right else "✗ "
    colours = {None: style.INK, True: "#00735a", False: "#b54708"}
    write(
        0,
        top + _SIDE + 32 + 26 * len(lines),
        mark + example.answer,
        va="baseline",
        fontsize=8,
        weight="bold",
        color=colours[example.right],
    )


def wrap_pixels(text: str, width: int, size: int, most: int) -> list[str]:
    """Breaks text in a type size into at most `most` lines that fit a width in pixels."""
    typeface, text = font(size), " ".join(text.split())
    per_line = max(len(text), 1)
    while per_line > 4 and any(
        typeface.getlength(line) > width for line in wrap(text, per_line, break_long_words=True)
    ):
        per_line -= 1
    lines = wrap(text, per_line)
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1][: per_line - 1].rstrip() + "…"]
    return lines
