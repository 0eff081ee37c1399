"""Compares the rows of a table with the rows of one method, pair by pair at the same budget."""

from collections.abc import Iterator

from stepprune_jax.evaluation.cells import Cell
from stepprune_jax.evaluation.comparison import pair_outcomes
from stepprune_jax.evaluation.table import BenchmarkTable, MethodScores
from stepprune_jax.evaluation.uncertainty import bootstrap, mcnemar_test, score_of, summarize
from stepprune_jax.registry import PRUNERS
from stepprune_jax.user_input import UserError

NAME = "against"


def compare_with_method(table: BenchmarkTable, method: str) -> list[dict[str, Cell]]:
    """Compares each row with the row of a method that keeps the same number of tokens.

    Both rows have answers to the same questions, so the interval of the difference is a paired
    bootstrap, and the test is McNemar's exact test.

    Args:
        table: the scores.
        method: name of a method, such as "divprune", or the name of its rows in the table.

    Returns:
        One object per benchmark and row: the difference of the scores (row - method) with the ends
        of its 95 % interval, the questions that only the method's row ("lost") and only the
        compared row ("gained") answers correctly, and the p-value.

    Raises:
        UserError: the table has no row of the method, or no other row on the same questions.
    """
    label = PRUNERS[method].label if method in PRUNERS else method
    references = {
        row.budget: row for row in table.rows if row.method == label and row.mode == "exact"
    }
    if not references:
        names = ", ".join(dict.fromkeys(row.method for row in table.rows))
        raise UserError(f"--against is {method!r}, expected a method of the table: {names}")
    row_objects = []
    for benchmark in table.benchmarks:
        for row in table.rows:
            reference = references.get(row.budget)
            if reference is not None and row is not reference:
                row_objects += _compare_rows(benchmark, row, reference)
    if not row_objects:
        raise UserError(
            f"--against is {method!r}, expected a method with results of single questions at a "
            "budget that another row has; means over seeds have none"
        )
    return row_objects


def _compare_rows(
    benchmark: str, row: MethodScores, reference: MethodScores
) -> Iterator[dict[str, Cell]]:
    """Compares two rows on a benchmark; yields nothing if they cover different questions."""
    paired = pair_outcomes([reference.scores, row.scores], 0, benchmark)
    if len(paired) < 2:
        return
    reference_outcomes, outcomes = paired[0], paired[1]
    resamples, reference_resamples = bootstrap([outcomes, reference_outcomes], seed=0)
    interval = summarize(resamples - reference_resamples)
    test = mcnemar_test(outcomes, reference_outcomes)
    yield {
        "benchmark": benchmark,
        "tokens": row.budget,
        "method": row.method,
        "mode": row.mode,
        "difference": round(score_of(outcomes) - score_of(reference_outcomes), 2),
        "difference_low": None if interval is None else round(interval.low, 2),
        "difference_high": None if interval is None else round(interval.high, 2),
        "lost": test.lost,
        "gained": test.gained,
        "mcnemar_p": float(f"{test.p:.3g}"),
    }
