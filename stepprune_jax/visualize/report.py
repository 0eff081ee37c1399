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
from stepprune_jax.benchmarks.answer_files import AnswerFile, Provenance
from stepprune_jax.benchmarks.answers import GivenAnswer, read_answers
from stepprune_jax.benchmarks.questions import IMAGE_MARK
from stepprune_jax.evaluation.cells import Cell
from stepprune_jax.evaluation.names import DEFAULT, LEARNED_STOP, learned_stop, without_learned_stop
from stepprune_jax.evaluation.scores import about_images
from stepprune_jax.evaluation.split import spread_over
from stepprune_jax.evaluation.table import BenchmarkTable, Section, notes, sections
from stepprune_jax.visualize import style
from stepprune_jax.visualize.overlays import Overlay, draw_rows, shorten
from stepprune_jax.visualize.patches import square_patches

NAME = "index.html"
_COLUMNS = 4  # Examples per row, so that a row fits the width of the page.
_BUCKETS = 6  # The paper's Figure 3 has six buckets.
# Values of one table row by name: the quantities of `_AXES` and "retention".
_Point = dict[str, float | None]
# Horizontal axes of the retention plots: fields of a score with their labels.
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
    """The answers to one benchmark. Built by `cli.evaluate` and read by `write_page`.

    Attributes:
        benchmark: the benchmark.
        root: folder of the benchmark's questions and annotations.
        files: answer files of the table rows that answer all questions.
        questions: the questions, for drawing examples; empty if they are not available.
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
    num_examples: int,
    command: str | None = None,
) -> Path:
    """Writes the HTML report of an evaluation.

    The page shows, in this order, a sentence about the policy's retention, images with their kept
    tokens, a plot of retention, the tables with their notes, the distributions of kept tokens, and
    the command.

    Args:
        path: the HTML file to write.
        table: scores of all methods.
        benchmarks: answers to the benchmarks.
        num_examples: maximum number of images per benchmark.
        command: command line of the evaluation, for display; None omits it.

    Returns:
        `path`.
    """
    blocks, distributions = [f"<p>{escape(_summarize_retention(table))}</p>"], []
    for answered_benchmark in benchmarks:
        file = default_file(answered_benchmark.files)
        if file is not None:
            answers = _read_graded_answers(answered_benchmark, file)
            overlays = _make_overlays(answered_benchmark.questions, answers, num_examples)
            blocks.append(_examples_figure(answered_benchmark.benchmark, file, overlays))
            distribution = _distribution_figure(file, answers)
            if distribution:
                title = escape(answered_benchmark.benchmark.title)
                distributions += [f"<h2>{title}</h2>", distribution]
    caption = "Retention: score in % of the score with all tokens."
    blocks.append(_figure(draw_retention(table), caption))
    blocks += map(_html_table, sections(table))
    note_items = "".join(f"<li>{escape(note)}</li>\n" for note in notes(table))
    blocks += [f"<ul>\n{note_items}</ul>" if note_items else "", *distributions]
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


def _summarize_retention(table: BenchmarkTable) -> str:
    """Returns a sentence about the retention of the policy, averaged over benchmarks.

    The sentence is about the row of the learned stop. If this row lacks a score, it is about the
    last row of the policy, which has the smallest budget.
    """
    policy_rows = [row for row in table.rows if row.method in (DEFAULT, LEARNED_STOP)]
    policy_rows.sort(key=lambda row: row.method != LEARNED_STOP)
    for row in (*policy_rows[:1], *policy_rows[-1:]):
        mean_kept, retention = row.mean("mean_k"), table.average(row)
        if mean_kept is not None and retention is not None:
            return (
                f"With {mean_kept:.1f} of {table.num_tokens:,} visual tokens on average, "
                f"{row.method} has {retention:.1f} % of the score with all tokens."
            )
    return "The policy's retention is not known: scores of the policy or of all tokens are missing."


def _html_table(section: Section) -> str:
    """Formats a table in HTML. Rows of the policy have a tinted background."""

    def format_cells(cells: Sequence[Cell], tag: str) -> str:
        html_cells = []
        for column, cell in enumerate(cells):
            text = "&ndash;" if cell is None else escape(str(cell))
            css_class = " class=text" if column < section.num_text_columns else ""
            html_cells.append(f"<{tag}{css_class}>{text}</{tag}>")
        return "".join(html_cells)

    lines = [f"<tr>{format_cells(section.header, 'th')}</tr>"]
    for row in section.rows:
        text_cells = {*row[: section.num_text_columns]}
        row_class = " class=ours" if {DEFAULT, LEARNED_STOP} & text_cells else ""
        lines.append(f"<tr{row_class}>{format_cells(row, 'td')}</tr>")
    heading = f"<h2>{escape(section.title)}</h2>\n" if section.title else ""
    return f"{heading}<div class=table><table>\n" + "\n".join(lines) + "\n</table></div>"


def _figure(png: bytes | None, caption: str) -> str:
    """Embeds a PNG image with a caption in HTML; for None, the result is ""."""
    if png is None:
        return ""
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    with Image.open(io.BytesIO(png)) as image:
        css_width = round(100 * image.width / style.DPI)  # 100 CSS pixels per inch of the figure
    image_tag = f'<img src="{url}" width="{css_width}" alt="{escape(caption)}">'
    return f"<figure>{image_tag}\n<figcaption>{escape(caption)}</figcaption></figure>"


def default_file(files: Sequence[AnswerFile]) -> AnswerFile | None:
    """Selects the answer file that represents the run's policy in a report.

    The method is StepPrune, or the last trained method if StepPrune has no file. Its files are
    preferred in this order: budgets that are means over images, exact budgets, learned stop
    without a budget. Among several budgets, the middle one is selected.

    Args:
        files: answer files of one benchmark, one for each row of the table.

    Returns:
        The file, or None if no file belongs to a trained method.
    """
    trained_methods = [file.provenance.method for file in files if "policy" in file.provenance.made]
    for method in (DEFAULT, *map(without_learned_stop, trained_methods[-1:])):
        for mode in ("adaptive", "exact"):
            candidates = [
                file
                for file in files
                if (file.provenance.method, file.provenance.mode) == (method, mode)
            ]
            candidates.sort(key=lambda file: -(file.provenance.budget or 0))
            if candidates:
                return candidates[len(candidates) // 2]
        stop_files = [file for file in files if file.provenance.method == learned_stop(method)]
        if stop_files:
            return stop_files[0]
    return None


def _encode_png(figure: Figure) -> bytes:
    """Returns the bytes of a figure's PNG file."""
    buffer = io.BytesIO()
    style.save(figure, buffer)
    return buffer.getvalue()


def draw_retention(table: BenchmarkTable) -> bytes | None:
    """Plots average retention against kept tokens, time and operations.

    There is one panel per quantity of the horizontal axis; a quantity without values has no panel.
    Solid lines connect exact budgets. Dashed lines with hollow markers connect mean budgets.

    Args:
        table: scores of all rows.

    Returns:
        The bytes of a PNG file, or None if no row has both a retention and a positive quantity.
    """
    points_by_line: dict[tuple[str, str], list[_Point]] = {}
    for row in table.rows:
        retention = table.average(row)
        if retention is not None:
            point = {field: row.mean(field) for field in _AXES} | {"retention": retention}
            points_by_line.setdefault((row.method, row.mode), []).append(point)
    all_points = [point for points in points_by_line.values() for point in points]
    fields = [field for field in _AXES if any(point[field] for point in all_points)]
    if not fields:
        return None
    methods = list(dict.fromkeys(method for method, _ in points_by_line))
    looks = style.looks(methods)
    # Inches: each panel gets the same width, and the legend grows with the number of lines.
    with style.canvas(1.6 + 2.8 * len(fields), 3.6 + 0.06 * len(points_by_line)) as figure:
        figure.set_layout_engine("constrained")
        panels = figure.subplots(1, len(fields), sharey=True, squeeze=False)[0]
        for axes, field in zip(panels, fields, strict=True):
            for (method, mode), points in points_by_line.items():
                _draw_line(axes, field, points, mode, looks[method])
            axes.set_xlabel(_AXES[field])
            axes.grid(axis="y")
        budgets = sorted({row.budget for row in table.rows if row.budget and row.mode == "exact"})
        _set_log_ticks(panels[0], budgets, [f"{budget:,}" for budget in budgets])
        panels[0].set_ylabel("retention, %")
        handles = [
            Line2D([], [], color=looks[name][0], marker=looks[name][1], label=name)
            for name in methods
        ]
        label = "adaptive: K on average"
        handles.append(
            Line2D([], [], color=style.SOFT, ls="--", marker="o", mfc="white", label=label)
        )
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
        return _encode_png(figure)


def _draw_line(
    axes: Axes, field: str, points: Sequence[_Point], mode: str, look: tuple[str, str]
) -> None:
    """Draws the line of one method and mode in a panel.

    Args:
        axes: the panel.
        field: quantity of the horizontal axis, a key of `_AXES`.
        points: values of the method's rows. Rows without the quantity are skipped.
        mode: "exact" for a solid line, "adaptive" for a dashed line.
        look: color and marker.
    """
    coordinates = [(point[field], point["retention"]) for point in points if point[field]]
    if coordinates:
        x, y = np.array(coordinates, float).T
        color, marker = look
        linestyle, fill = ("--", "white") if mode == "adaptive" else ("-", color)
        axes.plot(x, y, color=color, marker=marker, ls=linestyle, markersize=5, mfc=fill)


def _set_log_ticks(axes: Axes, values: Sequence[float | int], labels: Sequence[str]) -> None:
    """Makes the horizontal axis logarithmic, with labelled ticks at `values` only."""
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_major_formatter(FixedFormatter(labels))


def count_buckets(
    count: Int[np.ndarray, "q"], grade: Float[np.ndarray, "q"]
) -> tuple[Float[np.ndarray, "e"], Int[np.ndarray, "k"], Float[np.ndarray, "k"]]:
    """Groups questions into k log-spaced buckets of kept tokens, as in the paper's Figure 3.

    Args:
        count: [q] number of kept tokens of each question.
        grade: [q] grade of each answer, from 0 to 1; NaN for an answer without a grade.

    Returns:
        A tuple (edges, num_questions, mean_grade). edges: [k + 1] bucket i has the counts with
        edges[i] <= count < edges[i + 1]. num_questions: [k] number of questions. mean_grade: [k]
        mean grade in percent; NaN for a bucket without a graded answer.
    """
    # A count may be 0, which has no logarithm. The last edge exceeds the largest count, because
    # buckets exclude their upper edge. Rounding keeps integer edges integer.
    edges = np.geomspace(max(1, count.min()), count.max() + 1, _BUCKETS + 1).round(9)
    bucket = np.clip(np.searchsorted(edges, count, side="right") - 1, 0, _BUCKETS - 1)
    is_graded = ~np.isnan(grade)
    num_graded = np.bincount(bucket[is_graded], minlength=_BUCKETS)
    grade_sum = np.bincount(bucket[is_graded], grade[is_graded], minlength=_BUCKETS)
    mean_grade = np.where(num_graded > 0, 100 * grade_sum / np.maximum(num_graded, 1), np.nan)
    return edges, np.bincount(bucket, minlength=_BUCKETS), mean_grade


def draw_counts(
    count: Int[np.ndarray, "q"], grade: Float[np.ndarray, "q"], num_tokens: int
) -> bytes:
    """Plots how many questions keep how many tokens, and how many of them are answered correctly.

    Bars are questions per bucket of `count_buckets`. A line is the percentage of correct answers. A
    dashed vertical line is the mean count.

    Args:
        count: [q] number of kept tokens of each question.
        grade: [q] grade of each answer, from 0 to 1; NaN for an answer without a grade.
        num_tokens: number of visual tokens of an image before pruning.

    Returns:
        The bytes of a PNG file.
    """
    edges, num_questions, mean_grade = count_buckets(count, grade)
    with style.canvas(7, 2.6) as figure:
        figure.set_layout_engine("constrained")
        axes = figure.add_subplot()
        axes.bar(
            edges[:-1],
            num_questions,
            width=np.diff(edges),
            align="edge",
            edgecolor="white",
            color="#9db4cc",
        )
        axes.axvline(count.mean(), color=style.SOFT, linestyle="--")
        _set_log_ticks(axes, edges.tolist(), [f"{edge:.3g}" for edge in edges])
        axes.set_xlabel(f"K, tokens kept of {num_tokens:,}")
        axes.set_ylabel("questions")
        if not np.isnan(mean_grade).all():
            grade_axes = axes.twinx()
            bucket_centers = np.sqrt(edges[:-1] * edges[1:])  # centers on the logarithmic axis
            grade_axes.plot(bucket_centers, mean_grade, color="#b5473c", marker="o")
            grade_axes.set_ylabel("correct, %")
            grade_axes.set_ylim(0, 105)  # markers at 100 % are not cut off
        return _encode_png(figure)


class _GradedAnswers(NamedTuple):
    """The lines of an answer file with their grades.

    Attributes:
        answers: the q answers in the order of the file.
        grades: [q] grade of each answer, from 0 to 1; NaN for an answer without a grade.
    """

    answers: Sequence[GivenAnswer]
    grades: Float[np.ndarray, "q"]


def _read_graded_answers(answered_benchmark: AnsweredBenchmark, file: AnswerFile) -> _GradedAnswers:
    """Reads and grades an answer file. If grading fails, all grades are NaN."""
    answers = read_answers(file.path)
    grades = np.full(len(answers), np.nan)
    # Annotations may be missing or malformed. The table reports this error.
    with contextlib.suppress(OSError, ValueError):
        grades = np.array(
            answered_benchmark.benchmark.judge(answered_benchmark.root, file.path), np.float64
        )
    return _GradedAnswers(answers, grades)


def _row_title(provenance: Provenance) -> str:
    """Returns the name, mode and budget of a table row, for captions."""
    title = f"{provenance.method}, {provenance.mode}"
    if provenance.budget is not None:
        title += f", {provenance.budget} of {provenance.num_tokens:,} tokens"
    return title


def _distribution_figure(file: AnswerFile, graded_answers: _GradedAnswers) -> str:
    """Returns an HTML figure of the distribution of kept tokens; "" without answers about images.

    Args:
        file: the answer file, for the caption.
        graded_answers: answers of the file.
    """
    answers, grades = graded_answers
    has_image = about_images(answers)
    counts = np.array([answer.fields.get("kept", 0) for answer in answers])[has_image]
    if not len(counts):
        return ""
    caption = (
        f"K of {_row_title(file.provenance)}: {counts.mean():.1f} ± {counts.std():.1f} on average "
        "(dashed). Bars: questions. Line: percent of correct answers."
    )
    num_tokens = file.provenance.num_tokens
    return _figure(draw_counts(counts, grades[has_image], num_tokens), caption)


def _examples_figure(benchmark: Benchmark, file: AnswerFile, overlays: Sequence[Overlay]) -> str:
    """Returns an HTML figure of example images with their kept tokens; "" without examples.

    Args:
        benchmark: the benchmark, for the caption.
        file: the answer file, for the caption.
        overlays: the examples.
    """
    if not overlays:
        return ""
    rows = [overlays[start : start + _COLUMNS] for start in range(0, len(overlays), _COLUMNS)]
    buffer = io.BytesIO()
    draw_rows(buffer, rows)
    return _figure(
        buffer.getvalue(),
        f"Kept tokens of {_row_title(file.provenance)}, in the order of selection: "
        f"{benchmark.title}.",
    )


def _make_overlays(
    questions: Sequence[BenchmarkQuestion], graded_answers: _GradedAnswers, num_examples: int
) -> list[Overlay]:
    """Samples answers at regular intervals of the file, and prepares them for drawing.

    Args:
        questions: questions of the benchmark; may be empty.
        graded_answers: answers in the order of the file. Only answers that recorded their kept
            tokens can be drawn.
        num_examples: maximum number of examples; 0 draws none.

    Returns:
        The examples, sorted by their number of kept tokens. Empty without questions.
    """
    if not num_examples or not questions:
        return []
    question_by_key = {question.key: question for question in questions}
    drawable = [
        (answer, grade)
        for answer, grade in zip(*graded_answers, strict=True)
        if "grid" in answer.fields
    ]
    examples = [drawable[index] for index in spread_over(len(drawable), num_examples)]
    overlays = []
    for answer, grade in sorted(examples, key=lambda example: example[0].fields["kept"]):
        question = question_by_key[answer.id, answer.prompt]
        if question.image is None:
            continue
        grid = tuple(answer.fields["grid"])
        overlays.append(
            Overlay(
                image=question.image,
                patches=square_patches(answer.fields["order"], grid),
                title=f"K = {answer.fields['kept']}",
                category=f"of {answer.fields['visual_tokens']:,}",
                text=question.prompt.removeprefix(f"{IMAGE_MARK}\n"),
                answer=shorten(answer.text, 28),
                # A grade may be fractional: it is the share of people who agree with the answer.
                is_correct=None if np.isnan(grade) else bool(grade >= 0.5),
                grid=max(grid),
            )
        )
    return overlays
