"""Builds the tables of one or several evaluation runs.

    stepprune-table runs/llava7b runs/baselines

The table of one benchmark has all figures. The tables of several benchmarks follow the format of
papers: "Avg." is 100 times the mean over benchmarks of (score / score with all tokens), computed
from unrounded scores. One of the runs must contain the row of all tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.answer_files import pruning_rate
from stepprune_jax.data.json_files import write_json
from stepprune_jax.evaluation.cells import Cell, csv_table, markdown_cell, markdown_rows
from stepprune_jax.evaluation.names import ALL, DEFAULT, row_place
from stepprune_jax.registry import PRUNERS
from stepprune_jax.selectors.calibration import StopCounts
from stepprune_jax.user_input import UserError

NAME = "table"
# Fields of `scores.score_hard`. Only runs with the row `names.DOWNSAMPLED` have them.
HARD = ("hard", "hard_questions")
Score = Mapping[str, Any]  # result of `scores.score_file`


class MethodScores(NamedTuple):
    """The scores of one row of a table.

    Attributes:
        method: name of the row.
        mode: "exact" or "adaptive".
        budget: tokens kept; None for a learned stop.
        scores: score by benchmark.
    """

    method: str
    mode: str
    budget: int | None
    scores: dict[str, Score]

    def mean(self, field: str) -> float | None:
        """Returns the mean of a field over the benchmarks, or None if a benchmark lacks it."""
        values = [score.get(field) for score in self.scores.values()]
        return None if None in values else sum(values) / len(values)


class Section(NamedTuple):
    """A formatted table.

    Attributes:
        title: title above the table; may be empty.
        header: names of the columns.
        rows: values of the cells.
        texts: number of text columns, which come first.
    """

    title: str
    header: list[str]
    rows: list[list[Cell]]
    texts: int


class BenchmarkTable(NamedTuple):
    """The scores of all rows on all benchmarks.

    Attributes:
        benchmarks: names of the benchmarks in the order of columns.
        num_tokens: visual tokens of the largest image.
        rows: the rows in the order of the table.
        remarks: lines that come first among the notes.
    """

    benchmarks: list[str]
    num_tokens: int
    rows: list[MethodScores]
    remarks: tuple[str, ...] = ()

    @property
    def all_tokens(self) -> MethodScores | None:
        """The row of all tokens, or None."""
        return self.rows[0] if self.rows[0].method == ALL else None

    def average(self, row: MethodScores) -> float | None:
        """Returns the average retention of a row in percent.

        The result is None if the row lacks a score that the row of all tokens has.
        """
        reference = _headlines(self.all_tokens) if self.all_tokens else {}
        headlines = _headlines(row)
        if not reference or not reference.keys() <= headlines.keys() or not all(reference.values()):
            return None
        return average_retention([headlines[name] for name in reference], list(reference.values()))


def _headlines(row: MethodScores) -> dict[str, float]:
    """Returns the headline figure of each benchmark that has one."""
    headlines = {name: score["headline"] for name, score in row.scores.items()}
    return {name: value for name, value in headlines.items() if value is not None}


def average_retention(
    scores: Sequence[int | float | Decimal], upper_bound: Sequence[int | float | Decimal]
) -> float:
    """Returns 100 times the mean of score / upper bound, the column "Avg." of tables.

    Args:
        scores: score of a row on each benchmark.
        upper_bound: score of the unpruned model on each benchmark.
    """
    if not scores:
        raise ValueError("average retention needs at least one score")
    ratios = [float(s) / float(u) for s, u in zip(scores, upper_bound, strict=True)]
    return 100 * sum(ratios) / len(ratios)


def merge_scores(runs: Mapping[str, Sequence[Score]], labels: Sequence[str] = ()) -> BenchmarkTable:
    """Merges the scores of several runs to one table.

    Methods with one name but different results in different runs get the names of their runs. A
    complete score replaces an incomplete one.

    Args:
        runs: scores of each run, by its name.
        labels: order of the methods; empty selects the order of `PRUNERS`. Further methods follow
            in alphabetical order, with the default policy last.

    Returns:
        The table.

    Raises:
        ValueError: runs differ in questions, visual tokens, or scores with all tokens.
    """
    all_scores = [(run, score) for run, scores in runs.items() for score in scores]
    _check_equal(all_scores, "num_tokens", "visual tokens")
    for name in {score["benchmark"] for _, score in all_scores}:
        benchmark_scores = [(run, score) for run, score in all_scores if score["benchmark"] == name]
        _check_equal(benchmark_scores, "questions", f"questions of {name}")
        all_tokens_scores = [
            (run, score)
            for run, score in benchmark_scores
            if score["method"] == ALL and _is_complete(score)
        ]
        _check_equal(all_tokens_scores, "headline", f"score of {ALL} on {name}")
    ambiguous_methods = _find_ambiguous(all_scores)
    rows: dict[tuple[str, str, int | None], dict[str, Score]] = {}
    for run, score in all_scores:
        method = score["method"]
        if method in ambiguous_methods:
            method = f"{method} ({run})"
        row = rows.setdefault((method, score["mode"], score["budget"]), {})
        if _is_complete(score) or score["benchmark"] not in row:
            row[score["benchmark"]] = score
    benchmarks_with_scores = {score["benchmark"] for _, score in all_scores}
    labels = _order_labels(labels, (method for method, _, _ in rows))
    order = sorted(rows, key=lambda row: row_place(*row, labels))
    return BenchmarkTable(
        benchmarks=[name for name in BENCHMARKS if name in benchmarks_with_scores],
        num_tokens=all_scores[0][1]["num_tokens"],
        rows=[MethodScores(*key, rows[key]) for key in order],
    )


def _order_labels(labels: Sequence[str], methods: Iterable[str]) -> list[str]:
    """Returns the order of methods, as described in `merge_scores`."""
    first_labels = [*labels] or [
        kind.label for kind in PRUNERS.values() if kind.config_type is None
    ]
    further_labels = sorted(
        {*methods} - {*first_labels}, key=lambda name: (name.startswith(DEFAULT), name)
    )
    return first_labels + further_labels


def _check_equal(scores: Sequence[tuple[str, Score]], field: str, what: str) -> None:
    """Raises if the scores of several runs differ in a field; `what` describes it."""
    for run, score in scores[1:]:
        first_run, first = scores[0]
        if score[field] != first[field]:
            raise UserError(
                f"{first['method']} of {first_run} and {score['method']} of {run} have different "
                f"{what} ({first[field]} and {score[field]}): they do not belong in one table"
            )


def _is_complete(score: Score) -> bool:
    """Returns whether all questions are answered."""
    return score["answered"] >= score["asked"]


def _find_ambiguous(all_scores: Sequence[tuple[str, Score]]) -> set[str]:
    """Returns the methods whose results differ between runs."""
    result_of: dict[tuple[Cell, ...], tuple[Cell, ...]] = {}
    ambiguous_methods = set()
    for _, score in all_scores:
        if not _is_complete(score):
            continue
        key = score["benchmark"], score["method"], score["mode"], score["budget"]
        result = score["headline"], score["mean_k"]
        if result_of.setdefault(key, result) != result:
            ambiguous_methods.add(score["method"])
    return ambiguous_methods


def sections(table: BenchmarkTable) -> list[Section]:
    """Formats a table.

    Returns:
        For one benchmark a section with all figures, otherwise one section per kind of figure.
    """
    if len(table.benchmarks) == 1:
        objects = as_objects(table)
        header = [name.replace("_", " ") for name in objects[0]]
        return [Section("", header, [list(value.values()) for value in objects], 2)]
    titles = [BENCHMARKS[name].title for name in table.benchmarks]
    kinds: list[tuple[str, Callable[[Score], Cell], list[str]]] = [
        ("Scores", _score_cell, ["Avg."]),
        ("Visual tokens kept, mean ± standard deviation", _k_cell, []),
        ("Milliseconds per question", lambda score: _decimals(score["ms"], 1), []),
        ("GFLOPs to the first token", lambda score: score.get("gflops"), []),
    ]
    if _has_hard(table):
        kinds.insert(1, ("Scores on hard questions, in percent of their number", _hard_cell, []))
    tables = []
    for title, cell, average_column in kinds:
        rows = []
        for row in table.rows:
            scores = [row.scores.get(name) for name in table.benchmarks]
            cells = [None if score is None else cell(score) for score in scores]
            average_cell = [_decimals(table.average(row), 1)] if average_column else []
            rows.append([_tokens_cell(table, row), row.method, row.mode, *cells, *average_cell])
        tables.append(
            Section(title, ["tokens", "method", "mode", *titles, *average_column], rows, 3)
        )
    return tables


def _decimals(value: float | None, decimals: int) -> str | None:
    """Formats a number with a fixed number of decimals; None stays None."""
    return None if value is None else f"{value:.{decimals}f}"


def _tokens_cell(table: BenchmarkTable, row: MethodScores) -> str:
    """Returns the cell of the column "tokens"."""
    if row.budget is None:
        return "own stop"
    return f"{row.budget} ({100 * (1 - row.budget / table.num_tokens):.1f} % pruned)"


def _score_cell(score: Score) -> str | None:
    """Returns the headline figure with the decimals that its benchmark publishes."""
    return _decimals(score["headline"], BENCHMARKS[score["benchmark"]].decimals)


def _has_hard(table: BenchmarkTable) -> bool:
    """Returns whether the table has scores of `scores.score_hard`."""
    return any("hard" in score for row in table.rows for score in row.scores.values())


def _hard_cell(score: Score) -> str | None:
    return f"{score['hard']:.1f} of {score['hard_questions']:,}" if "hard" in score else None


def _k_cell(score: Score) -> str | None:
    return None if score["mean_k"] is None else f"{score['mean_k']:.1f} ± {score['sd_k']:.1f}"


def notes(table: BenchmarkTable) -> list[str]:
    """Returns the remarks and warnings of a table, each with the rows that it applies to."""
    rows_of_note: dict[str, list[str]] = {remark: [] for remark in table.remarks}
    for row in table.rows:
        for name, score in row.scores.items():
            for text in filter(None, (*score["warnings"], score["problem"], _at_bound(score))):
                line = f"{BENCHMARKS[name].title}: {text}"
                rows_of_note.setdefault(line, []).append(f"{row.method} {row.mode}")
    if _has_hard(table):
        rows_of_note[
            "hard questions are right with all tokens, and wrong if downsampled to as many"
        ] = []
    if _gains_no_time(table):
        rows_of_note[
            "choosing tokens of a model as small as this one takes longer than it saves: "
            "`python -m stepprune_jax.efficiency --model llava-7b` times a large one"
        ] = []
    if not table.all_tokens:
        rows_of_note[f"no row of {ALL}, so no retention"] = []
    elif unscored := [
        name for name in table.benchmarks if name not in _headlines(table.all_tokens)
    ]:
        titles = ", ".join(BENCHMARKS[name].title for name in unscored)
        rows_of_note[f"retention excludes {titles}, where {ALL} has no score"] = []
    return [
        text + (f" ({len(rows)} rows)" if len(rows) > 1 else "".join(f" ({row})" for row in rows))
        for text, rows in rows_of_note.items()
    ]


def _at_bound(score: Score) -> str:
    """Returns a warning if most counts of a learned stop are at a bound, otherwise ""."""
    floor, cap = (score.get(name, 0.0) for name in ("at_floor", "at_cap"))
    mean, deviation = (score[name] or 0.0 for name in ("mean_k", "sd_k"))
    return StopCounts(mean, deviation, score["num_tokens"], floor, cap).finding


def _gains_no_time(table: BenchmarkTable) -> bool:
    """Returns whether most rows that save operations take longer than all tokens."""
    if table.all_tokens is None:
        return False
    full_ms, full_gflops = table.all_tokens.mean("ms"), table.all_tokens.mean("gflops")
    is_slower = []
    for row in table.rows[1:]:
        ms, gflops = row.mean("ms"), row.mean("gflops")
        if None not in (full_ms, full_gflops, ms, gflops) and gflops < full_gflops:
            is_slower.append(ms > full_ms)
    return 2 * sum(is_slower) > len(is_slower)


def as_markdown(table: BenchmarkTable) -> str:
    """Formats a table and its notes as Markdown."""
    parts = [
        (f"## {title}\n\n" if title else "") + markdown_rows(header, rows, texts)
        for title, header, rows, texts in sections(table)
    ]
    lines = "".join(f"- {markdown_cell(note)}\n" for note in notes(table))
    return "\n".join([*parts, *([f"## Notes\n\n{lines}"] if lines else [])])


def as_objects(table: BenchmarkTable) -> list[dict[str, Cell]]:
    """Returns one JSON object per row.

    For one benchmark an object has all figures, for several benchmarks the main figures of each.
    """
    if len(table.benchmarks) == 1:
        return [_as_object(table, row) for row in table.rows]
    rows = []
    for row in table.rows:
        value: dict[str, Cell] = {"method": row.method, "mode": row.mode, "tokens": row.budget}
        value["average"] = table.average(row)
        for name in table.benchmarks:
            score = row.scores.get(name, {})
            value[name] = score.get("headline")
            fields = ("mean_k", "sd_k", "ms", "gflops")
            value |= {f"{name}_{field}": score.get(field) for field in fields}
        rows.append(value)
    return rows


def _as_object(table: BenchmarkTable, row: MethodScores) -> dict[str, Cell]:
    """Returns all figures of a row of a table with a single benchmark."""
    (score,), benchmark = row.scores.values(), BENCHMARKS[table.benchmarks[0]]
    reference = next(iter(table.all_tokens.scores.values())) if table.all_tokens else {}
    reference_headline, headline = reference.get("headline"), score["headline"]
    rate, retention = None, None
    if headline is not None and reference_headline:
        # The ratio of two numbers of correct answers is restored from its float, so that ties are
        # rounded consistently.
        ratio = Fraction(headline / reference_headline).limit_denominator(10**6)
        retention = round(100 * float(ratio), 2)
    if row.budget is not None:
        rate = pruning_rate(row.budget, table.num_tokens)
    elif score["mean_k"] is not None:  # a learned stop has no budget, so its mean count is used
        rate = pruning_rate(
            score["mean_k"], max(1, round(reference.get("mean_k") or table.num_tokens))
        )
    return {
        "method": row.method,
        "mode": row.mode,
        "pruning_rate": rate,
        benchmark.column: None if headline is None else round(headline, benchmark.decimals),
        "retention": retention,
        **({name: score.get(name) for name in HARD} if _has_hard(table) else {}),
        "mean_k": None if score["mean_k"] is None else round(score["mean_k"], 2),
        "ms": None if score["ms"] is None else round(score["ms"], 3),
        "gflops": score["gflops"],
        "questions": score["answered"],
        "seed": score["seed"],
    }


def write_table(folder: Path, table: BenchmarkTable) -> None:
    """Writes a table to table.md, table.csv and table.json in an existing folder."""
    rows = as_objects(table)
    (folder / f"{NAME}.md").write_text(as_markdown(table), encoding="utf-8")
    (folder / f"{NAME}.csv").write_text(
        csv_table(rows), encoding="utf-8", errors="backslashreplace"
    )
    write_json(folder / f"{NAME}.json", rows)
