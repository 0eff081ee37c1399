"""The selection step by step: one patch per frame, then the answer."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from stepprune_jax.evaluation.records import Records
from stepprune_jax.evaluation.report import Report
from stepprune_jax.visualize.excerpts import default_record
from stepprune_jax.visualize.overlays import choose_spread, tick_colour, wrap_pixels
from stepprune_jax.visualize.patches import draw_panel, font, patch_box
from stepprune_jax.visualize.style import INK, SOFT

_SIDE, _GAP, _HEAD, _FOOT = 288, 24, 36, 92  # pixels
_STEP_MS, _FIRST_MS, _LAST_MS = 130, 900, 3500


def draw_selection(
    path: str | Path,
    report: Report,
    shares: Sequence[float] = (0.05, 0.5, 0.95),
) -> Path:
    """Animates the default policy on a few questions side by side.

    Colours are dropped, down to 16, until the file has at most 400 kB.

    Args:
        path: the GIF to write.
        report: a checked report.
        shares: a question is chosen around each of these quantiles of K.

    Returns:
        The path.

    Raises:
        FileNotFoundError: an image is missing.
        ValueError: an image cannot be read.
    """
    record = default_record(report)
    chosen = [i for members in choose_spread(report, record.count, shares) for i in members]
    longest = max(int(record.count[i]) for i in chosen)
    frames = [_frame(report, record, chosen, step) for step in range(longest + 1)]
    frames.append(_frame(report, record, chosen, longest + 1))
    duration = [_FIRST_MS, *[_STEP_MS] * longest, _LAST_MS]
    path, colours = Path(path), 255
    while True:
        _write(path, frames, duration, colours)
        if path.stat().st_size <= 400_000 or colours <= 16:
            return path
        colours //= 2


def _write(path: Path, frames: Sequence[Image.Image], duration: list[int], colours: int) -> None:
    """Writes frames with one palette; `optimize` then stores only the pixels that change."""
    some = [frames[0], frames[len(frames) // 2], frames[-1]]
    sheet = Image.new("RGB", (frames[0].width, 3 * frames[0].height))
    for i, frame in enumerate(some):
        sheet.paste(frame, (0, i * frame.height))
    palette = sheet.quantize(colours, method=Image.Quantize.FASTOCTREE)
    flat = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    flat[0].save(
        path,
        format="GIF",
        save_all=True,
        append_images=flat[1:],
        duration=duration,
        loop=0,
        optimize=True,
    )


def _frame(report: Report, record: Records, chosen: Sequence[int], step: int) -> Image.Image:
    """Draws all panels after `step` choices; one step after the last, with the answers."""
    size = (len(chosen) * (_SIDE + _GAP) + _GAP, _HEAD + _SIDE + _FOOT)
    frame = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(frame)
    for place, i in enumerate(chosen):
        left = _GAP + place * (_SIDE + _GAP)
        order = report.patches(record, i)[:step]
        grid = report.side(i)
        panel = draw_panel(report.questions[i].image, order, grid, _SIDE, marks=False)
        if 0 < step == len(order):
            left_, top, right, bottom = patch_box(order[-1], grid, _SIDE)
            newest = (left_, top, right - 1, bottom - 1)
            ImageDraw.Draw(panel).rectangle(newest, outline="#ffcf33", width=3)
        frame.paste(panel, (left, _HEAD))
        _caption(draw, report, record, i, left, step)
    return frame


def _caption(
    draw: ImageDraw.ImageDraw, report: Report, record: Records, i: int, left: int, step: int
) -> None:
    """Writes the count above a panel, and question and, once stopped, answer below."""
    count = int(record.count[i])
    kept = min(step, count)
    head = f"{kept} of {report.sizes[i]} tokens"
    draw.text((left, _HEAD - 10), head, fill=INK, font=font(15, bold=True), anchor="ls")
    if step > count:
        draw.text((left + _SIDE, _HEAD - 10), "stop", fill=SOFT, font=font(15), anchor="rs")
    y = _HEAD + _SIDE + 24
    for line in wrap_pixels(report.questions[i].text, _SIDE, 15, most=2):
        draw.text((left, y), line, fill=INK, font=font(15), anchor="ls")
        y += 20
    if step > count:
        right = bool(record.correct[i])
        text = ("✓ " if right else "✗ ") + record.answer[i]
        text = wrap_pixels(text, _SIDE, 16, most=1)[0]
        draw.text((left, y + 4), text, fill=tick_colour(right), font=font(16, True), anchor="ls")
