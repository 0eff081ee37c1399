"""The table of a report's page."""

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from stepprune_jax.evaluation.names import ALL, DEFAULT, OWN_STOP
from stepprune_jax.evaluation.report import Report

UNKNOWN = "\N{EN DASH}"
# A GFLOP in each unit; the first unit in which the largest number is not too small is used.
_UNITS = {"TFLOPs": 1e-3, "GFLOPs": 1.0, "MFLOPs": 1e3, "FLOPs": 1e9}


class _Column(NamedTuple):
    """A column of numbers: its title, field, factor and decimals."""

    title: str
    field: str
    scale: float | int = 1
    decimals: int = 1

    def show(self, row: dict[str, Any]) -> str:
        """Formats a row's number."""
        value = row.get(self.field)
        return UNKNOWN if value is None else f"{value * self.scale:.{self.decimals}f}"


def budgets(report: Report) -> dict[float, int]:
    """Returns the budgets in descending order, by pruning rate."""
    exact = [row for row in report.table if row["mode"] == "exact" and row["method"] != ALL]
    counts = {float(row["pruning_rate"]): round(row["mean_k"]) for row in exact}
    return {rate: counts[rate] for rate in sorted(counts) if rate}


def html_table(report: Report) -> str:
    """Formats the table: K, retention, accuracy, time and operations of each row.

    All tokens and the policy's own stop come first, with unpruned rows, then a block for each
    budget. Retention is bold where no other row of the block has more.

    Args:
        report: a checked report.

    Returns:
        An HTML table; every text from the report is escaped.
    """
    columns = [
        _Column("K", "mean_k"),
        _Column("retention %", "retention"),
        _Column("accuracy %", "accuracy"),
        _measured(report, "ms", {"time ms": 1.0}),
        _measured(report, "gflops", _UNITS),
    ]
    retention, counts = columns[1], budgets(report)
    stopping = {row["method"] for row in report.table if row["mode"] != "exact"} - {OWN_STOP}
    head = "".join(f"<th scope=col>{column.title}</th>" for column in columns)
    lines = ["<table>", f"<thead><tr><th scope=col>method</th>{head}</tr></thead>", "<tbody>"]
    first = [row for row in report.table if not any(_at(row, rate) for rate in counts)]
    first.sort(key=lambda row: (row["method"] != ALL, row["method"] != OWN_STOP))
    lines += [_row(row, columns) for row in first]
    for rate, count in counts.items():
        rows = [row for row in report.table if _at(row, rate)]
        best = max((retention.show(row) for row in rows), key=_order)
        title = f"{count:,} of {report.num_tokens:,} tokens <small>{rate:.1f} % pruned</small>"
        span = f"<th scope=rowgroup colspan={1 + len(columns)}>{title}</th>"
        lines.append(f"</tbody>\n<tbody>\n<tr>{span}</tr>")
        lines += [_row(row, columns, best, row["method"] in stopping) for row in rows]
    return "\n".join([*lines, "</tbody>", "</table>"])


def _measured(report: Report, field: str, units: dict[str, float]) -> _Column:
    """Builds a column in the unit that suits its largest number, with three digits."""
    most = max((row.get(field) or 0.0 for row in report.table), default=0.0)
    unit = next((unit for unit, scale in units.items() if most * scale >= 0.1), [*units][-1])
    digits = len(str(int(most * units[unit]))) if most * units[unit] >= 1 else 0
    return _Column(unit, field, units[unit], max(0, 3 - digits))


def _at(row: dict[str, Any], rate: float) -> bool:
    """Returns whether a row belongs to the block of a pruning rate."""
    return row["method"] not in (ALL, OWN_STOP) and row.get("pruning_rate") == rate


def _order(shown: str) -> float:
    """Returns a sort key of printed numbers, so that equal ones tie; unknown ones come first."""
    return float(shown) if shown != UNKNOWN else -1.0


def _row(
    row: dict[str, Any], columns: Sequence[_Column], best: str = UNKNOWN, mode: bool = False
) -> str:
    """Formats a row, with its mode if requested; its retention is bold if it is the best."""
    name = escape(row["method"]) + (f" <small>{escape(row['mode'])}</small>" if mode else "")
    kind = " class=ours" if row["method"] in (DEFAULT, OWN_STOP) else ""
    cells = [column.show(row) for column in columns]
    if cells[1] == best != UNKNOWN:
        cells[1] = f"<b>{best}</b>"
    numbers = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr{kind}><th scope=row>{name}</th>{numbers}</tr>"
