"""Computes means and standard deviations over seeds, and formats them as tables."""

import statistics
from collections.abc import Sequence
from typing import Any

from stepprune_jax.evaluation.cells import markdown_rows
from stepprune_jax.evaluation.names import ALL, learned_stop

Table = list[dict[str, Any]]
# Columns of `accuracy_table` that differ between seeds.
_AVERAGED_COLUMNS = ("accuracy", "retention", "mean_k")
# Columns that only rows with a learned stop have.
_STOP_COLUMNS = ("spearman_relevant", "at_bounds")


def _mean(values: Sequence[float | int | None]) -> float | None:
    """Returns the mean to two decimals; None if a value is missing."""
    return None if None in values else round(statistics.fmean(values), 2)


def _deviation(values: Sequence[float | int | None]) -> float | None:
    """Returns the sample standard deviation to two decimals; None for fewer than two values."""
    return None if len(values) < 2 or None in values else round(statistics.stdev(values), 2)


def _groups(tables: Sequence[Table]) -> dict[tuple[str, str, int], Table]:
    """Groups the rows of all seeds by method, mode and place in the table.

    The rate is no key, because learned stops of different seeds have different rates.
    """
    groups: dict[tuple[str, str, int], Table] = {}
    for table in tables:
        places: dict[tuple[str, str], int] = {}
        for row in table:
            head = row["method"], row["mode"]
            places[head] = places.get(head, -1) + 1
            groups.setdefault((*head, places[head]), []).append(row)
    return groups


def summarize(untrained: Table, tables: Sequence[Table]) -> Table:
    """Returns one row per method, mode and budget, with means and deviations over seeds."""
    summary = []
    for (method, mode, _), rows in (_groups([untrained]) | _groups(tables)).items():
        row = {"method": method, "mode": mode}
        row["pruning_rate"] = round(statistics.fmean(r["pruning_rate"] for r in rows), 1)
        for name in _AVERAGED_COLUMNS:
            values = [r[name] for r in rows]
            row |= {name: _mean(values), f"{name}_std": _deviation(values)}
        row |= {name: _mean([r.get(name) for r in rows]) for name in _STOP_COLUMNS}
        summary.append(row | {"seeds": len(rows)})
    return summary


def budget_table(rows: Table) -> str:
    """Formats retention by method and budget as Markdown, without rows of learned stops."""
    excluded, groups = {ALL, *_learned_stops(rows)}, {}
    for row in rows:
        if row["method"] not in excluded:
            groups.setdefault((row["method"], row["mode"]), []).append(row)
    budgets = next(iter(groups.values()))
    header = ["method", "mode", "runs", *(f"{row['mean_k']:.0f}" for row in budgets)]
    lines = []
    for (method, mode), line in groups.items():
        cells = [_format_spread(row, "retention") for row in line]
        if mode != "exact":
            cells = [
                f"{cell} (K {row['mean_k']:.1f})" for cell, row in zip(cells, line, strict=True)
            ]
        lines.append([method, mode, str(line[0]["seeds"]), *cells])
    return markdown_rows(header, lines)


def learned_stop_table(rows: Table) -> str:
    """Formats the rows of learned stops as Markdown; without such rows, the text is empty."""
    stops = _learned_stops(rows)
    header = ["method", "runs", "mean K", "retention", "% at bounds", "Spearman"]
    lines = [
        [
            row["method"],
            str(row["seeds"]),
            _format_spread(row, "mean_k"),
            _format_spread(row, "retention"),
            row["at_bounds"],
            row["spearman_relevant"],
        ]
        for row in rows
        if row["method"] in stops
    ]
    return markdown_rows(header, lines) if lines else ""


def _learned_stops(rows: Table) -> set[str]:
    return {learned_stop(row["method"]) for row in rows}


def _format_spread(row: dict[str, Any], name: str) -> str:
    """Formats mean and standard deviation with one decimal."""
    if row[name] is None:
        return ""
    deviation = row[f"{name}_std"]
    return f"{row[name]:.1f}" + ("" if deviation is None else f" +- {deviation:.1f}")
