"""Writes the report of an evaluation: tables, figures and a few examples in one HTML file."""

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
from stepprune_jax.visualize.overlays import Overlay, draw_rows, shorten
from stepprune_jax.visualize.patches import square_patches

NAME = "index.html"
_COLUMNS = 4  # Examples in a row, which fit the width of the page.
_BUCKETS = 6  # The paper's Figure 3 has six buckets.
# Quantities of the retention plots, with their labels.
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


class AnsweredBenchmark(NamedTuple):
    """The answers of one benchmark. Made by `cli.evaluate` and read by `write_page`.

    Attributes:
        benchmark: the benchmark.
        root: folder of its data.
        files: answer files that answer all questions.
        questions: the questions; empty if they are not available.
    """

    benchmark: Benchmark
    root: Path
    files: Sequence[AnswerFile]
    questions: Sequence[BenchmarkQuestion] = ()


def write_page(
    path: Path,
    table: BenchmarkTable,
    benchmarks: Sequence[AnsweredBenchmark],
    *,
    samples: int,
    command: str | None = None,
) -> Path:
    """Writes the page of an evaluation.

    The page begins with a sentence about the policy's retention, and with examples.

    Args:
        path: the HTML file.
        table: scores of all methods.
        benchmarks: answers of the benchmarks.
        samples: largest number of examples of each benchmark.
        command: command line of the evaluation, for display.

    Returns:
        The path of the file.
    """
    blocks, distributions = [f"<p>{escape(_summary(table))}</p>"], []
    for entry in benchmarks:
        file = default_file(entry.files)
        if file is not None:
            examples, distribution = _examples(entry, file, samples)
            blocks.append(examples)
            if distribution:
                distributions += [f"<h2>{escape(entry.benchmark.title)}</h2>", distribution]
    caption = "Retention: score in % of the score with all tokens."
    blocks.append(_figure(draw_retention(table), caption))
    blocks += [*map(_html_table, sections(table)), _list(notes(table)), *distributions]
    if command:
        blocks.append(f"<h2>Command</h2>\n<pre>{escape(command)}</pre>")
    body = "\n".join(blocks)
    path.write_text(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>StepPrune: evaluation</title>\n<style>\n{_CSS}\n</style>\n</head>\n<body>\n"
        f"<h1>StepPrune: evaluation</h1>\n{body}\n</body>\n</html>\n",
        encoding="utf-8",
        errors="backslashreplace",  # A file name in the command may have bytes that are not UTF-8.
    )
    return path


def _summary(table: BenchmarkTable) -> str:
    """Returns a sentence about the retention of the policy.

    The sentence is about the learned stop, or about the smallest budget of a policy without a stop.
    """
    policy_rows = [row for row in table.rows if row.method in (DEFAULT, OWN_STOP)]
    policy_rows.sort(key=lambda row: row.method != OWN_STOP)
    for row in (*policy_rows[:1], *policy_rows[-1:]):
        kept, retention = row.mean("mean_k"), table.average(row)
        if kept is not None and retention is not None:
            return (
                f"With {kept:.1f} of {table.num_tokens:,} visual tokens on average, {row.method} "
                f"has {retention:.1f} % of the score with all tokens."
            )
    return "The policy's retention is not known: scores of the policy or of all tokens are missing."


def _html_table(section: Section) -> str:
    """Formats a table in HTML. Rows of the policy have a tinted background."""

    def format_row(cells: Sequence[Cell], tag: str) -> str:
        texts = ["&ndash;" if cell is None else escape(str(cell)) for cell in cells]
        kinds = [" class=text" if column < section.texts else "" for column in range(len(cells))]
        return "".join(
            f"<{tag}{kind}>{text}</{tag}>" for kind, text in zip(kinds, texts, strict=True)
        )

    lines = [f"<tr>{format_row(section.header, 'th')}</tr>"]
    for row in section.rows:
        row_class = " class=ours" if {DEFAULT, OWN_STOP} & {*row[: section.texts]} else ""
        lines.append(f"<tr{row_class}>{format_row(row, 'td')}</tr>")
    title = f"<h2>{escape(section.title)}</h2>\n" if section.title else ""
    return f"{title}<div class=table><table>\n" + "\n".join(lines) + "\n</table></div>"


def _list(lines: Sequence[str]) -> str:
    """Formats a list in HTML; an empty list is an empty text."""
    items = "".join(f"<li>{escape(line)}</li>\n" for line in lines)
    return f"<ul>\n{items}</ul>" if lines else ""


def _figure(png: bytes | None, caption: str) -> str:
    """Formats a figure in HTML; without a figure, the text is empty."""
    if png is None:
        return ""
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    with Image.open(io.BytesIO(png)) as image:
        width = round(100 * image.width / style.DPI)
    image = f'<img src="{url}" width="{width}" alt="{escape(caption)}">'
    return f"<figure>{image}\n<figcaption>{escape(caption)}</figcaption></figure>"


def default_file(files: Sequence[AnswerFile]) -> AnswerFile | None:
    """Returns the answers of the run's policy at its middle budget, or None without a policy.

    Adaptive budgets are preferred to exact budgets. Without any budget, the answers of the learned
    stop are returned.
    """
    trained_methods = [file.provenance.method for file in files if "policy" in file.provenance.made]
    for method in (DEFAULT, *map(without_own_stop, trained_methods[-1:])):
        for mode in ("adaptive", "exact"):
            candidates = [
                file
                for file in files
                if (file.provenance.method, file.provenance.mode) == (method, mode)
            ]
            candidates.sort(key=lambda file: -file.provenance.budget)
            if candidates:
                return candidates[len(candidates) // 2]
        stop_files = [file for file in files if file.provenance.method == learned_stop(method)]
        if stop_files:
            return stop_files[0]
    return None


def _png(figure: Figure) -> bytes:
    """Returns a figure as the bytes of a PNG file."""
    out = io.BytesIO()
    style.save(figure, out)
    return out.getvalue()


def draw_retention(table: BenchmarkTable) -> bytes | None:
    """Draws average retention against kept tokens, time and operations.

    Solid lines are exact budgets. Dashed lines with hollow markers are adaptive budgets. A quantity
    that no row has is omitted.

    Returns:
        The bytes of a PNG file, or None without any retention.
    """
    points: dict[tuple[str, str], list[dict[str, float | None]]] = {}
    for row in table.rows:
        values = {field: row.mean(field) for field in _AXES} | {"retention": table.average(row)}
        if values["retention"] is not None:
            points.setdefault((row.method, row.mode), []).append(values)
    all_points = [value for values in points.values() for value in values]
    fields = [field for field in _AXES if any(value[field] for value in all_points)]
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
    """Draws a line through the rows of a method and mode that have a value of a field."""
    points = [(value[field], value["retention"]) for value in values if value[field]]
    options = {"linestyle": "--", "markerfacecolor": "white"} if mode == "adaptive" else {}
    if points:
        color, marker = look
        axes.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=5, **options)


def _mark_budgets(axes: Axes, table: BenchmarkTable) -> None:
    """Makes the axis of kept tokens logarithmic, with ticks at the budgets."""
    counts = sorted({row.budget for row in table.rows if row.budget and row.mode == "exact"})
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator(counts))
    axes.xaxis.set_major_formatter(FixedFormatter([f"{count:,}" for count in counts]))


def count_buckets(
    count: Int[np.ndarray, "q"], grade: Float[np.ndarray, "q"]
) -> tuple[Float[np.ndarray, "e"], Int[np.ndarray, "k"], Float[np.ndarray, "k"]]:
    """Sorts questions into log-spaced buckets by their kept tokens, as in the paper's Figure 3.

    Args:
        count: [q] kept tokens of each question.
        grade: [q] grade of each answer, from 0 to 1; NaN for an answer without a grade.

    Returns:
        [buckets + 1] edges, where a bucket excludes its upper edge. [buckets] number of questions.
        [buckets] mean grade in percent, which is NaN without a graded answer.
    """
    edges = np.geomspace(max(1, count.min()), count.max() + 1, _BUCKETS + 1).round(9)
    bucket = np.clip(np.searchsorted(edges, count, side="right") - 1, 0, _BUCKETS - 1)
    is_graded = ~np.isnan(grade)
    num_graded = np.bincount(bucket[is_graded], minlength=_BUCKETS)
    total = np.bincount(bucket[is_graded], grade[is_graded], minlength=_BUCKETS)
    mean_grade = np.where(num_graded > 0, 100 * total / np.maximum(num_graded, 1), np.nan)
    return edges, np.bincount(bucket, minlength=_BUCKETS), mean_grade


def draw_counts(
    count: Int[np.ndarray, "q"], grade: Float[np.ndarray, "q"], num_tokens: int
) -> bytes:
    """Draws the distribution of kept tokens, and the percentage of correct answers.

    Args:
        count: [q] kept tokens of each question.
        grade: [q] grade of each answer, from 0 to 1; NaN for an answer without a grade.
        num_tokens: number of tokens of an image.

    Returns:
        The bytes of a PNG file.
    """
    edges, questions, mean_grade = count_buckets(count, grade)
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
        if not np.isnan(mean_grade).all():
            grade_axes = axes.twinx()
            grade_axes.plot(
                np.sqrt(edges[:-1] * edges[1:]), mean_grade, color="#b5473c", marker="o"
            )
            grade_axes.set_ylabel("correct, %")
            grade_axes.set_ylim(0, 105)
        return _png(figure)


def _examples(entry: AnsweredBenchmark, file: AnswerFile, samples: int) -> tuple[str, str]:
    """Formats the examples and the distribution of kept tokens of a file, in HTML.

    Returns:
        Two texts. The first is empty without examples, and the second is empty without answers
        about images.
    """
    provenance, answers = file.provenance, read_answers(file.path)
    count = np.array([answer.fields.get("kept", 0) for answer in answers])
    grade = np.full(len(count), np.nan)
    with contextlib.suppress(OSError, ValueError):
        grade = np.array(
            entry.benchmark.judge(entry.root, file.path), np.float64
        )  # None becomes NaN.
    overlays = _overlays(entry, answers, grade, samples)
    has_images = about_images(answers)
    count, grade = count[has_images], grade[has_images]
    name, examples, distribution = f"{provenance.method}, {provenance.mode}", "", ""
    if provenance.budget is not None:
        name += f", {provenance.budget} of {provenance.num_tokens:,} tokens"
    if len(count):
        caption = f"K of {name}: {count.mean():.1f} ± {count.std():.1f} on average (dashed). "
        caption += "Bars: questions. Line: percent of correct answers."
        distribution = _figure(draw_counts(count, grade, provenance.num_tokens), caption)
    if overlays:
        out = io.BytesIO()
        rows = [overlays[n : n + _COLUMNS] for n in range(0, len(overlays), _COLUMNS)]
        draw_rows(out, rows)
        examples = _figure(
            out.getvalue(),
            f"Kept tokens of {name}, in the order of selection: {entry.benchmark.title}.",
        )
    return examples, distribution


def _overlays(
    entry: AnsweredBenchmark,
    answers: Sequence[GivenAnswer],
    grades: Float[np.ndarray, "q"],
    samples: int,
) -> list[Overlay]:
    """Returns up to `samples` examples, evenly spaced in the file, by ascending kept tokens."""
    questions = {question.key: question for question in entry.questions}
    graded_answers = zip(answers, grades, strict=True)
    drawable = [(answer, grade) for answer, grade in graded_answers if "grid" in answer.fields]
    if not samples or not questions:
        return []
    selected = [drawable[index] for index in spread_over(len(drawable), samples)]
    overlays = []
    for answer, grade in sorted(selected, key=lambda row: row[0].fields["kept"]):
        question = questions[answer.id, answer.prompt]
        grid = tuple(answer.fields["grid"])
        overlays.append(
            Overlay(
                image=question.image,
                patches=square_patches(answer.fields["order"], grid),
                title=f"K = {answer.fields['kept']}",
                category=f"of {answer.fields['visual_tokens']:,}",
                text=question.prompt.removeprefix(f"{IMAGE_MARK}\n"),
                answer=shorten(answer.text, 28),
                is_correct=None if np.isnan(grade) else bool(grade >= 0.5),
                grid=max(grid),
            )
        )
    return overlays
