"""Curves of a training run, of a policy or of a small model."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes

from stepprune_jax.data.json_files import read_json_lines
from stepprune_jax.settings import is_number
from stepprune_jax.visualize import style

_ALPHA = "\N{GREEK SMALL LETTER ALPHA}"
_BLUE, _ORANGE, _GREEN = "#0072b2", "#d55e00", "#009e73"
# Title of each panel, and key, name and colour of its curves.
_PANELS = (
    ("loss", (("loss", "total", _BLUE), ("lm_loss", "language model", _ORANGE))),
    ("K: mean ± standard deviation", (("k_mean", "hard", _BLUE), ("k_soft", "expected", _ORANGE))),
    (f"IoU of {{{_ALPHA} > ½}} and the selection", (("iou", "", _BLUE),)),
    (f"gate {_ALPHA}", (("alpha_in", "selected", _BLUE), ("alpha_out", "not selected", _ORANGE))),
    ("entropy of a choice, nats", (("entropy", "", _BLUE),)),
    ("gradient norm of the stop", (("grad_norm_stop", "", _GREEN),)),
    (
        "share of words predicted correctly",
        (("told", "answers", _BLUE), ("mention_number", "numbers mentioned", _ORANGE)),
    ),
    ("error of places mentioned", (("mention_error", "", _GREEN),)),
)


def read_metrics(path: str | Path) -> dict[str, Float[np.ndarray, "rows"]]:
    """Reads `metrics.jsonl`: an array for each key with numbers, NaN on lines that lack it."""
    rows: list[dict[str, Any]] = []
    for where, row in read_json_lines(path):
        if not is_number(row.get("step")):
            raise ValueError(f"{where}: expected an object with a number 'step'")
        rows.append(row)
    keys = dict.fromkeys(k for row in rows for k, v in row.items() if is_number(v))

    def number(value: Any) -> float:
        return float(value) if is_number(value) else np.nan

    return {key: np.array([number(row.get(key)) for row in rows]) for key in keys}


def draw_training(path: str | Path, metrics_file: str | Path) -> Path:
    """Draws loss, K, agreement, gates, entropy and the gradient of the stop against the step.

    Panels whose keys are missing are omitted.
    """
    metrics = read_metrics(metrics_file)
    panels = [p for p in _PANELS if any(key in metrics for key, _, _ in p[1])]
    if not panels:
        wanted = ", ".join(key for _, curves in _PANELS for key, _, _ in curves)
        raise ValueError(f"{metrics_file}: none of these keys is on any line: {wanted}")
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
    return Path(path)


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
        if key == "k_mean" and "k_std" in metrics:
            std = running_mean(np.nan_to_num(metrics["k_std"][fine]), max(1, len(value) // 25))
            axes.fill_between(step, smooth - std, smooth + std, color=colour, alpha=0.14, lw=0)
    if named:
        axes.legend(loc="best", handlelength=1.2, fontsize=7.5)
    if all(key in ("iou", "alpha_in", "alpha_out") for key, _, _ in curves):
        axes.set_ylim(-0.03, 1.03)
    axes.grid(axis="y")


def running_mean(values: Float[np.ndarray, "rows"], reach: int) -> Float[np.ndarray, "rows"]:
    """Averages over `reach` neighbours on either side, fewer at the ends."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    i = np.arange(len(values))
    low, high = np.maximum(i - reach, 0), np.minimum(i + reach + 1, len(values))
    return (total[high] - total[low]) / (high - low)
