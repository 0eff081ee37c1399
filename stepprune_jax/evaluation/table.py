"""Tables of one run or several.

    stepprune-table runs/llava7b runs/baselines

One benchmark has a table of all figures, several have one in the paper's format, where "Avg." is
100 x the mean over benchmarks of score / score with all tokens, from unrounded scores. The row of
all tokens comes from the runs themselves.
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
# Fields of scores on hard questions, which a run that downsamples has.
HARD = ("hard", "hard_questions")
Score = Mapping[str, Any]


class MethodScores(NamedTuple):
    """The scores of a method at one budget, by benchmark; the budget is None for its own stop."""

    method: str
    mode: str
    budget: int | None
    scores: dict[str, Score]

    def mean(self, field: str) -> float | None:
        """Averages a field over the benchmarks; None if one of them lacks it."""
        values = [score.get(field) for score in self.scores.values()]
        return None if None in values else sum(values) / len(values)


class Section(NamedTuple):
    """A table to print: its title, header and rows, whose first columns are `texts`."""

    title: str
    header: list[str]
    rows: list[list[Cell]]
    texts: int


class BenchmarkTable(NamedTuple):
    """The scores of all methods on all benchmarks, both in their order.

    `remarks` are the first of its notes.
    """

    benchmarks: list[str]
    num_tokens: int
    rows: list[MethodScores]
    remarks: tuple[str, ...] = ()

    @property
    def whole(self) -> MethodScores | None:
        """The row of all tokens."""
        return self.rows[0] if self.rows[0].method == ALL else None

    def average(self, row: MethodScores) -> float | None:
        """Averages retention; None unless the row has every score that all tokens have."""
        reference = _headlines(self.whole) if self.whole else {}
        headlines = _headlines(row)
        if not reference or not reference.keys() <= headlines.keys() or not all(reference.values()):
            return None
        return average_retention([headlines[name] for name in reference], list(reference.values()))


def _headlines(row: MethodScores) -> dict[str, float]:
    """Returns the scores of a row, as far as they exist."""
    headlines = {name: score["headline"] for name, score in row.scores.items()}
    return {name: value for name, value in headlines.items() if value is not None}


def average_retention(
    scores: Sequence[int | float | Decimal], upper_bound: Sequence[int | float | Decimal]
) -> float:
    """Computes "Avg.", 100 x the unweighted mean of score / score of the unpruned model."""
    if not scores:
        raise ValueError("average retention needs at least one score")
    ratios = [float(s) / float(u) for s, u in zip(scores, upper_bound, strict=True)]
    return 100 * sum(ratios) / len(ratios)


def merge_scores(runs: Mapping[str, Sequence[Score]], labels: Sequence[str] = ()) -> BenchmarkTable:
    """Merges the scores of runs, which must agree in questions, N, and scores with all tokens.

    Rows with the same name but different results get the names of their runs. A row that answered
    all questions replaces a row that did not. Methods are in the order of `labels`; others
    follow, with the default policy last.
    """
    all_scores = [(run, score) for run, scores in runs.items() for score in scores]
    _check_same(all_scores, "num_tokens", "visual tokens")
    for name in {score["benchmark"] for _, score in all_scores}:
        of_benchmark = [(run, score) for run, score in all_scores if score["benchmark"] == name]
        _check_same(of_benchmark, "questions", f"questions of {name}")
        reference_scores = [
            (run, score) for run, score in of_benchmark if score["method"] == ALL and _whole(score)
        ]
        _check_same(reference_scores, "headline", f"score of {ALL} on {name}")
    clashes = _clashes(all_scores)
    rows: dict[tuple[str, str, int | None], dict[str, Score]] = {}
    for run, score in all_scores:
        method = f"{score['method']} ({run})" if score["method"] in clashes else score["method"]
        row = rows.setdefault((method, score["mode"], score["budget"]), {})
        if _whole(score) or score["benchmark"] not in row:
            row[score["benchmark"]] = score
    benchmarks_with_scores = {score["benchmark"] for _, score in all_scores}
    labels = _labels(labels, (method for method, _, _ in rows))
    order = sorted(rows, key=lambda row: row_place(*row, labels))
    return BenchmarkTable(
        benchmarks=[name for name in BENCHMARKS if name in benchmarks_with_scores],
        num_tokens=all_scores[0][1]["num_tokens"],
        rows=[MethodScores(*key, rows[key]) for key in order],
    )


def _labels(labels: Sequence[str], methods: Iterable[str]) -> list[str]:
    """Orders methods: given ones or those without training, other policies, the default one."""
    known_labels = [*labels] or [
        kind.label for kind in PRUNERS.values() if kind.config_type is None
    ]
    other_methods = sorted(
        {*methods} - {*known_labels}, key=lambda name: (name.startswith(DEFAULT), name)
    )
    return known_labels + other_methods


def _check_same(scores: Sequence[tuple[str, Score]], field: str, what: str) -> None:
    """Rejects runs that do not belong in one table."""
    for run, score in scores[1:]:
        first_run, first = scores[0]
        if score[field] != first[field]:
            raise UserError(
                f"{first['method']} of {first_run} and {score['method']} of {run} have different "
                f"{what} ({first[field]} and {score[field]}): they do not belong in one table"
            )


def _whole(score: Score) -> bool:
    """Returns whether all questions are answered."""
    return score["answered"] >= score["asked"]


def _clashes(all_scores: Sequence[tuple[str, Score]]) -> set[str]:
    """Returns the methods whose results differ between runs."""
    result_of: dict[tuple[Cell, ...], tuple[Cell, ...]] = {}
    clashes = set()
    for _, score in all_scores:
        if not _whole(score):
            continue
        key = score["benchmark"], score["method"], score["mode"], score["budget"]
        result = score["headline"], score["mean_k"]
        if result_of.setdefault(key, result) != result:
            clashes.add(score["method"])
    return clashes


def sections(table: BenchmarkTable) -> list[Section]:
    """Returns the tables to print: one of all figures, or one for each kind of figure."""
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
            rows.append([_tokens(table, row), row.method, row.mode, *cells, *average_cell])
        tables.append(
            Section(title, ["tokens", "method", "mode", *titles, *average_column], rows, 3)
        )
    return tables


def _decimals(value: float | None, decimals: int) -> str | None:
    return None if value is None else f"{value:.{decimals}f}"


def _tokens(table: BenchmarkTable, row: MethodScores) -> str:
    """Returns the title of a row's block."""
    if row.budget is None:
        return "own stop"
    return f"{row.budget} ({100 * (1 - row.budget / table.num_tokens):.1f} % pruned)"


def _score_cell(score: Score) -> str | None:
    return _decimals(score["headline"], BENCHMARKS[score["benchmark"]].decimals)


def _has_hard(table: BenchmarkTable) -> bool:
    """Returns whether the table has scores on the questions that downsampling gets wrong."""
    return any("hard" in score for row in table.rows for score in row.scores.values())


def _hard_cell(score: Score) -> str | None:
    return f"{score['hard']:.1f} of {score['hard_questions']:,}" if "hard" in score else None


def _k_cell(score: Score) -> str | None:
    return None if score["mean_k"] is None else f"{score['mean_k']:.1f} ± {score['sd_k']:.1f}"


def notes(table: BenchmarkTable) -> list[str]:
    """Lists remarks, and warnings, each once with the rows that it applies to."""
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
    if not table.whole:
        rows_of_note[f"no row of {ALL}, so no retention"] = []
    elif unscored := [name for name in table.benchmarks if name not in _headlines(table.whole)]:
        titles = ", ".join(BENCHMARKS[name].title for name in unscored)
        rows_of_note[f"retention excludes {titles}, where {ALL} has no score"] = []
    return [
        text + (f" ({len(rows)} rows)" if len(rows) > 1 else "".join(f" ({row})" for row in rows))
        for text, rows in rows_of_note.items()
    ]


def _at_bound(score: Score) -> str:
    """Returns the bound that a learned stop sits at, in words; empty without one."""
    floor, cap = (score.get(name, 0.0) for name in ("at_floor", "at_cap"))
    mean, deviation = (score[name] or 0.0 for name in ("mean_k", "sd_k"))
    return StopCounts(mean, deviation, score["num_tokens"], floor, cap).finding


def _gains_no_time(table: BenchmarkTable) -> bool:
    """Returns whether most rows that save operations take longer than all tokens."""
    if table.whole is None:
        return False
    (full_time, full_work), is_slower = (table.whole.mean(field) for field in ("ms", "gflops")), []
    for row in table.rows[1:]:
        row_time, row_work = row.mean("ms"), row.mean("gflops")
        if None not in (full_time, full_work, row_time, row_work) and row_work < full_work:
            is_slower.append(row_time > full_time)
    return 2 * sum(is_slower) > len(is_slower)


def as_markdown(table: BenchmarkTable) -> str:
    """Formats the tables, followed by notes if there are any."""
    parts = [
        (f"## {title}\n\n" if title else "") + markdown_rows(header, rows, texts)
        for title, header, rows, texts in sections(table)
    ]
    lines = "".join(f"- {markdown_cell(note)}\n" for note in notes(table))
    return "\n".join([*parts, *([f"## Notes\n\n{lines}"] if lines else [])])


def as_objects(table: BenchmarkTable) -> list[dict[str, Cell]]:
    """Returns an object per row, with all figures of one benchmark or the main ones of several."""
    if len(table.benchmarks) == 1:
        return [_object(table, row) for row in table.rows]
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


def _object(table: BenchmarkTable, row: MethodScores) -> dict[str, Cell]:
    """Returns all figures of a row on the only benchmark."""
    (score,), benchmark = row.scores.values(), BENCHMARKS[table.benchmarks[0]]
    reference = next(iter(table.whole.scores.values())) if table.whole else {}
    reference_headline, headline, rate, retention = (
        reference.get("headline"),
        score["headline"],
        None,
        None,
    )
    if headline is not None and reference_headline:
        # Exactly a ratio of right answers where the scores are, so that ties are rounded alike.
        retention = round(
            100 * float(Fraction(headline / reference_headline).limit_denominator(10**6)), 2
        )
    if row.budget is not None:
        rate = pruning_rate(row.budget, table.num_tokens)
    elif score["mean_k"] is not None:  # no budget says what share of an image an own stop keeps
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
    """Writes table.{md,json,csv} to an existing folder."""
    rows = as_objects(table)
    (folder / f"{NAME}.md").write_text(as_markdown(table), encoding="utf-8")
    (folder / f"{NAME}.csv").write_text(
        csv_table(rows), encoding="utf-8", errors="backslashreplace"
    )
    write_json(folder / f"{NAME}.json", rows)
