"""Merges the scores of one or several evaluation runs into a table.

    stepprune-table runs/llava7b runs/baselines

The table of one benchmark has all figures. The tables of several benchmarks follow the format of
papers: "Avg." is 100 times the mean over benchmarks of (score / score with all tokens), computed
from unrounded scores. One of the runs must contain the row of all tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.evaluation.cells import Cell
from stepprune_jax.evaluation.comparison import Comparison, compare_rows
from stepprune_jax.evaluation.names import ALL, BLIND, DEFAULT, row_place
from stepprune_jax.evaluation.seeds import sample_deviation
from stepprune_jax.registry import PRUNERS
from stepprune_jax.user_input import UserError

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
        comparison: the comparison with the row of all tokens.
    """

    method: str
    mode: str
    budget: int | None
    scores: dict[str, Score]
    comparison: Comparison = Comparison()

    @property
    def seeds(self) -> str | None:
        """The seeds of the row, separated by commas; None for a method without a seed."""
        seeds: set[int] = set()
        for score in self.scores.values():
            seeds |= {*score.get("headlines", [])} or {score["seed"]}
        return ", ".join(map(str, sorted(seeds - {None}))) or None

    def mean(self, field: str) -> float | None:
        """Returns the mean of a field over the benchmarks, or None if a benchmark lacks it."""
        values = [score.get(field) for score in self.scores.values()]
        numbers = [value for value in values if value is not None]
        return sum(numbers) / len(numbers) if len(numbers) == len(values) else None


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
        if self.all_tokens is None:
            return None
        unpruned_scores = headlines(self.all_tokens)
        row_scores = comparable_headlines(row, self.all_tokens)
        has_all_scores = unpruned_scores.keys() <= row_scores.keys()
        if not unpruned_scores or not has_all_scores or not all(unpruned_scores.values()):
            return None
        ratios = [row_scores[name] / score for name, score in unpruned_scores.items()]
        return 100 * sum(ratios) / len(ratios)

    def average_deviation(self, row: MethodScores) -> float | None:
        """Returns the standard deviation over seeds of `average`; None for a single seed."""
        scores = [row.scores.get(name, {}) for name in headlines(self.all_tokens or row)]
        seed_lists = {tuple(score.get("headlines", ())) for score in scores}
        seeds = seed_lists.pop() if len(seed_lists) == 1 else ()
        if self.average(row) is None or len(seeds) < 2:
            return None
        averages = []
        for seed in seeds:
            seed_scores = {
                name: {**score, "headline": score.get("headlines", {}).get(seed)}
                for name, score in row.scores.items()
            }
            averages.append(self.average(row._replace(scores=seed_scores)) or 0.0)
        return sample_deviation(averages)

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
        unpruned_scores = headlines(self.all_tokens)
        blind_scores = comparable_headlines(self.blind, self.all_tokens)
        row_scores, shares = comparable_headlines(row, self.all_tokens), []
        for name, unpruned_score in unpruned_scores.items():
            if name not in blind_scores or name not in row_scores:
                return None
            gain = unpruned_score - blind_scores[name]
            if gain <= 0:
                return None
            shares.append((row_scores[name] - blind_scores[name]) / gain)
        return 100 * sum(shares) / len(shares) if shares else None


def headlines(row: MethodScores) -> dict[str, float]:
    """Returns the main score of a row on each benchmark, omitting benchmarks without a score."""
    headlines = {name: score["headline"] for name, score in row.scores.items()}
    return {name: value for name, value in headlines.items() if value is not None}


def comparable_headlines(row: MethodScores, reference: MethodScores) -> dict[str, float]:
    """Returns `headlines` for the benchmarks on which two rows are scored on the same questions.

    Scores of unfinished runs cover only some questions.
    """
    return {
        name: value
        for name, value in headlines(row).items()
        if row.scores[name].get("scored") == reference.scores.get(name, {}).get("scored")
    }


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
    rows = [MethodScores(*row_key, scores_by_row[row_key]) for row_key in sorted_keys]
    indices = {row.method: index for index, row in enumerate(rows)}
    comparisons = compare_rows(
        [row.scores for row in rows], unpruned=indices.get(ALL), blind=indices.get(BLIND)
    )
    return BenchmarkTable(
        benchmarks=[name for name in BENCHMARKS if name in scored_benchmarks],
        num_tokens=run_scores[0][1]["num_tokens"],
        rows=[
            row._replace(comparison=comparison)
            for row, comparison in zip(rows, comparisons, strict=True)
        ],
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
