"""Retention against the tokens kept and what they cost, and accuracy by question family."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from stepprune_jax.evaluation.accuracy import families, full_row
from stepprune_jax.evaluation.names import ALL, DEFAULT, without_own_stop
from stepprune_jax.evaluation.report import Report
from stepprune_jax.visualize import style
from stepprune_jax.visualize.excerpts import tightest

Row = dict[str, Any]
_LEGEND_COLUMNS = 3
# Inches of a figure and of its axes. Names of up to 24 characters fit beside them, longer ones make
# the figure wider.
_WIDTH, _LEFT, _AXES = 7, 0.595, 4.69
_CHARACTERS, _CHARACTER = 24, 0.07
# Fields of the table that say what an answer costs, and how their axes are called.
_COSTS = {
    "ms": "time of an answer, ms",
    "gflops": "operations to the first token, GFLOPs",
}


def draw_accuracy(path: str | Path, table: Sequence[Row], num_tokens: int) -> Path:
    """Draws retention against kept tokens, for every method of a table.

    Exact counts are solid lines, adaptive ones dashed with hollow markers; names stand at the ends
    of the lines. Bars are standard deviations over training runs, where a row has
    `retention_std`.

    Args:
        path: the PNG to write.
        table: the rows: method, mode, mean_k and retention.
        num_tokens: visual tokens of an image.

    Returns:
        The path.
    """
    names = [row["method"] for row in table]
    palette, signs = style.colours(names), style.markers(names)
    width = _WIDTH + _CHARACTER * max(0, max(map(len, names)) - _CHARACTERS)
    with style.canvas(width, 4.3) as figure:
        axes = figure.add_axes((_LEFT / width, 0.15, _AXES / width, 0.79))
        axes.axhline(100, color=style.SOFT, linewidth=0.8, linestyle=(0, (1, 2)))
        axes.plot(num_tokens, 100, "o", color=palette[ALL], clip_on=False)
        ends = []
        for method in dict.fromkeys(names):
            if method != ALL:
                ends.append(_draw_method(axes, table, method, palette[method], signs[method]))
        _scale(axes, table, num_tokens)
        _name_lines(axes, [end for end in ends if end])
        axes.set_ylabel("retention: % of the accuracy with all tokens")
        axes.legend(handles=_modes(), loc="lower left", handlelength=2.6)
        return style.save(figure, path)


def draw_costs(path: str | Path, table: Sequence[Row]) -> Path | None:
    """Draws retention against the time of an answer and against operations.

    A panel each, without those that the table does not know. A line joins the budgets of a method,
    as in `draw_accuracy`.

    Args:
        path: the PNG to write.
        table: rows as in `draw_accuracy`, with the fields "ms" or "gflops".

    Returns:
        The path; None, and no file, if the table knows neither.
    """
    known = [field for field in _COSTS if any(row.get(field) for row in table)]
    if not known:
        return None
    methods = [*dict.fromkeys(row["method"] for row in table)]
    palette, signs = style.colours(methods), style.markers(methods)
    lines = -(-(len(methods) + len(_modes())) // _LEGEND_COLUMNS)
    with style.canvas(7, 3.3 + 0.17 * lines) as figure:
        panels = figure.subplots(1, len(known), sharey=True, squeeze=False)[0]
        for axes, field in zip(panels, known, strict=True):
            axes.axhline(100, color=style.SOFT, linewidth=0.8, linestyle=(0, (1, 2)))
            for method in methods:
                _draw_method(axes, table, method, palette[method], signs[method], field)
            axes.set_xlabel(_COSTS[field])
            style.lines_across(axes)
        panels[0].set_ylabel("retention, %")
        handles = [
            Line2D([], [], color=palette[name], marker=signs[name], label=name) for name in methods
        ]
        figure.legend(
            handles=[*handles, *_modes()], loc="outside lower center", ncols=_LEGEND_COLUMNS
        )
        style.tidy(figure)
        return style.save(figure, path)


def _modes() -> list[Line2D]:
    """Entries of a legend that tell exact from adaptive lines."""
    look: dict[str, Any] = {"color": style.SOFT, "marker": "o"}
    return [
        Line2D([], [], **look, label="exact: K tokens for every image"),
        Line2D(
            [],
            [],
            **look,
            markerfacecolor="white",
            linestyle="--",
            label="adaptive: K tokens on average",
        ),
    ]


def _draw_method(
    axes: Axes,
    table: Sequence[Row],
    method: str,
    colour: str,
    marker: str,
    field: str = "mean_k",
) -> tuple[float, float, str, str] | None:
    """Draws a method's lines against a field of the table.

    Returns:
        Where they end, the method's name and its colour; None if there is nothing to draw.
    """
    alone = without_own_stop(method)
    main = alone in style.COLOURS
    look: dict[str, Any] = {"color": colour, "linewidth": 1.8 if main else 1.0}
    look["zorder"] = 5 if method == DEFAULT else 3
    end = None
    for mode, form in (
        ("adaptive", {"linestyle": "--", "markerfacecolor": "white"}),
        ("exact", {"linestyle": "-"}),
    ):
        rows = [r for r in table if (r["method"], r["mode"]) == (method, mode)]
        rows = [r for r in sorted(rows, key=lambda r: -r["mean_k"]) if _has_place(r, field)]
        if rows:
            x, y = [r[field] for r in rows], [r["retention"] for r in rows]
            if method != alone:
                form = {"markersize": 11}
            axes.plot(x, y, marker=marker, **look, **form)
            if field == "mean_k":
                bars = [r.get("retention_std") or 0 for r in rows]
                axes.errorbar(x, y, bars, fmt="none", ecolor=colour, elinewidth=0.8, alpha=0.6)
            end = (x[-1], y[-1], method, colour)
    return end


def _has_place(row: Row, field: str = "mean_k") -> bool:
    """Returns whether a row can be drawn: retention is known, and the number is positive."""
    return row["retention"] is not None and (row.get(field) or 0) > 0


def _scale(axes: Axes, table: Sequence[Row], num_tokens: int) -> None:
    """Sets a logarithmic axis from all tokens down, marked at the budgets."""
    budgets = {num_tokens, *(round(r["mean_k"]) for r in table if r["mode"] == "exact")}
    least = min([r["mean_k"] for r in table if _has_place(r)], default=1)
    axes.set_xscale("log")
    axes.set_xlim(num_tokens * 1.08, least * 0.92)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator(sorted(budgets)))
    names = [
        f"{k}\nall" if k == num_tokens else f"{k}\n{100 * (1 - k / num_tokens):.1f}"
        for k in sorted(budgets)
    ]
    axes.xaxis.set_major_formatter(FixedFormatter(names))
    axes.set_xlabel("visual tokens kept (log scale), and share pruned in %")
    style.lines_across(axes)


def _name_lines(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Writes names to the right of the ends of lines, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    places = style.spread([y for _, y, _, _ in ends], gap=(high - low) * 0.048)
    edge = axes.get_xlim()[1]
    for (x, y, name, colour), place in zip(ends, places, strict=True):
        axes.annotate(
            name,
            (x, y),
            xytext=(edge * 0.93, place),
            color=colour,
            va="center",
            fontsize=8.5,
            weight="bold" if name == DEFAULT else "normal",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.5,
                "alpha": 0.6,
                "shrinkA": 1,
                "shrinkB": 4,
            },
        )


def draw_families(path: str | Path, report: Report) -> Path:
    """Draws the accuracy of each question family at the tightest budget, one line per family.

    It compares all tokens; the default policy, adaptive and exact; and the best other method. Bars
    are standard errors.

    Args:
        path: the PNG to write.
        report: a report from `check_report`.

    Returns:
        The path.
    """
    palette = style.colours([row["method"] for row in report.table])
    kinds = families(report.questions)
    shown = [full_row(report.records), *tightest(report)]
    with style.canvas(7, 1.25 + 0.36 * len(kinds)) as figure:
        axes = figure.add_subplot()
        offsets = np.linspace(0.24, -0.24, len(shown))
        for record, offset in zip(shown, offsets, strict=True):
            correct = [record.correct[members] for members in kinds.values()]
            share = np.array([100 * c.mean() for c in correct])
            error = np.array([100 * np.sqrt(c.mean() * (1 - c.mean()) / len(c)) for c in correct])
            adaptive = record.mode == "adaptive"
            name = record.method
            if name != ALL:
                name += f", {record.mode}, {record.count.mean():.0f} tokens"
            axes.errorbar(
                share,
                np.arange(len(kinds))[::-1] + offset,
                xerr=error,
                label=name,
                fmt="D" if record.method == ALL else "o",
                color=palette[record.method],
                markerfacecolor="white" if adaptive else None,
                elinewidth=0.9,
                capsize=0,
            )
        numbers = [int(members.sum()) for members in kinds.values()]
        names = [f"{kind} ({n})" for kind, n in zip(kinds, numbers, strict=True)]
        axes.set_yticks(np.arange(len(kinds))[::-1], names)
        for row in range(0, len(kinds), 2):
            axes.axhspan(row - 0.5, row + 0.5, color="#f5f7fa", zorder=0)
        axes.set_ylim(-0.5, len(kinds) - 0.5)
        style.lines_across(axes, "x")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("accuracy, % (number of questions in parentheses)")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
        style.tidy(figure)
        return style.save(figure, path)
