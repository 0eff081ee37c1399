"""Means and standard deviations over seeds."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from stepprune_jax.evaluation.names import DEFAULT

Table = list[dict[str, Any]]
_MEASURED = ("accuracy", "retention", "mean_k")
# What only rows with a learned stop have.
_OF_STOPS = ("spearman_relevant", "at_bounds")


def _mean(values: Sequence[float | int | None]) -> float | None:
    """Mean to two decimals; None if a value is missing."""
    return None if None in values else round(statistics.fmean(values), 2)


def _deviation(values: Sequence[float | int | None]) -> float | None:
    """Sample standard deviation to two decimals; None of fewer than two values."""
    return None if len(values) < 2 or None in values else round(statistics.stdev(values), 2)


def _groups(tables: Sequence[Table]) -> dict[tuple[str, str, int], Table]:
    """Rows of all seeds by method, mode and place among these (rates of own stops differ)."""
    groups: dict[tuple[str, str, int], Table] = {}
    for table in tables:
        places: dict[tuple[str, str], int] = {}
        for row in table:
            head = row["method"], row["mode"]
            places[head] = places.get(head, -1) + 1
            groups.setdefault((*head, places[head]), []).append(row)
    return groups


def summarise(untrained: Table, tables: Sequence[Table]) -> Table:
    """One row per method, mode and budget, with means and standard deviations over seeds.

    Args:
        untrained: rows that depend on no training.
        tables: of each run.

    Returns:
        Objects with method, mode, pruning_rate, accuracy, retention and mean_k, each of the last
        three with its `_std` (None of one seed), the means of what `statistics.stop_figures` says
        of a stop, and the number of seeds.
    """
    found = []
    for (method, mode, _), rows in (_groups([untrained]) | _groups(tables)).items():
        row = {"method": method, "mode": mode}
        row["pruning_rate"] = round(statistics.fmean(r["pruning_rate"] for r in rows), 1)
        for name in _MEASURED:
            values = [r[name] for r in rows]
            row |= {name: _mean(values), f"{name}_std": _deviation(values)}
        row |= {name: _mean([r.get(name) for r in rows]) for name in _OF_STOPS}
        found.append(row | {"seeds": len(rows)})
    return found


def _standard_error(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Of the difference of two independent means."""
    if min(len(first), len(second)) < 2:
        return None
    parts = (statistics.variance(v) / len(v) for v in (first, second))
    return round(math.sqrt(sum(parts)), 2)


def differences(tables: Sequence[Table]) -> Table:
    """The default method's accuracy minus others', and adaptive minus exact, in points.

    Args:
        tables: of each run.

    Returns:
        Objects with first, second, pruning_rate, difference and its standard error over seeds.
        Runs of two methods are independent; adaptive and exact of one seed are the same policy, so
        there the error is that of the paired differences.
    """
    groups = _groups(tables)
    found = []
    for (method, mode, place), rows in groups.items():
        accuracy = [row["accuracy"] for row in rows]
        rate = rows[0]["pruning_rate"]
        if mode == "exact" and method != DEFAULT and (DEFAULT, mode, place) in groups:
            own = [row["accuracy"] for row in groups[DEFAULT, mode, place]]
            gap = statistics.fmean(own) - statistics.fmean(accuracy)
            found.append(_gap(DEFAULT, method, rate, gap, _standard_error(own, accuracy)))
        if mode == "adaptive" and (method, "exact", place) in groups:
            other = {row["seed"]: row["accuracy"] for row in groups[method, "exact", place]}
            gaps = [row["accuracy"] - other[row["seed"]] for row in rows]
            error = None
            if len(gaps) > 1:
                error = round(statistics.stdev(gaps) / math.sqrt(len(gaps)), 2)
            names = f"{method}, adaptive", f"{method}, exact"
            found.append(_gap(*names, rate, statistics.fmean(gaps), error))
    return found


def _gap(first: str, second: str, rate: float, gap: float, error: float | None) -> dict[str, Any]:
    head = {"first": first, "second": second, "pruning_rate": rate}
    return head | {"difference": round(gap, 2), "standard_error": error}
