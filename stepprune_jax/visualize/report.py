"""The page of an evaluation: its tables, its figures and a few examples in one HTML file."""

import base64
import contextlib
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator
from PIL import Image

from stepprune_jax.benchmarks import Benchmark, BenchmarkQuestion
from stepprune_jax.benchmarks.answer_files import AnswerFile
from stepprune_jax.benchmarks.answers import GivenAnswer, read_answers
from stepprune_jax.benchmarks.questions import IMAGE_MARK
from stepprune_jax.evaluation.cells import Cell
from stepprune_jax.evaluation.names import DEFAULT, OWN_STOP, learned_stop, without_own_stop
from stepprune_jax.evaluation.scores import about_images
from stepprune_jax.evaluation.split import spread_over
from stepprune_jax.evaluation.table import BenchmarkTable, Section, notes, sections
from stepprune_jax.visualize import style
from stepprune_jax.visualize.overlays import Overlay, draw_rows, shortened
from stepprune_jax.visualize.patches import square_patches

NAME = "index.html"
_COLUMNS = 4  # examples in a row
_BUCKETS = 6  # as many as in the paper's Figure 3
# What retention is drawn against, as far as it is known.
_AXES = {
    "mean_k": "visual tokens kept",
    "ms": "milliseconds per question",
    "gflops": "GFLOPs to the first token",
}
_CSS = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2430; max-width: 60rem; margin: 2rem auto; }
body { padding: 0 1rem; overflow-wrap: break-word; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { text-align: right; padding: 3px 10px; border-bottom: 1px solid #e4e7ec; }
.text { text-align: left; } .table { overflow-x: auto; }
tr.ours { background: #eef5fa; }
figure { margin: 1rem 0; } img { max-width: 100%; } figcaption { color: #667085; }
pre { background: #f5f7fa; padding: 12px; white-space: pre-wrap; overflow-wrap: anywhere; }
""".strip()


class Answered(NamedTuple):
    """The complete answer files of one benchmark; `questions` are empty if unknown."""

    benchmark: Benchmark
    root: Path
    files: Sequence[AnswerFile]
    questions: Sequence[BenchmarkQuestion] = ()


def write_page(
    path: Path,
    table: BenchmarkTable,
    answered: Sequence[Answered],
    *,
    samples: int,
    command: str | None = None,
) -> Path:
    """Writes the page of an evaluation, with at most `samples` examples of each benchmark.

    It begins with what the policy retains, in one sentence, and its examples.
    """
    parts, counts = [f"<p>{escape(_summary(table))}</p>"], []
    for shown in answered:
        file = default_file(shown.files)
        if file is not None:
            heading, (examples, count) = shown.benchmark.title, _examples(shown, file, samples)
            parts.append(examples)
            counts += [f"<h2>{escape(heading)}</h2>", count] if count else []
    parts.append(_figure(draw_retention(table), "Retention: score in % of that with all tokens."))
    parts += [*map(_html_table, sections(table)), _list(notes(table)), *counts]
    if command:
        parts.append(f"<h2>Command</h2>\n<pre>{escape(command)}</pre>")
    body = "\n".join(parts)
    path.write_text(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>StepPrune: evaluation</title>\n<style>\n{_CSS}\n</style>\n</head>\n<body>\n"
        f"<h1>StepPrune: evaluation</h1>\n{body}\n</body>\n</html>\n",
        encoding="utf-8",
        errors="backslashreplace",  # a name in the command need not be UTF-8
    )
    return path


def _summary(table: BenchmarkTable) -> str:
    """Says what the policy retains by its own stop, or at its smallest budget without one."""
    ours = [row for row in table.rows if row.method in (DEFAULT, OWN_STOP)]
    ours.sort(key=lambda row: row.method != OWN_STOP)
    for row in (*ours[:1], *ours[-1:]):
        kept, retention = row.mean("mean_k"), table.average(row)
        if kept is not None and retention is not None:
            return (
                f"With {kept:.1f} of {table.num_tokens:,} visual tokens on average, {row.method} "
                f"has {retention:.1f} % of the score with all tokens."
            )
    return "The policy's score in percent of that with all tokens is not known."


def _html_table(section: Section) -> str:
    """Formats a table; the rows of the default policy are tinted."""

    def line(cells: Sequence[Cell], tag: str) -> str:
        texts = ["&ndash;" if cell is None else escape(str(cell)) for cell in cells]
        kinds = [" class=text" if at < section.texts else "" for at in range(len(cells))]
        return "".join(f"<{tag}{k}>{t}</{tag}>" for k, t in zip(kinds, texts, strict=True))

    lines = [f"<tr>{line(section.header, 'th')}</tr>"]
    for row in section.rows:
        ours = " class=ours" if {DEFAULT, OWN_STOP} & {*row[: section.texts]} else ""
        lines.append(f"<tr{ours}>{line(row, 'td')}</tr>")
    title = f"<h2>{escape(section.title)}</h2>\n" if section.title else ""
    return f"{title}<div class=table><table>\n" + "\n".join(lines) + "\n</table></div>"


def _list(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>\n" for line in lines)
    return f"<ul>\n{items}</ul>" if lines else ""


def _figure(png: bytes | None, caption: str) -> str:
    """Formats a figure; empty without one."""
    if png is None:
        return ""
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    with Image.open(io.BytesIO(png)) as image:
        width = round(100 * image.width / style.DPI)
    image = f'<img src="{url}" width="{width}" alt="{escape(caption)}">'
    return f"<figure>{image}\n<figcaption>{escape(caption)}</figcaption></figure>"


def default_file(files: Sequence[AnswerFile]) -> AnswerFile | None:
    """Finds the run's policy at the middle budget; exact if it does not stop by itself."""
    trained = [f.provenance.method for f in files if "policy" in f.provenance.made]
    for method in (DEFAULT, *map(without_own_stop, trained[-1:])):
        for mode in ("adaptive", "exact"):
            mine = [f for f in files if (f.provenance.method, f.provenance.mode) == (method, mode)]
            mine.sort(key=lambda file: -file.provenance.budget)
            if mine:
                return mine[len(mine) // 2]
        alone = [f for f in files if f.provenance.method == learned_stop(method)]
        if alone:
            return alone[0]
    return None


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    style.save(figure, out)
    return out.getvalue()


def draw_retention(table: BenchmarkTable) -> bytes | None:
    """Draws average retention against tokens, time and operations, as far as known; returns a PNG.

    Exact counts are solid lines, adaptive ones dashed with hollow markers.
    """
    points: dict[tuple[str, str], list[dict[str, float | None]]] = {}
    for row in table.rows:
        values = {field: row.mean(field) for field in _AXES} | {"retention": table.average(row)}
        if values["retention"] is not None:
            points.setdefault((row.method, row.mode), []).append(values)
    every = [value for values in points.values() for value in values]
    fields = [field for field in _AXES if any(value[field] for value in every)]
    if not fields:
        return None
    looks = style.looks([method for method, _ in points])
    with style.canvas(1.6 + 2.8 * len(fields), 3.6 + 0.06 * len(points)) as figure:
        figure.set_layout_engine("constrained")
        panels = figure.subplots(1, len(fields), sharey=True, squeeze=False)[0]
        for axes, field in zip(panels, fields, strict=True):
            for (method, mode), values in points.items():
                _draw_line(axes, field, values, mode, looks[method])
            axes.set_xlabel(_AXES[field])
            axes.grid(axis="y")
        _mark_budgets(panels[0], table)
        panels[0].set_ylabel("retention, %")
        handles = [
            Line2D([], [], color=looks[name][0], marker=looks[name][1], label=name)
            for name in dict.fromkeys(method for method, _ in points)
        ]
        handles.append(
            Line2D(
                [],
                [],
                color=style.SOFT,
                linestyle="--",
                marker="o",
                mfc="white",
                label="adaptive: K on average",
            )
        )
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
        return _png(figure)


def _draw_line(
    axes: Axes,
    field: str,
    values: Sequence[dict[str, float | None]],
    mode: str,
    look: tuple[str, str],
) -> None:
    """Draws the rows of a method in a mode against a field, as far as they have it."""
    known = [(value[field], value["retention"]) for value in values if value[field]]
    form = {"linestyle": "--", "markerfacecolor": "white"} if mode == "adaptive" else {}
    if known:
        colour, marker = look
        axes.plot(*zip(*known, strict=True), color=colour, marker=marker, markersize=5, **form)


def _mark_budgets(axes: Axes, table: BenchmarkTable) -> None:
    """Makes the axis of tokens logarithmic, with the budgets as ticks."""
    counts = sorted({row.budget for row in table.rows if row.budget and row.mode == "exact"})
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.xaxis.set_major_formatter(FixedFormatter([f"{count:,}" for count in counts]))


def count_buckets(
    count: Int[np.ndarray, "q"], worth: Float[np.ndarray, "q"]
) -> tuple[Float[np.ndarray, "e"], Int[np.ndarray, "k"], Float[np.ndarray, "k"]]:
    """Sorts questions by the tokens kept, into log-spaced buckets, as in the paper's Figure 3.

    Args:
        count: tokens kept for each question.
        worth: grade of each answer, from 0 to 1; NaN if unknown.

    Returns:
        Edges of the buckets, each of which ends before the next, the number of questions in each,
        and the mean grade in percent, NaN where none is known.
    """
    edges = np.geomspace(max(1, count.min()), count.max() + 1, _BUCKETS + 1).round(9)
    at = np.clip(np.searchsorted(edges, count, side="right") - 1, 0, _BUCKETS - 1)
    known = ~np.isnan(worth)
    graded = np.bincount(at[known], minlength=_BUCKETS)
    total = np.bincount(at[known], worth[known], minlength=_BUCKETS)
    grade = np.where(graded > 0, 100 * total / np.maximum(graded, 1), np.nan)
    return edges, np.bincount(at, minlength=_BUCKETS), grade


def draw_counts(
    count: Int[np.ndarray, "q"], worth: Float[np.ndarray, "q"], num_tokens: int
) -> bytes:
    """Draws how many questions keep how many tokens, and how many are right; returns a PNG."""
    edges, questions, grade = count_buckets(count, worth)
    with style.canvas(7, 2.6) as figure:
        figure.set_layout_engine("constrained")
        axes = figure.add_subplot()
        axes.bar(
            edges[:-1],
            questions,
            width=np.diff(edges),
            align="edge",
            edgecolor="white",
            color="#9db4cc",
        )
        axes.axvline(count.mean(), color=style.SOFT, linestyle="--")
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_locator(FixedLocator(edges))
        axes.xaxis.set_major_formatter(FixedFormatter([f"{edge:.3g}" for edge in edges]))
        axes.set_xlabel(f"K, tokens kept of {num_tokens:,}")
        axes.set_ylabel("questions")
        if not np.isnan(grade).all():
            right = axes.twinx()
            right.plot(np.sqrt(edges[:-1] * edges[1:]), grade, color="#b5473c", marker="o")
            right.set_ylabel("right, %")
            right.set_ylim(0, 105)
        return _png(figure)


def _examples(shown: Answered, file: AnswerFile, samples: int) -> tuple[str, str]:
    """Formats examples of kept tokens, and the distribution of K; each empty without any."""
    made, answers = file.provenance, read_answers(file.path)
    count = np.array([answer.fields.get("kept", 0) for answer in answers])
    worth = np.full(len(count), np.nan)
    with contextlib.suppress(OSError, ValueError):
        worth = np.array(shown.benchmark.judge(shown.root, file.path), np.float64)  # None is NaN
    overlays = _overlays(shown, answers, worth, samples)
    having = about_images(answers)
    count, worth = count[having], worth[having]
    name, examples, distribution = f"{made.method}, {made.mode}", "", ""
    if made.budget is not None:
        name += f", {made.budget} of {made.num_tokens:,} tokens"
    if len(count):
        caption = f"K of {name}: {count.mean():.1f} ± {count.std():.1f} on average (dashed). "
        caption += "Bars: questions. Line: percent of them that are right."
        distribution = _figure(draw_counts(count, worth, made.num_tokens), caption)
    if overlays:
        out = io.BytesIO()
        rows = [overlays[n : n + _COLUMNS] for n in range(0, len(overlays), _COLUMNS)]
        draw_rows(out, rows)
        examples = _figure(
            out.getvalue(),
            f"Kept tokens of {name}, in the order of choice: {shown.benchmark.title}.",
        )
    return examples, distribution


def _overlays(
    shown: Answered, answers: Sequence[GivenAnswer], worth: Float[np.ndarray, "q"], samples: int
) -> list[Overlay]:
    """Chooses examples evenly from those whose kept tokens are recorded, by ascending K."""
    questions = {question.key: question for question in shown.questions}
    graded = zip(answers, worth, strict=True)
    drawn = [(answer, grade) for answer, grade in graded if "grid" in answer.fields]
    if not samples or not questions:
        return []
    chosen = [drawn[at] for at in spread_over(len(drawn), samples)]
    overlays = []
    for answer, grade in sorted(chosen, key=lambda row: row[0].fields["kept"]):
        question = questions[answer.id, answer.prompt]
        grid = tuple(answer.fields["grid"])
        overlays.append(
            Overlay(
                image=question.image,
                patches=square_patches(answer.fields["order"], grid),
                title=f"K = {answer.fields['kept']}",
                category=f"of {answer.fields['visual_tokens']:,}",
                text=question.prompt.removeprefix(f"{IMAGE_MARK}\n"),
                answer=shortened(answer.text, 28),
                is_correct=None if np.isnan(grade) else bool(grade >= 0.5),
                grid=max(grid),
            )
        )
    return overlays
