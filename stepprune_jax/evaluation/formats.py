"""Formats the table of one or several evaluation runs as Markdown, LaTeX, CSV and JSON.

The table of one benchmark has all figures. The tables of several benchmarks have a section for each
figure, with one column per benchmark.
"""

from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.answer_files import pruning_rate
from stepprune_jax.data.json_files import write_json
from stepprune_jax.evaluation.cells import Cell, csv_table, markdown_cell, markdown_rows
from stepprune_jax.evaluation.latex import latex_table
from stepprune_jax.evaluation.names import ALL
from stepprune_jax.evaluation.seeds import sample_deviation
from stepprune_jax.evaluation.table import (
    BenchmarkTable,
    MethodScores,
    Score,
    comparable_headlines,
    headlines,
)
from stepprune_jax.evaluation.uncertainty import Interval, McNemar
from stepprune_jax.selectors.calibration import StopCounts
from stepprune_jax.settings import is_number
from stepprune_jax.user_input import one_line

NAME = "table"
# Fields of `scores.score_hard`. Only runs with the row `names.DOWNSAMPLED` have them.
HARD = ("hard", "hard_questions")
# Sections of a table of several benchmarks, by the figure that they show, in display order.
_TITLES = {
    "headline": "Scores",
    "hard": "Scores on hard questions, in percent of their number",
    "test": "Questions lost / gained compared with all tokens, and p of McNemar's exact test",
    "kept": "Visual tokens kept, mean ± standard deviation",
    "ms": "Milliseconds per question",
    "gflops": "GFLOPs to the first token",
}
# Figures of the table of one benchmark that the display joins in one column, with the column's
# name. The columns of a pair follow each other in the objects of the table.
_PAIRS = {
    ("retention_low", "retention_high"): ("95 % interval", " to "),
    ("image_gain_low", "image_gain_high"): ("95 % interval of the gain", " to "),
    ("lost", "gained"): ("lost / gained", " / "),
}
# Part of a score with the figures of its categories, by benchmark. The categories of a benchmark
# without an entry are all parts that have one of `_CATEGORY_FIGURES`.
_CATEGORY_PARTS = {
    "folder": "category",
    "gqa": "structural",
    "mmbench": "category",
    "mmbench_cn": "category",
    "vqav2": "answer_type",
}
_CATEGORY_FIGURES = {"pope": "f1", "mme": "score"}


# Questions of a benchmark below which the report warns of its errors. The normal approximation and
# the bootstrap need both right and wrong answers in sufficient numbers.
_FEW_QUESTIONS = 100


class Section(NamedTuple):
    """A titled table of cells, ready to be printed as Markdown or HTML.

    Attributes:
        title: title above the table; may be empty.
        header: names of the columns.
        rows: values of the cells.
        num_text_columns: number of left-aligned columns with text. They precede the columns with
            figures.
    """

    title: str
    header: list[str]
    rows: list[list[Cell]]
    num_text_columns: int


def sections(table: BenchmarkTable) -> list[Section]:
    """Arranges the figures of a table for display.

    Args:
        table: the scores.

    Returns:
        For one benchmark, a section with all figures of each row. For several benchmarks, a section
        for each figure (score, test, kept tokens, time, FLOPs) with one column per benchmark. Then
        a section for each benchmark with categories.
    """
    if len(table.benchmarks) == 1:
        first_sections = [_make_single_section(table)]
    else:
        figures = [figure for figure in _TITLES if _has_figure(table, figure)]
        first_sections = [_make_section(table, figure) for figure in figures]
    category_sections = (_make_category_section(table, name) for name in table.benchmarks)
    return [*first_sections, *filter(None, category_sections)]


def _has_figure(table: BenchmarkTable, figure: str) -> bool:
    """Returns whether a table of several benchmarks has the section of a figure."""
    if figure == "hard":
        return _has_hard_scores(table)
    return figure != "test" or any(row.comparison.tests for row in table.rows)


def _make_single_section(table: BenchmarkTable) -> Section:
    """Builds the section of all figures, for a table with one benchmark."""
    column = BENCHMARKS[table.benchmarks[0]].column
    header, rows = [], []
    for row in table.rows:
        row_object = _single_benchmark_object(table, row)
        cells: dict[str, Cell] = {}
        for field, value in row_object.items():
            pair = next((pair for pair in _PAIRS if field in pair), None)
            if pair is None:
                cells[field.replace("_", " ")] = value
            elif field == pair[0]:
                title, separator = _PAIRS[pair]
                values = [row_object[name] for name in pair]
                cells[title] = None if None in values else separator.join(map(str, values))
        for name in (column, "retention"):
            deviation = cells.pop(f"{name} sd", None)
            if deviation is not None:
                num_seeds = len(str(row.seeds).split(","))
                cells[name] = f"{cells[name]} ± {deviation} ({num_seeds})"
        header, rows = [*cells], [*rows, [*cells.values()]]
    return Section("", header, rows, num_text_columns=2)


def _make_section(table: BenchmarkTable, figure: str) -> Section:
    """Builds the section of one figure, with a column for each benchmark.

    Args:
        table: the scores.
        figure: the figure, a key of `_TITLES`. The section of scores has further columns: the
            average retention with its interval, the image's gain, and the seed.
    """
    header = [*("tokens", "method", "mode"), *(BENCHMARKS[name].title for name in table.benchmarks)]
    title, is_headline = _TITLES[figure], figure == "headline"
    all_scores = [score for row in table.rows for score in row.scores.values()]
    has_errors = any(score.get("standard_error") is not None for score in all_scores)
    has_averages = any("headlines" in score for score in all_scores)
    has_intervals = any(row.comparison.retention for row in table.rows)
    has_seeds = any(row.seeds for row in table.rows)
    if is_headline and has_averages:
        title += ": ± standard deviation over seeds (number of seeds)"
        title += ", or ± standard error of one run" if has_errors else ""
    elif is_headline and has_errors:
        title += " ± standard error over questions"
    if is_headline:
        header += ["Avg.", *(["95 % interval"] if has_intervals else [])]
        header += ["image gain"] if table.blind is not None else []
        header += ["seed"] if has_seeds else []
    rows = []
    for row in table.rows:
        cells = _row_head(table, row)
        for name in table.benchmarks:
            has_score = name in row.scores
            cells.append(_format_figure(row, name, figure) if has_score else None)
        if is_headline:
            cells.append(_join_deviation(table.average(row), table.average_deviation(row), 1, row))
            if has_intervals:
                interval = row.comparison.retention
                cells.append(interval and f"{interval.low:.1f} to {interval.high:.1f}")
            if table.blind is not None:
                cells.append(_decimals(table.image_gain(row), 1))
            cells += [row.seeds] if has_seeds else []
        rows.append(cells)
    return Section(title, header, rows, num_text_columns=3)


def _row_head(table: BenchmarkTable, row: MethodScores) -> list[Cell]:
    """Returns the cells that name a row: tokens, method and mode."""
    tokens = "own stop"
    if row.budget is not None:
        tokens = f"{row.budget} ({100 * (1 - row.budget / table.num_tokens):.1f} % pruned)"
    return [tokens, row.method, row.mode]


def _make_category_section(table: BenchmarkTable, name: str) -> Section | None:
    """Builds the section of a benchmark's categories; None if it has fewer than two categories."""
    names = _category_names(table, name)
    if len(names) < 2:
        return None
    rows = []
    for row in table.rows:
        figures = _category_figures(name, row.scores.get(name, {}))
        errors = row.scores.get(name, {}).get("category_errors", {})
        cells = _row_head(table, row)
        for category in names:
            text, error = _decimals(figures.get(category), 1), errors.get(category)
            cells.append(text if error is None else f"{text} ± {error:.1f}")
        rows.append(cells)
    title = f"{BENCHMARKS[name].title} by category"
    if any(row.scores.get(name, {}).get("category_errors") for row in table.rows):
        title += ", ± standard error over questions"
        has_averages = any("headlines" in row.scores.get(name, {}) for row in table.rows)
        title += " (means over seeds have none)" if has_averages else ""
    return Section(title, ["tokens", "method", "mode", *names], rows, num_text_columns=3)


def _category_names(table: BenchmarkTable, name: str) -> list[str]:
    """Returns the names of a benchmark's categories in the order of their first score."""
    scores = [row.scores.get(name, {}) for row in table.rows]
    return list(dict.fromkeys(key for score in scores for key in _category_figures(name, score)))


def _category_figures(name: str, score: Score) -> dict[str, float]:
    """Returns the figures of a score by category; empty for a benchmark without categories.

    Args:
        name: name of the benchmark.
        score: a score of the benchmark. Users may edit files of scores.
    """
    parts = score.get("parts", {})
    if name in _CATEGORY_FIGURES:
        figure = _CATEGORY_FIGURES[name]
        parts = {
            key: part.get(figure)
            for key, part in parts.items()
            if isinstance(part, dict) and key != "by_position"
        }
    else:
        parts = parts.get(_CATEGORY_PARTS.get(name, ""), {})
    if not isinstance(parts, dict):
        return {}
    return {key: float(value) for key, value in parts.items() if is_number(value)}


def _format_figure(row: MethodScores, name: str, figure: str) -> Cell:
    """Formats a figure of a row on a benchmark.

    Args:
        row: the row, which has a score of the benchmark.
        name: name of the benchmark.
        figure: the figure, a key of `_TITLES`.
    """
    score, decimals = row.scores[name], BENCHMARKS[name].decimals
    if figure == "headline":
        error = score.get("standard_error")
        text = _join_deviation(score["headline"], _seed_deviation(score), decimals, row)
        return text if error is None else f"{text} ± {error:.{max(1, decimals)}f}"
    if figure == "kept" and score["mean_k"] is not None:
        return f"{score['mean_k']:.1f} ± {score['sd_k']:.1f}"
    if figure == "hard" and "hard" in score:
        return f"{score['hard']:.1f} of {score['hard_questions']:,}"
    if figure == "test" and name in row.comparison.tests:
        test = row.comparison.tests[name]
        return f"{test.lost} / {test.gained} (p = {test.p:.2g})"
    if figure == "ms":
        return _decimals(score["ms"], 1)
    return _gflops(score) if figure == "gflops" else None


def _seed_deviation(score: Score) -> float | None:
    """Returns the standard deviation of a score over seeds; None for the score of one run."""
    return sample_deviation([*score["headlines"].values()]) if "headlines" in score else None


def _join_deviation(
    mean: float | None, deviation: float | None, decimals: int, row: MethodScores
) -> str | None:
    """Formats a mean over seeds as "mean ± deviation (number of seeds)".

    Args:
        mean: the mean, or the figure of a single run; None for no figure.
        deviation: standard deviation over seeds; None for a single run.
        decimals: number of decimals of the mean.
        row: the row, which has the seeds.
    """
    text = _decimals(mean, decimals)
    if text is None or deviation is None:
        return text
    return f"{text} ± {deviation:.{max(1, decimals)}f} ({len(str(row.seeds).split(','))})"


def _decimals(value: float | None, decimals: int) -> str | None:
    """Formats a number with a fixed number of decimals; None stays None."""
    return None if value is None else f"{value:.{decimals}f}"


def _gflops(score: Score) -> float | None:
    """Returns the operations of a score, rounded to four digits; None if they were not counted."""
    gflops = score.get("gflops")
    return None if gflops is None else float(f"{gflops:.4g}")


def _has_hard_scores(table: BenchmarkTable) -> bool:
    """Returns whether the table has scores of `scores.score_hard`."""
    return any("hard" in score for row in table.rows for score in row.scores.values())


def notes(table: BenchmarkTable) -> list[str]:
    """Returns the remarks and warnings below a table, one line each.

    Args:
        table: the scores, with the warnings of benchmarks.

    Returns:
        The lines. A warning about one row ends with the name of the row. A warning about several
        rows ends with their number.
    """
    rows_by_note: dict[str, list[str]] = {remark: [] for remark in table.remarks}
    for row in table.rows:
        for benchmark, score in row.scores.items():
            stop_warnings = (_stop_warning(score), _mean_budget_warning(score))
            messages = (*score["warnings"], score["problem"], *stop_warnings)
            for message in filter(None, messages):
                note = f"{BENCHMARKS[benchmark].title}: {message}"
                rows_by_note.setdefault(note, []).append(f"{row.method} {row.mode}")
    rows_by_note |= {note: [] for note in _table_notes(table)}
    lines = []
    for note, rows in rows_by_note.items():
        if len(rows) > 1:
            note += f" ({len(rows)} rows)"
        elif rows:
            note += f" ({rows[0]})"
        lines.append(note)
    return lines


def _table_notes(table: BenchmarkTable) -> list[str]:
    """Returns the notes that concern the table in general, not certain rows."""
    lines = []
    num_questions = {
        name: max(row.scores[name]["answered"] for row in table.rows if name in row.scores)
        for name in table.benchmarks
    }
    for name, count in num_questions.items():
        if count < _FEW_QUESTIONS:
            lines.append(
                f"{BENCHMARKS[name].title} has {count} questions: standard errors and intervals "
                f"are unreliable below {_FEW_QUESTIONS}, and are 0 if all answers agree"
            )
    if _has_hard_scores(table):
        lines.append(
            "hard questions are right with all tokens, and wrong with an image that is downsampled "
            "to the same number of tokens"
        )
    if _is_pruning_slower(table):
        lines.append(
            "choosing tokens of a model as small as this one takes longer than it saves: "
            "`python -m stepprune_jax.efficiency --model llava-7b` times a large one"
        )
    if not table.all_tokens:
        lines.append(f"no row of {ALL}, so no retention")
    else:
        scored_benchmarks = headlines(table.all_tokens)
        unscored_titles = [
            BENCHMARKS[name].title for name in table.benchmarks if name not in scored_benchmarks
        ]
        if unscored_titles:
            titles = ", ".join(unscored_titles)
            lines.append(f"retention excludes {titles}, where {ALL} has no score")
        lines += _unsuited_benchmarks(table)
    return lines


def _unsuited_benchmarks(table: BenchmarkTable) -> list[str]:
    """Returns a note for each benchmark that cannot tell good pruning from bad.

    The table has the row of all tokens.
    """
    assert table.all_tokens is not None
    blind = table.blind
    blind_scores = {} if blind is None else comparable_headlines(blind, table.all_tokens)
    lines = []
    for name, unpruned_score in headlines(table.all_tokens).items():
        title, blind_score = BENCHMARKS[name].title, blind_scores.get(name)
        if not unpruned_score:
            lines.append(
                f"{title}: with all tokens no answer is right: compare the form of the answers, or "
                "use another model"
            )
        elif blind_score is not None and blind_score >= unpruned_score:
            lines.append(
                f"{title}: the image gains nothing, because the score without it is as high: any "
                "pruning is as good"
            )
    return lines


def _stop_warning(score: Score) -> str:
    """Returns a warning if a learned stop keeps its minimum or maximum for most questions.

    Such a stop hardly adapts to the question. Other scores give "".
    """
    # `score_file` omits the two fractions if both are 0, for example without a learned stop.
    counts = StopCounts(
        mean=score["mean_k"] or 0.0,
        deviation=score["sd_k"] or 0.0,
        num_tokens=score["num_tokens"],
        at_floor=score.get("at_floor", 0.0),
        at_cap=score.get("at_cap", 0.0),
    )
    return counts.finding


def _mean_budget_warning(score: Score) -> str:
    """Returns a warning if a learned stop misses the mean budget of its row by more than a tenth.

    The stop was calibrated on other questions, or on few. Other scores give "".
    """
    budget, mean_kept = score["budget"], score["mean_k"]
    if score["mode"] != "adaptive" or not budget or mean_kept is None:
        return ""
    if abs(mean_kept - budget) <= 0.1 * budget:
        return ""
    return f"the mean budget is {budget}, and the stop keeps {mean_kept:.1f} tokens on average"


def _is_pruning_slower(table: BenchmarkTable) -> bool:
    """Returns whether most rows with fewer FLOPs than the unpruned model take more time."""
    costs = [(row.mean("ms"), row.mean("gflops")) for row in table.rows]
    unpruned_ms, unpruned_gflops = costs[0]
    if table.all_tokens is None or unpruned_ms is None or unpruned_gflops is None:
        return False
    is_slower = [
        ms > unpruned_ms
        for ms, gflops in costs[1:]
        if ms is not None and gflops is not None and gflops < unpruned_gflops
    ]
    return 2 * sum(is_slower) > len(is_slower)


def as_markdown(table: BenchmarkTable) -> str:
    """Formats a table and its notes as Markdown."""
    blocks = []
    for section in sections(table):
        heading = f"## {section.title}\n\n" if section.title else ""
        blocks.append(
            heading + markdown_rows(section.header, section.rows, section.num_text_columns)
        )
    note_items = "".join(f"- {markdown_cell(note)}\n" for note in notes(table))
    if note_items:
        blocks.append(f"## Notes\n\n{note_items}")
    return "\n".join(blocks)


def as_latex(table: BenchmarkTable) -> str:
    """Formats a table and its notes as LaTeX, with one `tabular` per section."""
    blocks = [r"% Needs \usepackage{booktabs}." + "\n"]
    blocks += [latex_table(*section) for section in sections(table)]
    blocks.append("".join(f"% {one_line(note)}\n" for note in notes(table)))
    return "\n".join(filter(None, blocks))


def as_objects(table: BenchmarkTable) -> list[dict[str, Cell]]:
    """Converts a table to one JSON object per row.

    Args:
        table: the scores.

    Returns:
        For one benchmark, objects with all figures. For several benchmarks, objects with the
        average retention and, for each benchmark, the score under its name, and kept tokens, time
        and FLOPs under "BENCHMARK_FIELD".
    """
    if len(table.benchmarks) == 1:
        (name,) = table.benchmarks
        return [
            _single_benchmark_object(table, row) | _category_fields(table, row, name)
            for row in table.rows
        ]
    all_scores = [score for row in table.rows for score in row.scores.values()]
    has_errors = any(score.get("standard_error") is not None for score in all_scores)
    has_averages = any("headlines" in score for score in all_scores)
    has_intervals = any(row.comparison.retention for row in table.rows)
    has_tests = any(row.comparison.tests for row in table.rows)
    row_objects = []
    for row in table.rows:
        row_object: dict[str, Cell] = {
            "method": row.method,
            "mode": row.mode,
            "tokens": row.budget,
            "average": table.average(row),
        }
        if has_intervals:
            row_object |= _interval_fields("average", row.comparison.retention)
        if has_averages:
            row_object["average_sd"] = table.average_deviation(row)
        if table.blind is not None:
            row_object["image_gain"] = table.image_gain(row)
            if has_intervals:
                row_object |= _interval_fields("image_gain", row.comparison.image_gain)
        row_object["seed"] = row.seeds
        for name in table.benchmarks:
            score = row.scores.get(name, {})
            row_object[name] = score.get("headline")
            if has_errors:
                row_object[f"{name}_standard_error"] = score.get("standard_error")
            if has_averages:
                row_object[f"{name}_sd"] = _seed_deviation(score)
            for field in ("mean_k", "sd_k", "ms"):
                row_object[f"{name}_{field}"] = score.get(field)
            row_object[f"{name}_gflops"] = _gflops(score)
            if has_tests:
                row_object |= _test_fields(row.comparison.tests.get(name), f"{name}_")
            row_object |= _category_fields(table, row, name)
        row_objects.append(row_object)
    return row_objects


def _interval_fields(name: str, interval: Interval | None) -> dict[str, Cell]:
    """Returns the ends of an interval, rounded, as the fields NAME_low and NAME_high."""
    ends = (None, None) if interval is None else (interval.low, interval.high)
    return {
        f"{name}_{end}": None if value is None else round(value, 2)
        for end, value in zip(("low", "high"), ends, strict=True)
    }


def _test_fields(test: McNemar | None, prefix: str = "") -> dict[str, Cell]:
    """Returns the fields of McNemar's test, whose names begin with a prefix."""
    lost, gained, p = (None, None, None) if test is None else test
    p = None if p is None else float(f"{p:.3g}")
    return {f"{prefix}lost": lost, f"{prefix}gained": gained, f"{prefix}mcnemar_p": p}


def _category_fields(table: BenchmarkTable, row: MethodScores, name: str) -> dict[str, Cell]:
    """Returns the figures of a row by category, as fields BENCHMARK/CATEGORY.

    Standard errors are fields BENCHMARK/CATEGORY_standard_error, if some row has them.
    """
    category_names = _category_names(table, name)
    if len(category_names) < 2:
        return {}
    score = row.scores.get(name, {})
    figures, errors = _category_figures(name, score), score.get("category_errors", {})
    has_errors = any(
        table_row.scores.get(name, {}).get("category_errors") for table_row in table.rows
    )
    fields: dict[str, Cell] = {}
    for category in category_names:
        columns = {f"{name}/{category}": figures.get(category)}
        if has_errors:
            columns[f"{name}/{category}_standard_error"] = errors.get(category)
        for column, value in columns.items():
            fields[column] = None if value is None else round(value, 2)
    return fields


def _single_benchmark_object(table: BenchmarkTable, row: MethodScores) -> dict[str, Cell]:
    """Returns all figures of a row by name, for a table with a single benchmark.

    Args:
        table: the table.
        row: a row of the table.

    Returns:
        The figures, rounded for display. A figure that was not measured is None. "pruning_rate" and
        "retention" are percentages relative to the unpruned model.
    """
    (score,), benchmark = row.scores.values(), BENCHMARKS[table.benchmarks[0]]
    unpruned_score = next(iter(table.all_tokens.scores.values())) if table.all_tokens else {}
    unpruned_headline, headline = unpruned_score.get("headline"), score["headline"]
    rate, retention = None, None
    has_same_questions = score.get("scored") == unpruned_score.get("scored")
    if headline is not None and unpruned_headline and has_same_questions:
        # Accuracies are fractions with the same denominator, so their ratio is a ratio of two
        # integers. Recovering it from the float makes rounding of ties independent of float errors.
        ratio = Fraction(headline / unpruned_headline).limit_denominator(10**6)
        retention = round(100 * float(ratio), 2)
    if row.budget is not None:
        rate = pruning_rate(row.budget, table.num_tokens)
    elif score["mean_k"] is not None:  # a learned stop has no budget, so its mean count is used
        unpruned_count = round(unpruned_score.get("mean_k") or table.num_tokens)
        rate = pruning_rate(score["mean_k"], max(1, unpruned_count))
    return {
        "method": row.method,
        "mode": row.mode,
        "tokens": row.budget,
        "pruning_rate": rate,
        benchmark.column: None if headline is None else round(headline, benchmark.decimals),
        **_error_fields(table, row),
        "retention": retention,
        **_seed_retention_field(table, row),
        **_comparison_fields(table, row),
        **_image_gain_figure(table, row),
        **({name: score.get(name) for name in HARD} if _has_hard_scores(table) else {}),
        "mean_k": None if score["mean_k"] is None else round(score["mean_k"], 2),
        "ms": None if score["ms"] is None else round(score["ms"], 3),
        "gflops": _gflops(score),
        "questions": score.get("scored", score["answered"]),
        "seed": row.seeds if "headlines" in score else score["seed"],
    }


def _error_fields(table: BenchmarkTable, row: MethodScores) -> dict[str, Cell]:
    """Returns the errors of a row's score over questions and over seeds, rounded.

    The table has one benchmark. A field is absent if no row of the table has the error.
    """
    (score,), benchmark = row.scores.values(), BENCHMARKS[table.benchmarks[0]]
    table_scores = [next(iter(table_row.scores.values())) for table_row in table.rows]
    decimals, fields = max(1, benchmark.decimals), {}
    if any("headlines" in table_score for table_score in table_scores):
        deviation = _seed_deviation(score)
        fields[f"{benchmark.column}_sd"] = None if deviation is None else round(deviation, decimals)
    if any(table_score.get("standard_error") is not None for table_score in table_scores):
        error = score.get("standard_error")
        fields["standard_error"] = None if error is None else round(error, decimals)
    return fields


def _seed_retention_field(table: BenchmarkTable, row: MethodScores) -> dict[str, Cell]:
    """Returns the deviation of a row's retention over seeds, if some row has several seeds."""
    scores = [score for table_row in table.rows for score in table_row.scores.values()]
    if not any("headlines" in score for score in scores):
        return {}
    deviation = table.average_deviation(row)
    return {"retention_sd": None if deviation is None else round(deviation, 2)}


def _comparison_fields(table: BenchmarkTable, row: MethodScores) -> dict[str, Cell]:
    """Returns the interval of a row's retention, and McNemar's test with all tokens.

    The table has one benchmark. A field is absent if no row of the table has the figure.
    """
    fields: dict[str, Cell] = {}
    if any(table_row.comparison.retention for table_row in table.rows):
        fields |= _interval_fields("retention", row.comparison.retention)
    if any(table_row.comparison.tests for table_row in table.rows):
        fields |= _test_fields(row.comparison.tests.get(table.benchmarks[0]))
    return fields


def _image_gain_figure(table: BenchmarkTable, row: MethodScores) -> dict[str, Cell]:
    """Returns the image's gain that a row keeps, and its interval if some row of the table has one.

    The result is empty if no run has the row without an image.
    """
    if table.blind is None:
        return {}
    image_gain = table.image_gain(row)
    fields: dict[str, Cell] = {"image_gain": None if image_gain is None else round(image_gain, 2)}
    if any(table_row.comparison.image_gain for table_row in table.rows):
        fields |= _interval_fields("image_gain", row.comparison.image_gain)
    return fields


def write_table(folder: Path, table: BenchmarkTable) -> None:
    """Writes a table to table.md, .tex, .csv and .json in a folder, which may not exist yet."""
    folder.mkdir(parents=True, exist_ok=True)
    row_objects = as_objects(table)
    (folder / f"{NAME}.tex").write_text(
        as_latex(table), encoding="utf-8", errors="backslashreplace"
    )
    (folder / f"{NAME}.md").write_text(as_markdown(table), encoding="utf-8")
    (folder / f"{NAME}.csv").write_text(
        csv_table(row_objects),
        encoding="utf-8",
        errors="backslashreplace",  # A name from the user may contain an unpaired surrogate.
    )
    write_json(folder / f"{NAME}.json", row_objects)
