"""The number of tokens that the policy keeps, and its dependence on image and question."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Shaped
from matplotlib.axes import Axes

from stepprune_jax.evaluation.accuracy import families, full_row
from stepprune_jax.evaluation.names import ALL, DEFAULT
from stepprune_jax.evaluation.report import Report
from stepprune_jax.evaluation.statistics import scene_counts, spearman
from stepprune_jax.visualize import style
from stepprune_jax.visualize.excerpts import default_record, group

FEWEST = 20  # minimum number of questions in a bucket for showing accuracy


def count_buckets(count: Int[np.ndarray, "q"]) -> Int[np.ndarray, "edges"]:
    """Returns the edges of up to 14 buckets of equal width that hold every count."""
    low, high = int(count.min()), int(count.max())
    width = -(-(high + 1 - low) // 14)
    return np.arange(low, high + width + 1, width)


def draw_histogram(path: str | Path, report: Report) -> Path:
    """Draws how often each K occurs, and the accuracy of those questions.

    It shows the default policy, adaptive, at the middle budget. Accuracy is shown, with its
    standard error, in buckets of at least 20 questions, next to that of all tokens on the same
    questions.

    Args:
        path: the PNG to write.
        report: a checked report.

    Returns:
        The path.
    """
    record, full = default_record(report), full_row(report.records)
    curves = [
        Curve(f"accuracy, {full.method}", style.COLOURS[ALL], "D", full.correct),
        Curve(
            f"accuracy, {record.method}, {record.mode}", style.COLOURS[DEFAULT], "o", record.correct
        ),
    ]
    return draw_counts(path, record.count, report.num_tokens, curves)


class Curve(NamedTuple):
    """Accuracy of one method against K of another.

    Attributes:
        label: label in the legend.
        colour: colour of the line.
        marker: marker of the points.
        worth: grade of each answer, from 0 to 1.
    """

    label: str
    colour: str
    marker: str
    worth: Shaped[np.ndarray, "q"]


def draw_counts(
    path: str | Path,
    count: Int[np.ndarray, "q"],
    num_tokens: int,
    curves: Sequence[Curve],
    title: str = "",
) -> Path:
    """Draws how often each K occurs, and the quality of the answers to those questions.

    Args:
        path: the PNG to write.
        count: K of each question.
        num_tokens: N.
        curves: drawn, with a standard error, in buckets of at least 20 questions.
        title: title above the axes.

    Returns:
        The path.
    """
    edges = count_buckets(count)
    number, _ = np.histogram(count, edges)
    middle = (edges[:-1] + edges[1:] - 1) / 2
    with style.canvas(7, 3.8) as figure:
        axes = figure.add_subplot()
        width = edges[1] - edges[0]
        axes.bar(middle, number, width=0.86 * width, color="#d5dbe5", label="questions (left axis)")
        axes.set_ylim(0, 2.1 * number.max())  # the lower half; the curves have the upper
        axes.set_yticks([t for t in axes.get_yticks() if t <= 1.05 * number.max()])
        axes.set_ylabel("questions", y=0.25)
        axes.set_xlabel(f"K, tokens kept of {num_tokens}")
        axes.set_title(title)
        axes.annotate(
            f"mean {count.mean():.1f}",
            (count.mean(), 0),
            ha="center",
            xytext=(count.mean(), 1.1 * number.max()),
            color=style.SOFT,
            arrowprops={"arrowstyle": "-", "color": style.SOFT, "linestyle": (0, (4, 3))},
        )
        right = axes.twinx()
        right.spines["right"].set_visible(True)
        enough = np.flatnonzero(number >= min(FEWEST, number.max()))
        bucket = np.digitize(count, edges) - 1
        for curve in curves:
            share = np.full(len(number), np.nan)  # a gap where there are too few questions
            share[enough] = [100 * curve.worth[bucket == i].mean() for i in enough]
            error = np.sqrt(share * (100 - share) / np.maximum(number, 1))
            right.errorbar(
                middle,
                share,
                yerr=error,
                marker=curve.marker,
                color=curve.colour,
                linewidth=1.6,
                elinewidth=0.8,
                label=curve.label,
            )
        low = min(80.0, 10 * (right.get_ylim()[0] // 10))
        right.set_ylim(low - 1.15 * (100 - low), 100 + 0.06 * (100 - low))
        right.set_yticks(np.linspace(low, 100, 3))
        right.set_ylabel("accuracy, %", y=0.76)
        handles = [*right.get_legend_handles_labels()[0], axes.patches[0]]
        names = [*right.get_legend_handles_labels()[1], "questions (left axis)"]
        figure.legend(handles, names, loc="outside upper center", ncols=3)
        style.tidy(figure)
        return style.save(figure, path)


def draw_complexity(path: str | Path, report: Report) -> Path:
    """Draws K against the needs of image and question.

    It shows the default policy, adaptive, at the middle budget. Boxes span the middle half of the
    questions, whiskers 90 %. Without scenes, only the question families are drawn.

    Args:
        path: the PNG to write.
        report: a checked report.

    Returns:
        The path.
    """
    count = default_record(report).count
    panels = 1 if report.scenes is None else 3
    with style.canvas(3.6 if panels == 1 else 9, 3.4) as figure:
        all_axes = figure.subplots(1, panels, squeeze=False, width_ratios=[1, 1, 0.9][:panels])[0]
        if report.scenes is not None:
            objects, relevant = scene_counts(report.scenes)
            _draw_boxes(all_axes[0], count, objects, "objects in the image")
            _draw_boxes(all_axes[1], count, relevant, "patches the answer depends on")
            top = max(axes.get_ylim()[1] for axes in all_axes[:2])
            for axes in all_axes[:2]:
                axes.set_ylim(0, top)
        _draw_kinds(all_axes[-1], count, families(report.questions))
        style.tidy(figure, wspace=0.06)
        return style.save(figure, path)


def _draw_boxes(
    axes: Axes, count: Int[np.ndarray, "q"], by: Int[np.ndarray, "q"], label: str
) -> None:
    """Draws boxes of K for groups of questions, with the rank correlation as title."""
    names, members = group(by, most=8 if len(np.unique(by)) <= 8 else 6)
    axes.boxplot(
        [count[inside] for inside in members],
        whis=(5, 95),
        showfliers=False,
        widths=0.62,
        patch_artist=True,
        boxprops={"facecolor": "#cfe3f1", "edgecolor": style.COLOURS[DEFAULT]},
        medianprops={"color": style.COLOURS[DEFAULT], "linewidth": 2},
        whiskerprops={"color": style.COLOURS[DEFAULT]},
        showcaps=False,
    )
    axes.set_xticks(range(1, len(names) + 1), names, fontsize=7.5)
    axes.set_ylabel("K")
    axes.set_xlabel(label)
    together = spearman(count, by)
    value = "undefined" if together is None else f"{together:.2f}"
    axes.set_title(f"Spearman \N{GREEK SMALL LETTER RHO} = {value}")
    style.lines_across(axes)
    axes.tick_params(axis="x", length=0)


def _draw_kinds(
    axes: Axes,
    count: Int[np.ndarray, "q"],
    members: dict[str, Bool[np.ndarray, "q"]],
) -> None:
    """Draws the mean K of each question family, the largest on top."""
    names = list(members)
    means = np.array([count[inside].mean() for inside in members.values()])
    order = np.argsort(means, kind="stable")
    axes.barh(range(len(order)), means[order], height=0.68, color=style.COLOURS[DEFAULT])
    for place, i in enumerate(order):
        axes.annotate(
            f"{means[i]:.1f}",
            (means[i], place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(order)), [names[i] for i in order])
    axes.set_xlim(0, max(means.max(), 1) * 1.16)
    axes.set_xlabel("mean K")
    axes.set_title("by question family")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
