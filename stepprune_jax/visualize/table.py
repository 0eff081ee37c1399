"""The table of a report as HTML: methods down, budgets across."""

from collections.abc import Sequence
from html import escape
from typing import Any

from stepprune_jax.visualize.accuracy import OWN_STOP
from stepprune_jax.visualize.excerpts import ALL, Study

_UNKNOWN = "&ndash;"


def budgets(study: Study) -> list[float]:
    """Pruning rates at which some method was held to an exact count, ascending, without 0."""
    rates = {
        float(row["pruning_rate"])
        for row in study.table
        if row["mode"] == "exact" and row["method"] != ALL and row.get("pruning_rate")
    }
    return sorted(rates)


def html_table(study: Study) -> str:
    """The table: retention, accuracy and mean K for each method, mode and budget.

    Retention is bold where no other method at that budget has more, whatever the mode. Rows
    without a budget of the others, as a policy that follows its own stop, stand below.

    Args:
      study: A checked study.

    Returns:
      An HTML table; every text from the study is escaped.
    """
    rates = budgets(study)
    best = {
        rate: max((_shown(r) for r in study.table if _at(r, rate)), key=_order) for rate in rates
    }
    head = "".join(
        f"<th scope=col>{rate:.1f} % pruned<br><small>K ≈ "
        f"{study.num_tokens * (1 - rate / 100):.0f}</small></th>"
        for rate in rates
    )
    lines = ["<table>", f"<thead><tr><th scope=col>method</th><th scope=col>mode</th>{head}</tr>"]
    lines += ["</thead>", "<tbody>"]
    wide = [row for row in study.table if not any(_at(row, rate) for rate in rates)]
    lines += [_wide_row(row, len(rates)) for row in wide if row["method"] == ALL]
    for method, mode in dict.fromkeys((r["method"], r["mode"]) for r in study.table):
        rows = [r for r in study.table if (r["method"], r["mode"]) == (method, mode)]
        cells = [_cell(rows, rate, best[rate]) for rate in rates]
        if any(_at(row, rate) for row in rows for rate in rates):
            lines.append(f"<tr>{_names(method, mode)}{''.join(cells)}</tr>")
    lines += [_wide_row(row, len(rates)) for row in wide if row["method"] != ALL]
    return "\n".join([*lines, "</tbody>", "</table>"])


def _at(row: dict[str, Any], rate: float) -> bool:
    """Whether a row belongs to the column of a pruning rate."""
    return row["method"] not in (ALL, OWN_STOP) and row.get("pruning_rate") == rate


def _shown(row: dict[str, Any]) -> str:
    """Retention as it is printed: equal numbers are equally good."""
    return _UNKNOWN if row["retention"] is None else f"{row['retention']:.1f}"


def _order(shown: str) -> float:
    """Sorts what is printed; what could not be computed comes first."""
    return float(shown) if shown != _UNKNOWN else -1.0


def _names(method: str, mode: str) -> str:
    return f"<th scope=row>{escape(method)}</th><td>{escape(mode)}</td>"


def _cell(rows: Sequence[dict[str, Any]], rate: float, best: str) -> str:
    """One method, mode and budget."""
    for row in rows:
        if _at(row, rate):
            value = f"<b>{best}</b>" if _shown(row) == best != _UNKNOWN else _shown(row)
            return f"<td class=n>{value}<br><small>{_detail(row)}</small></td>"
    return f"<td class=n>{_UNKNOWN}</td>"


def _detail(row: dict[str, Any]) -> str:
    return f"{row['accuracy']:.1f} %, K {row['mean_k']:.1f}"


def _wide_row(row: dict[str, Any], columns: int) -> str:
    """A row that belongs to no budget: its numbers stand once, across all of them."""
    value = f"{_shown(row)} <small>{_detail(row)}</small>"
    return (
        f'<tr>{_names(row["method"], row["mode"])}<td class=n colspan="{columns}">{value}</td></tr>'
    )
