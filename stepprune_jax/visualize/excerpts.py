"""Checks of a report before drawing, and excerpts shared by several figures."""

from numbers import Real
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from stepprune_jax.evaluation.names import ALL, DEFAULT
from stepprune_jax.evaluation.records import Records
from stepprune_jax.evaluation.report import Report

_FIELDS = {
    "method": str,
    "mode": str,
    "accuracy": Real,
    "retention": Real | None,  # none where all tokens get nothing right
    "mean_k": Real,
}


def check_report(report: Report) -> Report:
    """Checks that the parts of a report belong together.

    Args:
        report: the report.

    Returns:
        The same report.

    Raises:
        ValueError: a part is empty, lengths differ, a field is missing or of the wrong type, a
            count or a token lies outside its range, or rows required by every figure are missing.
            The message names the record or row and the field.
    """
    for name in ("table", "records", "questions"):
        if not getattr(report, name):
            raise ValueError(f"{name}: expected at least one entry, got none")
    asked = len(report.questions)
    for name in ("answers", "scenes"):
        values = getattr(report, name)
        if values is not None and len(values) != asked:
            raise ValueError(f"{name}: expected {asked}, one per question, got {len(values)}")
    tokens = report.sizes
    if len(report.grids) != asked:
        raise ValueError(f"grids: expected {asked}, one per question, got {len(report.grids)}")
    for i, (rows, columns) in enumerate(report.grids):
        if min(rows, columns) < 1 or report.first(i) not in (0, 1):
            raise ValueError(
                f"grids[{i}]: {rows} x {columns} patches do not make {tokens[i]} tokens, the "
                f"count of {ALL!r}"
            )
    for i, row in enumerate(report.table):
        _check_row(i, row)
    for i, record in enumerate(report.records):
        _check_record(f"records[{i}] ({name_of(record)})", record, asked, int(tokens.max()))
    default_record(report)
    return report


def _check_row(i: int, row: dict[str, Any]) -> None:
    """Checks that a row of the table has the required fields, with the right types."""
    for field, kind in _FIELDS.items():
        if not isinstance(row.get(field), kind):
            wanted = "a text" if kind is str else "a number"
            raise ValueError(
                f"table[{i}]: field {field!r} should be {wanted}, got {row.get(field)!r}"
            )


def _check_record(where: str, record: Records, asked: int, tokens: int) -> None:
    """Checks that a record has one entry per question, and only tokens of the grid."""
    for field in ("count", "order", "answer", "correct"):
        length = len(getattr(record, field))
        if length != asked:
            raise ValueError(f"{where}: field {field!r} has {length} entries for {asked} questions")
    order, count = record.order, record.count
    bad = (count < 0) | (count > order.shape[1])
    if bad.any():
        i = int(np.argmax(bad))
        raise ValueError(
            f"{where}: count[{i}] is {count[i]}, expected 0 to {order.shape[1]}, the width of order"
        )
    kept = np.arange(order.shape[1]) < count[:, None]
    bad = np.where(kept, (order < -1) | (order >= tokens), order != -1)
    # Merged and added tokens, which come after the image's own, have no index.
    bad[:, :-1] |= kept[:, :-1] & (order[:, :-1] < 0) & (order[:, 1:] >= 0)
    if bad.any():
        i, t = (int(x) for x in np.argwhere(bad)[0])
        wanted = f"a token from 0 to {tokens - 1}" if kept[i, t] else "-1, after the count"
        raise ValueError(f"{where}: order[{i}, {t}] is {order[i, t]}, expected {wanted}")


def name_of(record: Records) -> str:
    """Describes a record, for messages."""
    return f"{record.method}, {record.mode}, {record.pruning_rate:.1f} % pruned"


def records_of(report: Report, method: str, mode: str) -> list[Records]:
    """Returns records of a method in a mode, by descending number of tokens."""
    records = [r for r in report.records if r.method == method and r.mode == mode]
    return sorted(records, key=lambda r: r.pruning_rate)


def default_record(report: Report) -> Records:
    """Finds the default policy at the middle budget; adaptive, unless it does not stop by itself.

    Raises:
        ValueError: the report has none.
    """
    records = records_of(report, DEFAULT, "adaptive") or records_of(report, DEFAULT, "exact")
    if not records:
        raise ValueError(f"records: none has the method {DEFAULT!r}")
    return records[len(records) // 2]


def others(report: Report, budget: int | None) -> list[Records]:
    """Finds the other methods at a budget: those whose name does not begin with the default's."""
    exact = [r for r in report.records if r.mode == "exact" and r.budget == budget]
    return [r for r in exact if r.method != ALL and not r.method.startswith(DEFAULT)]


def tightest(report: Report) -> list[Records]:
    """Finds the default policy at the tightest budget, in both modes, and the best of `others`.

    Records that do not exist are omitted.
    """
    adaptive = records_of(report, DEFAULT, "adaptive")[-1:]
    exact = records_of(report, DEFAULT, "exact")[-1:]
    budget = (exact or adaptive)[0].budget if exact or adaptive else None
    best = max(others(report, budget), key=lambda r: r.correct.mean(), default=None)
    return [*adaptive, *exact, *([] if best is None else [best])]


def group(
    values: Int[np.ndarray, "q"], most: int = 8
) -> tuple[list[str], list[Bool[np.ndarray, "q"]]]:
    """Groups integers by value, or by ranges of about equal size.

    Args:
        values: the integers.
        most: largest number of groups.

    Returns:
        Label and members of each group; none is empty.
    """
    distinct = np.unique(values)
    starts = distinct
    if len(distinct) > most:
        starts = np.unique(np.quantile(values, np.linspace(0, 1, most + 1)[:-1]).astype(int))
    labels, members = [], []
    for i, start in enumerate(starts):
        end = starts[i + 1] if i + 1 < len(starts) else distinct[-1] + 1
        inside = (values >= start) & (values < end)
        low, high = values[inside].min(), values[inside].max()
        labels.append(f"{low}" if low == high else f"{low}\N{EN DASH}{high}")
        members.append(inside)
    return labels, members
