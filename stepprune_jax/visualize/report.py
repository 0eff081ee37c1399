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
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator
from PIL import Image

from stepprune_jax.benchmarks import BENCHMARKS, Benchmark, BenchmarkQuestion
from stepprune_jax.benchmarks.answer_files import AnswerFile, Provenance
from stepprune_jax.benchmarks.answers import GivenAnswer, read_answers
from stepprune_jax.benchmarks.questions import IMAGE_MARK
from stepprune_jax.evaluation.cells import Cell
from stepprune_jax.evaluation.formats import Section, notes, sections
from stepprune_jax.evaluation.names import (
    ALL,
    BLIND,
    DEFAULT,
    DOWNSAMPLED,
    LEARNED_STOP,
    learned_stop,
    without_learned_stop,
)
from stepprune_jax.evaluation.scores import about_images
from stepprune_jax.evaluation.split import spread_over
from stepprune_jax.evaluation.table import BenchmarkTable, MethodScores
from stepprune_jax.evaluation.uncertainty import Interval
from stepprune_jax.visualize import style
from stepprune_jax.visualize.overlays import Overlay, draw_rows, shorten
from stepprune_jax.visualize.patches import square_patches

NAME = "index.html"
PICTURE = "retention.png"
_COLUMNS = 4  # Examples per row, so that a row fits the width of the page.
_MAX_EXAMPLE_METHODS = 4
_BUCKETS = 6  # The paper's Figure 3 has six buckets.
# Values of one table row by name: the quantities of `_AXES`, "percent" and its "error".
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
    """Writes the HTML report of an evaluation, and its plot of retention to the file `PICTURE`.

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
        blocks.append(_examples_figure(answered_benchmark, table, num_examples))
        file = default_file(answered_benchmark.files)
        if file is not None:
            answers = _read_graded_answers(answered_benchmark, file)
            distribution = _distribution_figure(file, answers)
            if distribution:
                title = escape(answered_benchmark.benchmark.title)
                distributions += [f"<h2>{title}</h2>", distribution]
    png = draw_retention(table)
    picture = path.with_name(PICTURE)
    if png is None:
        picture.unlink(missing_ok=True)  # of an earlier report
    else:
        picture.write_bytes(png)
    blocks.append(_figure(png, _caption_retention(table)))
    blocks += map(_html_table, sections(table))
    note_items = "".join(f"<li>{escape(note)}</li>\n" for note in notes(table))
    blocks += [f"<ul>\n{note_items}</ul>" if note_items else "", *distributions]
    if command:
        blocks.append(f"<h2>Command</h2>\n<pre>{escape(command)}</pre>")
    body, title = "\n".join(blocks), escape(_name_table(table))
    path.write_text(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{title}</title>\n<style>\n{_CSS}\n</style>\n</head>\n<body>\n"
        f"<h1>{title}</h1>\n{body}\n</body>\n</html>\n",
        encoding="utf-8",
        errors="backslashreplace",  # A file name in the command may have bytes that are not UTF-8.
    )
    return path


def _name_table(table: BenchmarkTable) -> str:
    """Returns the title of the page: the methods and the benchmarks of the table."""
    methods = [
        without_learned_stop(row.method) for row in table.rows if row.method not in (ALL, BLIND)
    ]
    methods = list(dict.fromkeys(methods)) or [ALL]
    titles = [
        "a data folder" if name == "folder" else BENCHMARKS[name].title for name in table.benchmarks
    ]
    method_text = _join_words(methods) if len(methods) <= 4 else f"{len(methods)} pruning methods"
    benchmark_text = _join_words(titles) if len(titles) <= 4 else f"{len(titles)} benchmarks"
    return f"{method_text} on {benchmark_text}"


def _join_words(words: Sequence[str]) -> str:
    """Joins words as in "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _summarize_retention(table: BenchmarkTable) -> str:
    """Returns a sentence about the retention of one row, averaged over benchmarks.

    The sentence is about the learned stop of the policy. If this row lacks a score, it is about the
    last row of the policy, which has the smallest budget. A table without the policy has a sentence
    about the best row with the smallest budget. Without any retention, the sentence says why.
    """
    policy_rows = [row for row in table.rows if row.method in (DEFAULT, LEARNED_STOP)]
    policy_rows.sort(key=lambda row: row.method != LEARNED_STOP)
    candidates = [*policy_rows[:1], *policy_rows[-1:]] or _best_rows(table)
    for row in candidates:
        mean_kept, retention = row.mean("mean_k"), table.average(row)
        if mean_kept is not None and retention is not None:
            interval = row.comparison.retention
            ends = "" if interval is None else f", 95 % interval {interval.low:.1f} to "
            ends += "" if interval is None else f"{interval.high:.1f} %"
            return (
                f"With {mean_kept:.1f} of {table.num_tokens:,} visual tokens on average, "
                f"{_name_in_sentence(row)} has {retention:.1f} % of the score with {ALL}{ends}."
            )
    return _explain_unknown_retention(table)


def _name_in_sentence(row: MethodScores) -> str:
    """Returns the name of a row's method, such as "StepPrune with its learned stop"."""
    method = without_learned_stop(row.method)
    return method if method == row.method else f"{method} with its learned stop"


def _best_rows(table: BenchmarkTable) -> list[MethodScores]:
    """Returns the pruned rows with the smallest budget, the best first."""
    rows = [
        row
        for row in table.rows
        if row.method not in (ALL, BLIND) and row.budget and table.average(row) is not None
    ]
    smallest_budget = min((row.budget for row in rows if row.budget), default=None)
    best_rows = [row for row in rows if row.budget == smallest_budget]
    return sorted(best_rows, key=lambda row: -(table.average(row) or 0))


def _explain_unknown_retention(table: BenchmarkTable) -> str:
    """Returns a sentence that says why no row of the table has a retention."""
    unpruned = table.all_tokens
    if unpruned is None:
        return (
            f"No retention: the row of {ALL} is missing. Name it in --config.eval.methods as all."
        )
    headlines = [score["headline"] for score in unpruned.scores.values()]
    if all(headline is None for headline in headlines):
        return f"No retention: the row of {ALL} has no score yet; the notes below say why."
    if 0 in headlines:
        place = "" if len(headlines) == 1 else " of a benchmark"
        return f"No retention: with {ALL}, the model answers no question{place} correctly."
    if len(table.rows) == 1:
        return f"The only row is the row of {ALL}."
    return f"No retention: no pruned row has scores on the same questions as the row of {ALL}."


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
    """Plots the average retention against kept tokens, time and operations.

    If the table has a row without an image, the share of the image's gain that a row keeps is
    plotted instead of the retention. There is one panel per quantity of the horizontal axis; a
    quantity without values has no panel. Solid lines connect exact budgets. Dashed lines with
    hollow markers connect mean budgets. Bars are standard errors over the questions.

    Args:
        table: scores of all rows.

    Returns:
        The bytes of a PNG file, or None if no row has both a figure and a positive quantity.
    """
    points_by_line: dict[tuple[str, str], list[_Point]] = {}
    for row in table.rows:
        percent, interval = _figure_of_merit(table, row)
        if percent is not None:
            error = None if interval is None else interval.standard_error
            point = {field: row.mean(field) for field in _AXES}
            point |= {"percent": percent, "error": error}
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
        if fields[0] == "mean_k":
            _set_log_ticks(panels[0], budgets, [f"{budget:,}" for budget in budgets])
        panels[0].set_ylabel(f"{_name_figure_of_merit(table)}, %")
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


def _shows_image_gain(table: BenchmarkTable) -> bool:
    """Returns whether some row has a share of the image's gain."""
    return any(table.image_gain(row) is not None for row in table.rows)


def _name_figure_of_merit(table: BenchmarkTable) -> str:
    """Returns the name of the figure that `draw_retention` plots."""
    return "image's gain kept" if _shows_image_gain(table) else "retention"


def _figure_of_merit(
    table: BenchmarkTable, row: MethodScores
) -> tuple[float | None, Interval | None]:
    """Returns the figure that `draw_retention` plots for a row, and its interval."""
    if _shows_image_gain(table):
        return table.image_gain(row), row.comparison.image_gain
    return table.average(row), row.comparison.retention


def _caption_retention(table: BenchmarkTable) -> str:
    """Returns the caption of the plot of `draw_retention`."""
    if _shows_image_gain(table):
        caption = (
            "Share of the image's gain that is kept: (score - score without an image) / (score "
            "with all tokens - score without an image), in %."
        )
    else:
        caption = "Retention: score in % of the score with all tokens."
    intervals = [_figure_of_merit(table, row)[1] for row in table.rows]
    has_bars = any(intervals)
    return f"{caption} Bars: ± one standard error over questions." if has_bars else caption


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
    coordinates = [
        (point[field], point["percent"], point["error"] or 0) for point in points if point[field]
    ]
    if coordinates:
        x, y, errors = np.array(coordinates, float).T
        color, marker = look
        linestyle, fill = ("--", "white") if mode == "adaptive" else ("-", color)
        line_style = {"color": color, "marker": marker, "ls": linestyle, "markersize": 5}
        axes.errorbar(x, y, errors if errors.any() else None, mfc=fill, capsize=2, **line_style)


def _set_log_ticks(axes: Axes, values: Sequence[float | int], labels: Sequence[str]) -> None:
    """Makes the horizontal axis logarithmic, with labeled ticks at `values` only."""
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_major_formatter(FixedFormatter(labels))


def count_buckets(
    count: Int[np.ndarray, "q"], grade: Float[np.ndarray, "q"]
) -> tuple[Float[np.ndarray, "e"], Int[np.ndarray, "k"], Float[np.ndarray, "k"]]:
    """Groups questions into k log-spaced buckets of kept tokens, as in the paper's Figure 3.

    There are six buckets, or fewer if the counts differ by less than six.

    Args:
        count: [q] number of kept tokens of each question.
        grade: [q] grade of each answer, from 0 to 1; NaN for an answer without a grade.

    Returns:
        A tuple (edges, num_questions, mean_grade). edges: [k + 1] whole numbers; bucket i has the
        counts with edges[i] <= count < edges[i + 1]. num_questions: [k] number of questions.
        mean_grade: [k] mean grade in percent; NaN for a bucket without a graded answer.
    """
    # A count may be 0, which has no logarithm. The last edge exceeds the largest count, because
    # buckets exclude their upper edge. Rounding keeps integer edges integer.
    first_edge = max(1, count.min())
    last_edge = max(first_edge, count.max()) + 1
    edges = np.geomspace(first_edge, last_edge, _BUCKETS + 1).round(9)
    # Counts are whole numbers, so rounding an edge up moves no count to another bucket.
    edges = np.unique(np.ceil(edges))
    num_buckets = len(edges) - 1
    bucket = np.clip(np.searchsorted(edges, count, side="right") - 1, 0, num_buckets - 1)
    is_graded = ~np.isnan(grade)
    num_graded = np.bincount(bucket[is_graded], minlength=num_buckets)
    grade_sum = np.bincount(bucket[is_graded], grade[is_graded], minlength=num_buckets)
    mean_grade = np.where(num_graded > 0, 100 * grade_sum / np.maximum(num_graded, 1), np.nan)
    return edges, np.bincount(bucket, minlength=num_buckets), mean_grade


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
        _set_log_ticks(axes, edges.tolist(), [f"{edge:,.0f}" for edge in edges])
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
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


def example_files(files: Sequence[AnswerFile], table: BenchmarkTable) -> list[AnswerFile]:
    """Selects up to four answer files, whose kept tokens are drawn on the same questions.

    The first file is `default_file`, if there is one. Then come the best methods with exact budgets
    that keep the same number of tokens, or the middle budget of the table.

    Args:
        files: answer files of one benchmark, one for each row of the table.
        table: scores of all rows.
    """
    policy_file = default_file(files)
    exact_files = [
        file
        for file in files
        if file.provenance.mode == "exact"
        and file.provenance.method not in (ALL, BLIND, DOWNSAMPLED)
        and file.provenance.budget is not None
    ]
    budgets = sorted({file.provenance.budget for file in exact_files}, key=lambda count: count or 0)
    if not budgets:
        return [] if policy_file is None else [policy_file]
    middle_budget = budgets[len(budgets) // 2]
    budget = middle_budget if policy_file is None else policy_file.provenance.budget
    headlines = {
        (row.method, row.budget): row.scores[file.provenance.benchmark]["headline"] or 0
        for file in exact_files[:1]
        for row in table.rows
        if row.mode == "exact" and file.provenance.benchmark in row.scores
    }
    policy_method = None if policy_file is None else policy_file.provenance.method
    rivals = [
        file
        for file in exact_files
        if file.provenance.budget == (budget or middle_budget)
        and file.provenance.method != without_learned_stop(policy_method or "")
    ]
    rivals.sort(
        key=lambda file: -headlines.get((file.provenance.method, file.provenance.budget), 0)
    )
    return [file for file in (policy_file, *rivals) if file is not None][:_MAX_EXAMPLE_METHODS]


def _examples_figure(
    answered_benchmark: AnsweredBenchmark, table: BenchmarkTable, num_examples: int
) -> str:
    """Returns an HTML figure of images with the kept tokens of up to four methods.

    Args:
        answered_benchmark: the benchmark with its questions and answer files.
        table: scores of all rows.
        num_examples: maximum number of questions. With several methods, each method is a row of
            panels, and the number of questions is at most the number of columns.

    Returns:
        The figure; "" without examples.
    """
    overlays_by_title: dict[str, list[Overlay]] = {}
    files = example_files(answered_benchmark.files, table)
    num_questions = min(num_examples, _COLUMNS) if len(files) > 1 else num_examples
    keys: list[tuple[str, str]] | None = None
    for file in files:
        answers = _read_graded_answers(answered_benchmark, file)
        if keys is None:
            keys = _sample_examples(answered_benchmark.questions, answers, num_questions)
        overlays = _make_overlays(answered_benchmark.questions, answers, keys)
        if len(files) > 1:
            name = shorten(file.provenance.method, 16)
            overlays = [overlay._replace(title=f"{name}, {overlay.title}") for overlay in overlays]
        if overlays:
            overlays_by_title[_row_title(file.provenance)] = overlays
    if not overlays_by_title:
        return ""
    rows = []
    for overlays in overlays_by_title.values():
        rows += [overlays[start : start + _COLUMNS] for start in range(0, len(overlays), _COLUMNS)]
    buffer = io.BytesIO()
    draw_rows(buffer, rows)
    titles = [*overlays_by_title]
    places = ", one row each" if len(titles) > 1 else ""
    return _figure(
        buffer.getvalue(),
        f"Kept tokens of {'; '.join(titles)}{places}, in the order of selection: "
        f"{answered_benchmark.benchmark.title}.",
    )


def _sample_examples(
    questions: Sequence[BenchmarkQuestion], graded_answers: _GradedAnswers, num_examples: int
) -> list[tuple[str, str]]:
    """Samples questions with an image, at regular intervals of an answer file.

    Args:
        questions: questions of the benchmark; may be empty.
        graded_answers: answers in the order of the file. Only answers that recorded their kept
            tokens can be drawn.
        num_examples: maximum number of examples; 0 draws none.

    Returns:
        Id and prompt of the questions, sorted by their number of kept tokens.
    """
    keys_with_image = {
        question.key
        for question in questions
        if question.image is not None and question.video is None
    }
    drawable = [
        answer
        for answer in graded_answers.answers
        if "grid" in answer.fields and (answer.id, answer.fields.get("prompt")) in keys_with_image
    ]
    if not num_examples or not drawable:
        return []
    examples = [drawable[index] for index in spread_over(len(drawable), num_examples)]
    examples.sort(key=lambda answer: answer.fields["kept"])
    return [(answer.id, answer.prompt) for answer in examples]


def _make_overlays(
    questions: Sequence[BenchmarkQuestion],
    graded_answers: _GradedAnswers,
    keys: Sequence[tuple[str, str]],
) -> list[Overlay]:
    """Prepares the answers of a method to some questions for drawing.

    Args:
        questions: questions of the benchmark.
        graded_answers: answers of the method.
        keys: id and prompt of the questions.

    Returns:
        The examples in the order of `keys`, without answers that did not record their kept tokens.
    """
    question_by_key = {question.key: question for question in questions}
    answer_by_key = {
        (answer.id, answer.fields.get("prompt")): (answer, grade)
        for answer, grade in zip(*graded_answers, strict=True)
        if "grid" in answer.fields
    }
    overlays = []
    for key in keys:
        question = question_by_key[key]
        if key not in answer_by_key or question.image is None or question.video is not None:
            continue
        answer, grade = answer_by_key[key]
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
