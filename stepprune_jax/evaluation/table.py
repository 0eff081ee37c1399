"""Builds the tables of one or several evaluation runs.

    stepprune-table runs/llava7b runs/baselines

The table of one benchmark has all figures. The tables of several benchmarks follow the format of
papers: "Avg." is 100 times the mean over benchmarks of (score / score with all tokens), computed
from unrounded scores. One of the runs must contain the row of all tokens.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.answer_files import pruning_rate
from stepprune_jax.data.json_files import write_json
from stepprune_jax.evaluation.cells import Cell, csv_table, markdown_cell, markdown_rows
from stepprune_jax.evaluation.names import ALL, BLIND, DEFAULT, row_place
from stepprune_jax.registry import PRUNERS
from stepprune_jax.selectors.calibration import StopCounts
from stepprune_jax.user_input import UserError

NAME = "table"
# Fields of `scores.score_hard`. Only runs with the row `names.DOWNSAMPLED` have them.
HARD = ("hard", "hard_questions")
# Titles of the sections of a table of several benchmarks, in display order.
_SCORES_TITLE = "Scores"
_HARD_TITLE = "Scores on hard questions, in percent of their number"
_FIGURE_TITLES = (
    _SCORES_TITLE,
    _HARD_TITLE,
    "Visual tokens kept, mean ± standard deviation",
    "Milliseconds per question",
    "GFLOPs to the first token",
)
Score = Mapping[str, Any]  # result of `scores.score_file`


class MethodScores(NamedTuple):
    """The scores of one row of a table.

    A row is a pruning method at one budget. Built by `merge_scores`.

    Attributes:
        method: name of the row.
        mode: "exact" if each image keeps `budget` tokens. "adaptive" if a learned stop ends the
            selection; `budget` is then the mean over images.
        budget: number of tokens kept; None for a learned stop without a target.
        scores: score by benchmark.
    """

    method: str
    mode: str
    budget: int | None
    scores: dict[str, Score]

    def mean(self, field: str) -> float | None:
        """Returns the mean of a field over the benchmarks, or None if a benchmark lacks it."""
        values = [score.get(field) for score in self.scores.values()]
        numbers = [value for value in values if value is not None]
        return sum(numbers) / len(numbers) if len(numbers) == len(values) else None


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


class BenchmarkTable(NamedTuple):
    """The scores of all rows on all benchmarks. Built by `merge_scores`.

    Attributes:
        benchmarks: names of the benchmarks in the order of columns.
        num_tokens: number of visual tokens of the largest image.
        rows: the rows in display order.
        remarks: remarks of the user, which precede the generated notes.
    """

    benchmarks: list[str]
    num_tokens: int
    rows: list[MethodScores]
    remarks: tuple[str, ...] = ()

    @property
    def all_tokens(self) -> MethodScores | None:
        """The row of the unpruned model, which keeps all tokens; None if no run has this row."""
        return self.rows[0] if self.rows[0].method == ALL else None

    def average(self, row: MethodScores) -> float | None:
        """Returns the mean over benchmarks of score / unpruned score, in percent.

        This is the column "Avg." of papers. Benchmarks on which the unpruned model has no score are
        excluded.

        Args:
            row: a row of the table.

        Returns:
            The average retention. None if there is no unpruned score, if one is 0, or if `row`
            lacks a score that the unpruned model has.
        """
        unpruned_scores = _headlines(self.all_tokens) if self.all_tokens else {}
        row_scores = _headlines(row)
        has_all_scores = unpruned_scores.keys() <= row_scores.keys()
        if not unpruned_scores or not has_all_scores or not all(unpruned_scores.values()):
            return None
        ratios = [row_scores[name] / score for name, score in unpruned_scores.items()]
        return 100 * sum(ratios) / len(ratios)

    @property
    def blind(self) -> MethodScores | None:
        """The row of the model without visual tokens; None if no run has this row."""
        return next((row for row in self.rows if row.method == BLIND), None)

    def image_gain(self, row: MethodScores) -> float | None:
        """Returns the share of the image's gain that a row keeps, in percent.

        The gain of the image on a benchmark is the score with all tokens minus the score without an
        image. The share is (score - blind score) / gain, averaged over benchmarks.

        Args:
            row: a row of the table.

        Returns:
            The average share. None if a score is missing, or if the image gains nothing on a
            benchmark.
        """
        if self.all_tokens is None or self.blind is None:
            return None
        unpruned_scores, blind_scores = _headlines(self.all_tokens), _headlines(self.blind)
        row_scores, shares = _headlines(row), []
        for name, unpruned_score in unpruned_scores.items():
            if name not in blind_scores or name not in row_scores:
                return None
            gain = unpruned_score - blind_scores[name]
            if gain <= 0:
                return None
            shares.append((row_scores[name] - blind_scores[name]) / gain)
        return 100 * sum(shares) / len(shares) if shares else None


def _headlines(row: MethodScores) -> dict[str, float]:
    """Returns the main score of a row on each benchmark, omitting benchmarks without a score."""
    headlines = {name: score["headline"] for name, score in row.scores.items()}
    return {name: value for name, value in headlines.items() if value is not None}


def merge_scores(runs: Mapping[str, Sequence[Score]], labels: Sequence[str] = ()) -> BenchmarkTable:
    """Combines the scores of several runs into one table.

    A method whose results differ between runs gets one row per run, named "METHOD (RUN)". If
    several runs have a score for the same cell of the table, a score of all questions takes
    precedence over a score of some questions.

    Args:
        runs: results of `scores.score_file` by name of the run.
        labels: method names in display order. If empty, the order of `PRUNERS` is used. Methods
            that are not listed follow in alphabetical order, and the default policy comes last.

    Returns:
        The table.

    Raises:
        UserError: runs differ in questions, visual tokens, or scores of the unpruned model.
    """
    run_scores = [(run, score) for run, scores in runs.items() for score in scores]
    _check_same_conditions(run_scores)
    ambiguous_methods = _find_ambiguous_methods([score for _, score in run_scores])
    scores_by_row: dict[tuple[str, str, int | None], dict[str, Score]] = {}
    for run, score in run_scores:
        method = score["method"]
        if method in ambiguous_methods:
            method = f"{method} ({run})"
        row_key = method, score["mode"], score["budget"]
        row_scores = scores_by_row.setdefault(row_key, {})
        if _is_complete(score) or score["benchmark"] not in row_scores:
            row_scores[score["benchmark"]] = score
    labels = labels or [method.label for method in PRUNERS.values() if method.config_type is None]
    other_methods = {method for method, _, _ in scores_by_row} - {*labels}
    other_methods = sorted(other_methods, key=lambda name: (name.startswith(DEFAULT), name))
    labels = [*labels, *other_methods]
    sorted_keys = sorted(scores_by_row, key=lambda row_key: row_place(*row_key, labels))
    scored_benchmarks = {score["benchmark"] for _, score in run_scores}
    return BenchmarkTable(
        benchmarks=[name for name in BENCHMARKS if name in scored_benchmarks],
        num_tokens=run_scores[0][1]["num_tokens"],
        rows=[MethodScores(*row_key, scores_by_row[row_key]) for row_key in sorted_keys],
    )


def _check_same_conditions(run_scores: Sequence[tuple[str, Score]]) -> None:
    """Checks that scores of several runs are comparable.

    Args:
        run_scores: pairs (name of the run, score).

    Raises:
        UserError: two scores differ in visual tokens, or two scores of one benchmark differ in
            questions or in the result of the unpruned model.
    """
    _check_equal(run_scores, "num_tokens", "visual tokens")
    for name in {score["benchmark"] for _, score in run_scores}:
        benchmark_scores = [(run, score) for run, score in run_scores if score["benchmark"] == name]
        _check_equal(benchmark_scores, "questions", f"questions of {name}")
        unpruned_scores = [
            (run, score)
            for run, score in benchmark_scores
            if score["method"] == ALL and _is_complete(score)
        ]
        _check_equal(unpruned_scores, "headline", f"score of {ALL} on {name}")


def _check_equal(run_scores: Sequence[tuple[str, Score]], field: str, description: str) -> None:
    """Raises a UserError if scores differ in a field.

    Args:
        run_scores: pairs (name of the run, score).
        field: name of the field.
        description: name of the field in the error message.
    """
    for run, score in run_scores[1:]:
        first_run, first_score = run_scores[0]
        if score[field] != first_score[field]:
            raise UserError(
                f"{first_score['method']} of {first_run} and {score['method']} of {run} have "
                f"different {description} ({first_score[field]} and {score[field]}): they do not "
                "belong in one table"
            )


def _is_complete(score: Score) -> bool:
    """Returns whether the score covers all questions of the benchmark."""
    return score["answered"] >= score["asked"]


def _find_ambiguous_methods(scores: Sequence[Score]) -> set[str]:
    """Returns the names of methods that have different results for the same table cell.

    Only scores of all questions are compared: an incomplete score differs in any case.
    """
    first_results: dict[tuple[Cell, ...], tuple[Cell, ...]] = {}
    ambiguous_methods = set()
    for score in filter(_is_complete, scores):
        table_cell = score["benchmark"], score["method"], score["mode"], score["budget"]
        result = score["headline"], score["mean_k"]
        if first_results.setdefault(table_cell, result) != result:
            ambiguous_methods.add(score["method"])
    return ambiguous_methods


def sections(table: BenchmarkTable) -> list[Section]:
    """Arranges the figures of a table for display.

    Args:
        table: the scores.

    Returns:
        For one benchmark, a single section with all figures of each row. For several benchmarks, a
        section for each figure (score, kept tokens, time, FLOPs) with one column per benchmark.
    """
    if len(table.benchmarks) == 1:
        row_objects = as_objects(table)
        header = [field.replace("_", " ") for field in row_objects[0]]
        rows = [list(row_object.values()) for row_object in row_objects]
        return [Section("", header, rows, num_text_columns=2)]
    titles = _FIGURE_TITLES
    if not _has_hard_scores(table):
        titles = [title for title in titles if title != _HARD_TITLE]
    return [_make_section(table, title) for title in titles]


def _make_section(table: BenchmarkTable, title: str) -> Section:
    """Builds the section of one figure, with a column for each benchmark.

    Args:
        table: the scores.
        title: title of the section, one of `_FIGURE_TITLES`. The section of scores has a further
            column with the average retention.
    """
    header = ["tokens", "method", "mode"]
    header += [BENCHMARKS[name].title for name in table.benchmarks]
    has_average = title == _SCORES_TITLE
    has_gain = has_average and table.blind is not None
    header += ["Avg."] if has_average else []
    header += ["image gain"] if has_gain else []
    rows = []
    for row in table.rows:
        tokens = "own stop"
        if row.budget is not None:
            tokens = f"{row.budget} ({100 * (1 - row.budget / table.num_tokens):.1f} % pruned)"
        cells: list[Cell] = [tokens, row.method, row.mode]
        for name in table.benchmarks:
            cells.append(_format_figures(row.scores[name])[title] if name in row.scores else None)
        if has_average:
            cells.append(_decimals(table.average(row), 1))
        if has_gain:
            cells.append(_decimals(table.image_gain(row), 1))
        rows.append(cells)
    return Section(title, header, rows, num_text_columns=3)


def _format_figures(score: Score) -> dict[str, Cell]:
    """Formats the figures of a score, by the title of the section that shows them."""
    kept, hard = None, None
    if score["mean_k"] is not None:
        kept = f"{score['mean_k']:.1f} ± {score['sd_k']:.1f}"
    if "hard" in score:
        hard = f"{score['hard']:.1f} of {score['hard_questions']:,}"
    headline = _decimals(score["headline"], BENCHMARKS[score["benchmark"]].decimals)
    cells = headline, hard, kept, _decimals(score["ms"], 1), score.get("gflops")
    return dict(zip(_FIGURE_TITLES, cells, strict=True))


def _decimals(value: float | None, decimals: int) -> str | None:
    """Formats a number with a fixed number of decimals; None stays None."""
    return None if value is None else f"{value:.{decimals}f}"


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
            messages = (*score["warnings"], score["problem"], _stop_warning(score))
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
    if _has_hard_scores(table):
        lines.append(
            "hard questions are right with all tokens, and wrong if downsampled to as many"
        )
    if _is_pruning_slower(table):
        lines.append(
            "choosing tokens of a model as small as this one takes longer than it saves: "
            "`python -m stepprune_jax.efficiency --model llava-7b` times a large one"
        )
    if not table.all_tokens:
        lines.append(f"no row of {ALL}, so no retention")
    else:
        scored_benchmarks = _headlines(table.all_tokens)
        unscored_titles = [
            BENCHMARKS[name].title for name in table.benchmarks if name not in scored_benchmarks
        ]
        if unscored_titles:
            titles = ", ".join(unscored_titles)
            lines.append(f"retention excludes {titles}, where {ALL} has no score")
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
        return [_single_benchmark_object(table, row) for row in table.rows]
    row_objects = []
    for row in table.rows:
        row_object: dict[str, Cell] = {
            "method": row.method,
            "mode": row.mode,
            "tokens": row.budget,
            "average": table.average(row),
        }
        if table.blind is not None:
            row_object["image_gain"] = table.image_gain(row)
        for name in table.benchmarks:
            score = row.scores.get(name, {})
            row_object[name] = score.get("headline")
            for field in ("mean_k", "sd_k", "ms", "gflops"):
                row_object[f"{name}_{field}"] = score.get(field)
        row_objects.append(row_object)
    return row_objects


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
    if headline is not None and unpruned_headline:
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
        "pruning_rate": rate,
        benchmark.column: None if headline is None else round(headline, benchmark.decimals),
        "retention": retention,
        **_image_gain_figure(table, row),
        **({name: score.get(name) for name in HARD} if _has_hard_scores(table) else {}),
        "mean_k": None if score["mean_k"] is None else round(score["mean_k"], 2),
        "ms": None if score["ms"] is None else round(score["ms"], 3),
        "gflops": score["gflops"],
        "questions": score["answered"],
        "seed": score["seed"],
    }


def _image_gain_figure(table: BenchmarkTable, row: MethodScores) -> dict[str, Cell]:
    """Returns the image's gain that a row keeps; nothing if no run has the row without an image."""
    if table.blind is None:
        return {}
    image_gain = table.image_gain(row)
    return {"image_gain": None if image_gain is None else round(image_gain, 2)}


def write_table(folder: Path, table: BenchmarkTable) -> None:
    """Writes a table to table.md, table.csv and table.json in an existing folder."""
    row_objects = as_objects(table)
    (folder / f"{NAME}.md").write_text(as_markdown(table), encoding="utf-8")
    (folder / f"{NAME}.csv").write_text(
        csv_table(row_objects),
        encoding="utf-8",
        errors="backslashreplace",  # A name from the user may contain an unpaired surrogate.
    )
    write_json(folder / f"{NAME}.json", row_objects)
