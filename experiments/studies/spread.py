"""Means and standard deviations over seeds, and the tables that show them."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

from stepprune_jax.evaluation.cells import markdown_rows
from stepprune_jax.evaluation.names import ALL, DEFAULT, learned_stop

Table = list[dict[str, Any]]
_MEASURED = ("accuracy", "retention", "mean_k")
# Fields of rows with a learned stop only.
_OF_STOPS = ("spearman_relevant", "at_bounds")


def pack(correct: Bool[np.ndarray, "q"]) -> str:
    """Encodes which questions were answered correctly as hexadecimal text."""
    return np.packbits(correct).tobytes().hex()


def _mean_correct(rows: Table) -> Float[np.ndarray, "q"]:
    """Returns the share of runs that answer each question correctly."""
    bits = [np.frombuffer(bytes.fromhex(row["correct"]), np.uint8) for row in rows]
    return np.mean([np.unpackbits(b)[: rows[0]["questions"]] for b in bits], axis=0)


def _mean(values: Sequence[float | int | None]) -> float | None:
    """Returns the mean to two decimals; None if a value is missing."""
    return None if None in values else round(statistics.fmean(values), 2)


def _deviation(values: Sequence[float | int | None]) -> float | None:
    """Returns the sample standard deviation to two decimals; None for fewer than two values."""
    return None if len(values) < 2 or None in values else round(statistics.stdev(values), 2)


def _groups(tables: Sequence[Table]) -> dict[tuple[str, str, int], Table]:
    """Groups rows of all seeds by method, mode and place (rates of own stops differ)."""
    groups: dict[tuple[str, str, int], Table] = {}
    for table in tables:
        places: dict[tuple[str, str], int] = {}
        for row in table:
            head = row["method"], row["mode"]
            places[head] = places.get(head, -1) + 1
            groups.setdefault((*head, places[head]), []).append(row)
    return groups


def summarise(untrained: Table, tables: Sequence[Table]) -> Table:
    """Returns one row per method, mode and budget, with means and deviations over seeds."""
    summary = []
    for (method, mode, _), rows in (_groups([untrained]) | _groups(tables)).items():
        row = {"method": method, "mode": mode}
        row["pruning_rate"] = round(statistics.fmean(r["pruning_rate"] for r in rows), 1)
        for name in _MEASURED:
            values = [r[name] for r in rows]
            row |= {name: _mean(values), f"{name}_std": _deviation(values)}
        row |= {name: _mean([r.get(name) for r in rows]) for name in _OF_STOPS}
        summary.append(row | {"seeds": len(rows)})
    return summary


def differences(tables: Sequence[Table]) -> Table:
    """Computes differences in accuracy, in points: default minus others, adaptive minus exact."""
    groups = _groups(tables)
    pairs = []
    for method, mode, place in groups:
        exact = method, "exact", place
        if mode == "exact" and method != DEFAULT:
            pairs += [
                ((DEFAULT, mode_of_default, place), exact)
                for mode_of_default in ("exact", "adaptive")
            ]
        if mode == "adaptive":
            pairs.append(((method, mode, place), exact))
    complete_pairs = [pair for pair in pairs if groups.keys() >= {*pair}]
    return [
        {"first": f"{first[0]}, {first[1]}", "second": f"{second[0]}, {second[1]}"}
        | _difference(groups[first], groups[second], paired=first[0] == second[0])
        for first, second in complete_pairs
    ]


def _difference(first: Table, second: Table, *, paired: bool) -> dict[str, Any]:
    """Computes the difference of two groups of runs, whose seeds are the same if `paired`."""
    ours, theirs = ([row["accuracy"] for row in rows] for rows in (first, second))
    error = p = None
    if paired:
        second_by_seed = {row["seed"]: row["accuracy"] for row in second}
        gaps = [row["accuracy"] - second_by_seed[row["seed"]] for row in first]
        if len(gaps) > 1:
            error = statistics.stdev(gaps) / math.sqrt(len(gaps))
            p = stats.ttest_1samp(gaps, 0).pvalue if error else None
    elif min(len(ours), len(theirs)) > 1:
        error = math.sqrt(sum(statistics.variance(v) / len(v) for v in (ours, theirs)))
        p = stats.ttest_ind(ours, theirs, equal_var=False).pvalue if error else None
    by_question = _mean_correct(first) - _mean_correct(second)
    sampling = 100 * float(np.std(by_question, ddof=1)) / math.sqrt(len(by_question))
    return {
        "pruning_rate": second[0]["pruning_rate"],
        "difference": round(statistics.fmean(ours) - statistics.fmean(theirs), 2),
        "runs_error": None if error is None else round(error, 2),
        "p": None if p is None else float(f"{p:.2g}"),  # undefined without any spread
        "questions_error": round(sampling, 2),
    }


def budget_table(rows: Table) -> str:
    """Formats retention by method and budget as Markdown, without rows of own stops."""
    groups = _lines(rows)
    budgets = next(iter(groups.values()))
    header = ["method", "mode", "runs", *(f"{row['mean_k']:.0f}" for row in budgets)]
    lines = []
    for (method, mode), line in groups.items():
        cells = [f"{_spread(row, 'retention')}{_count(row, mode)}" for row in line]
        lines.append([method, mode, str(line[0]["seeds"]), *cells])
    return markdown_rows(header, lines)


def learned_stop_table(rows: Table) -> str:
    """Formats the rows of own stops as Markdown, empty if there are none."""
    stops = _own_stops(rows)
    stop_rows = [row for row in rows if row["method"] in stops]
    header = ["method", "runs", "mean K", "retention", "% at bounds", "Spearman"]
    lines = [
        [
            row["method"],
            str(row["seeds"]),
            _spread(row, "mean_k"),
            _spread(row, "retention"),
            row["at_bounds"],
            row["spearman_relevant"],
        ]
        for row in stop_rows
    ]
    return markdown_rows(header, lines) if lines else ""


def _own_stops(rows: Table) -> set[str]:
    return {learned_stop(row["method"]) for row in rows}


def _lines(rows: Table) -> dict[tuple[str, str], Table]:
    """Groups rows at budgets by method and mode."""
    groups: dict[tuple[str, str], Table] = {}
    without = {ALL, *_own_stops(rows)}
    for row in rows:
        if row["method"] not in without:
            groups.setdefault((row["method"], row["mode"]), []).append(row)
    return groups


def _spread(row: dict[str, Any], name: str) -> str:
    """Formats mean and deviation to one decimal."""
    if row[name] is None:
        return ""
    deviation = row[f"{name}_std"]
    return f"{row[name]:.1f}" + ("" if deviation is None else f" +- {deviation:.1f}")


def _count(row: dict[str, Any], mode: str) -> str:
    return "" if mode == "exact" else f" (K {row['mean_k']:.1f})"
