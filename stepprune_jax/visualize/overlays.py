"""Test images with the patches that the policy keeps."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten, wrap
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from matplotlib.figure import Figure
from PIL import Image

from stepprune_jax.checkpoints.load import VLM
from stepprune_jax.evaluation.records import Records
from stepprune_jax.evaluation.report import Report, square_patches
from stepprune_jax.inference.answer import Answer
from stepprune_jax.visualize import style
from stepprune_jax.visualize.excerpts import default_record
from stepprune_jax.visualize.patches import draw_panel, font

ROWS = (("few tokens", 0.05), ("about the median", 0.5), ("many tokens", 0.95))
_SIDE, _GAP, _LEFT, _HEAD, _FOOT = 384, 28, 64, 50, 116  # pixels


class Overlay(NamedTuple):
    """An image with its kept patches, question and answer.

    Attributes:
        image: the image.
        patches: kept patches in the order of choice.
        title: text above the image, on the left.
        category: text above the image, on the right.
        text: the question.
        answer: the answer.
        right: whether the answer is correct; `None` if unknown.
        grid: patches along an edge, once the image is padded to a square.
    """

    image: str | Path | Image.Image
    patches: Sequence[int] | Int[np.ndarray, "k"]
    title: str
    category: str
    text: str
    answer: str
    right: bool | None
    grid: int


def choose(
    report: Report,
    count: Int[np.ndarray, "q"],
    share: float,
    number: int,
    taken: Sequence[int] = (),
) -> list[int]:
    """Chooses examples around a quantile of K, without using answers or selections.

    Among the tenth of the questions nearest to the quantile in rank of K, the first in file order
    are taken, preferring an image and a family not shown yet.

    Args:
        report: a checked report.
        count: K of each question.
        share: the quantile, 0 to 1.
        number: number of examples; fewer are returned if there are fewer questions.
        taken: questions that are already shown.

    Returns:
        Indices of questions.
    """
    asked = len(count)
    ranked = np.argsort(count, kind="stable")
    width = min(asked, max(asked // 10, 3 * number))
    start = min(max(round(share * asked - width / 2), 0), asked - width)
    pool = sorted(int(i) for i in ranked[start : start + width])
    chosen: list[int] = []
    for _ in range(number):
        shown = [*taken, *chosen]
        images = [report.questions[i].image for i in shown]
        kinds = [report.questions[i].category for i in shown]
        left = [i for i in pool if i not in shown]
        if not left:
            break
        chosen.append(
            min(
                left,
                key=lambda i: (
                    images.count(report.questions[i].image),
                    kinds.count(report.questions[i].category),
                    i,
                ),
            )
        )
    return chosen


def choose_spread(
    report: Report, count: Int[np.ndarray, "q"], shares: Sequence[float], each: int = 1
) -> list[list[int]]:
    """Chooses `each` examples around every quantile in turn, none twice; see `choose`."""
    groups: list[list[int]] = []
    for share in shares:
        taken = [i for members in groups for i in members]
        groups.append(choose(report, count, share, each, taken))
    return groups


def draw_overlays(path: str | Path, report: Report) -> Path:
    """Draws rows of four examples of the default policy: few, medium and many tokens kept.

    Args:
        path: the PNG to write.
        report: a checked report.

    Returns:
        The path.

    Raises:
        FileNotFoundError: an image is missing.
        ValueError: an image cannot be read.
    """
    record = default_record(report)
    groups = choose_spread(report, record.count, [share for _, share in ROWS], 4)
    named = [
        (name, [_overlay(report, record, i) for i in members])
        for (name, _), members in zip(ROWS, groups, strict=True)
        if members
    ]
    return draw_rows(path, named)


def draw_hero(path: str | Path, report: Report) -> Path:
    """Draws one row of four examples, from few tokens kept to many.

    Args:
        path: the PNG to write.
        report: a checked report.

    Returns:
        The path.

    Raises:
        FileNotFoundError: an image is missing.
        ValueError: an image cannot be read.
    """
    record = default_record(report)
    groups = choose_spread(report, record.count, (0.05, 0.35, 0.65, 0.95))
    members = [_overlay(report, record, i) for group in groups for i in group]
    return draw_rows(path, [("", members)])


def _overlay(report: Report, record: Records, i: int) -> Overlay:
    """Builds the overlay of question i."""
    question, right = report.questions[i], bool(record.correct[i])
    return Overlay(
        image=question.image,
        patches=report.patches(record, i),
        title=f"K = {record.count[i]}",
        category=question.category,
        text=question.text,
        answer=judged(record.answer[i], report.answers[i], right),
        right=right,
        grid=report.side(i),
    )


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
    """Draws the images of a prompt as the model sees them, with the kept tokens.

    Args:
        path: the PNG to write.
        model: the model that answered.
        images: images of the prompt, RGB, at least one.
        question: the question.
        answer: the answer.

    Returns:
        The path.
    """
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
    with warnings.catch_warnings():
        # An answer may contain any character; those missing in the typeface become boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        return draw_rows(path, [("", shown)])


class Seen(NamedTuple):
    """A square with the image seen by the tower in its middle.

    Attributes:
        image: the square.
        grid: patches along an edge, including those beside the image.
        patches: patches of the kept tokens, in their order.
    """

    image: Image.Image
    grid: int
    patches: list[int]


def seen_patches(
    model: VLM, image: Image.Image, grid: tuple[int, int], indices: Sequence[int]
) -> Seen:
    """Finds the patches of an image's tokens, and pads both to a square.

    Args:
        model: the model that was shown the image.
        image: the image, RGB.
        grid: rows and columns of its tokens.
        indices: indices of tokens; merged ones and a class token, which are no patch, are skipped.

    Returns:
        The square.
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


def draw_rows(path: str | Path, rows: Sequence[tuple[str, Sequence[Overlay]]]) -> Path:
    """Draws rows of examples, laid out in pixels so that none is resampled.

    Args:
        path: the PNG to write; parent folders are created.
        rows: the label beside each row, and its examples; without any label no room is left for it.

    Returns:
        The path.

    Raises:
        FileNotFoundError: an image is missing.
        ValueError: an image cannot be read.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    margin = _LEFT if any(name for name, _ in rows) else _GAP // 2
    columns = max(len(members) for _, members in rows)
    width = margin + columns * (_SIDE + _GAP) - _GAP // 2
    row_height = _HEAD + _SIDE + _FOOT
    height = len(rows) * row_height
    with style.canvas(width / style.DPI, height / style.DPI) as figure:
        for r, (name, members) in enumerate(rows):
            top = r * row_height + _HEAD
            if name:
                figure.text(
                    0.4 * margin / width,
                    1 - (top + _SIDE / 2) / height,
                    name,
                    rotation=90,
                    ha="center",
                    va="center",
                    color=style.SOFT,
                    fontsize=9,
                )
            for c, example in enumerate(members):
                _draw_overlay(figure, example, margin + c * (_SIDE + _GAP), top)
        return style.save(figure, path)


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
    colour = style.INK if example.right is None else tick_colour(example.right)
    write(
        0,
        top + _SIDE + 32 + 26 * len(lines),
        mark + example.answer,
        va="baseline",
        fontsize=8,
        weight="bold",
        color=colour,
    )


def tick_colour(right: bool) -> str:
    """Returns the colour of a right or a wrong answer."""
    return "#00735a" if right else "#b54708"


def wrap_pixels(text: str, width: int, size: int, most: int) -> list[str]:
    """Breaks a line of text so that it fits a width.

    Args:
        text: any text; white space is collapsed.
        width: width in pixels.
        size: type size in pixels.
        most: maximum number of lines; longer text ends in an ellipsis.

    Returns:
        The lines.
    """
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
