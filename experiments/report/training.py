"""Curves of the training of a small model."""

from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from stepprune_jax.settings import is_number
from stepprune_jax.visualize import style
from stepprune_jax.workdir.metrics import read_rows

_BLUE, _ORANGE, _GREEN = "#0072b2", "#d55e00", "#009e73"
# Title of each panel, and key, name and colour of its curves.
_PANELS = (
    ("loss", (("loss", "total", _BLUE), ("lm_loss", "language model", _ORANGE))),
    (
        "share of words predicted correctly",
        (("told", "answers", _BLUE), ("mention_number", "numbers mentioned", _ORANGE)),
    ),
    ("error of places mentioned", (("mention_error", "", _GREEN),)),
)


def read_metrics(path: Path) -> dict[str, Float[np.ndarray, "rows"]]:
    """Reads `metrics.jsonl`: an array for each key with numbers, NaN on lines that lack it."""
    rows = read_rows(path)
    keys = dict.fromkeys(k for row in rows for k, v in row.items() if is_number(v))

    def number(value: object) -> float:
        return float(value) if is_number(value) else np.nan

    return {key: np.array([number(row.get(key)) for row in rows]) for key in keys}


def draw_training(path: Path, metrics_file: Path) -> None:
    """Draws losses, and what is predicted correctly, against the step; not what is missing."""
    metrics = read_metrics(metrics_file)
    panels = [p for p in _PANELS if any(key in metrics for key, _, _ in p[1])]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    with style.canvas(3 * columns, 2.1 * rows + 0.2) as figure:
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, (title, curves) in zip(grid, panels, strict=False):
            _draw_panel(axes, metrics, title, curves)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        for axes in grid[max(0, len(panels) - columns) : len(panels)]:
            axes.set_xlabel("step")
        figure.set_layout_engine("constrained")
        style.save(figure, path)


def _draw_panel(axes: Axes, metrics: dict[str, np.ndarray], title: str, curves: tuple) -> None:
    """Draws the curves of one panel: as logged, faint, and their running mean."""
    axes.set_title(title)
    named = False
    for key, name, colour in curves:
        if key not in metrics:
            continue
        fine = np.isfinite(metrics[key])
        step, value = metrics["step"][fine], metrics[key][fine]
        smooth = running_mean(value, max(1, len(value) // 25))
        axes.plot(step, value, color=colour, linewidth=0.8, alpha=0.3)
        axes.plot(step, smooth, color=colour, linewidth=1.6, label=name or None)
        named |= bool(name)
    if named:
        axes.legend(loc="best", handlelength=1.2, fontsize=7.5)
    axes.grid(axis="y")


def running_mean(values: Float[np.ndarray, "rows"], reach: int) -> Float[np.ndarray, "rows"]:
    """Averages over `reach` neighbours on either side, fewer at the ends."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    i = np.arange(len(values))
    low, high = np.maximum(i - reach, 0), np.minimum(i + reach + 1, len(values))
    return (total[high] - total[low]) / (high - low)
