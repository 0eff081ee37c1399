"""The page of a report: one HTML file with its table, which needs only the images beside it."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from stepprune_jax.evaluation.report import Report
from stepprune_jax.evaluation.statistics import paired_difference, spearman
from stepprune_jax.visualize.accuracy import OWN_STOP
from stepprune_jax.visualize.excerpts import ALL, all_tokens, default_record
from stepprune_jax.visualize.style import DPI

_CSS = """
:root { color-scheme: light dark; }
body { margin: 0; background: #eef0f3; color: #1f2430; font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 24px 16px 64px; }
section { background: #fff; border-radius: 10px; padding: 8px 24px 20px; margin: 18px 0; }
h1 { font-size: 1.7rem; margin: 12px 0 4px; } h2 { font-size: 1.15rem; }
figure { margin: 12px 0; } figcaption, small { color: #586174; font-size: 0.85rem; }
img { max-width: 100%; height: auto; display: block; margin: 0 auto 6px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: left; padding: 5px 10px; border-bottom: 1px solid #e4e7ec; }
thead th { vertical-align: bottom; } .n, thead th:nth-child(n+3) { text-align: right; }
th[scope=row] { font-weight: 500; } dt { font-weight: 600; } dd { margin: 0 0 8px; }
pre { background: #f5f7fa; padding: 12px; border-radius: 6px; }
pre { overflow-x: auto; font-size: 0.85rem; }
@media (prefers-color-scheme: dark) {
  body { background: #14171d; } header { color: #e8eaee; } section { color: #1f2430; }
}
""".strip()

_UNKNOWN = "&ndash;"


class PageFigure(NamedTuple):
    """A figure of the page.

    Attributes:
        path: the file, in the folder of the page.
        title: heading above it.
        alt: what it shows, for who cannot see it.
        caption: how to read it.
    """

    path: Path
    title: str
    alt: str
    caption: str


def describe(report: Report) -> list[tuple[str, str]]:
    """Describes the default policy by numbers that the table does not hold.

    Args:
        report: a checked report.

    Returns:
        Pairs of a name and a value.
    """
    record, full = default_record(report), all_tokens(report)
    count = record.count
    images: dict[Path, int] = {}
    image = np.array([images.setdefault(q.image, len(images)) for q in report.questions])
    facts = [
        ("Questions", f"{len(count):,} on {len(images):,} images"),
        ("All tokens", f"{100 * full.correct.mean():.1f} % of the answers are right"),
        (
            f"K of {record.method}, {record.mode}, {record.pruning_rate:.1f} % pruned",
            f"{count.mean():.1f} ± {count.std():.1f} on average, from {count.min()} to "
            f"{count.max()} of {report.num_tokens} tokens; half of the questions keep "
            f"{np.quantile(count, 0.25):.0f} to {np.quantile(count, 0.75):.0f}",
        ),
    ]
    if report.scenes is not None:
        objects = np.array([scene.complexity for scene in report.scenes])
        relevant = np.array([len(scene.relevant) for scene in report.scenes])
        correlations = (
            (spearman(count, objects), "the number of objects in the image"),
            (spearman(count, relevant), "the number of patches the answer depends on"),
        )
        known = [f"{value:.2f} with {what}" for value, what in correlations if value is not None]
        facts.append(("Spearman's rank correlation of K", ", ".join(known) or "K does not vary"))
    for exact in report.records:
        same = (exact.method, exact.budget) == (record.method, record.budget)
        if same and exact.mode == "exact" != record.mode:
            change = paired_difference(record.correct, exact.correct, image)
            error = change["standard_error_by_image"]
            spread = "" if error is None else f" ± {error:.1f} (standard error, by image)"
            value = f"{change['difference']:+.1f}{spread} points of accuracy"
            facts.append(("Adaptive against exact at the same budget", value))
    return facts


def write_page(
    folder: str | Path,
    report: Report,
    figures: Sequence[PageFigure],
    *,
    title: str = "StepPrune: evaluation",
    command: str | None = None,
    config: str | None = None,
) -> Path:
    """Writes `index.html` next to its figures.

    Args:
        folder: where the figures are.
        report: a checked report.
        figures: the figures, in order.
        title: heading of the page.
        command: the command that made the report, if it is to be shown.
        config: the configuration as text, if it is to be shown.

    Returns:
        The path of the page.
    """
    facts = "\n".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in describe(report))
    seeds = sorted({str(row["seed"]) for row in report.table if row.get("seed") is not None})
    made = f"<p>Seed {escape(', '.join(seeds))}.</p>" if seeds else ""
    if command:
        made += f"<pre>{escape(command)}</pre>"
    if config:
        made += f"<details><summary>configuration</summary><pre>{escape(config)}</pre></details>"
    sections = [
        ("Table", f'<div class="scroll">{html_table(report)}</div><p><small>{_LEGEND}</small></p>'),
        ("Numbers", f"<dl>{facts}</dl>"),
        *((figure.title, _figure(figure)) for figure in figures),
        ("How it was made", made),
    ]
    body = "\n".join(
        f"<section>\n<h2>{escape(name)}</h2>\n{content}\n</section>"
        for name, content in sections
        if content
    )
    page = Path(folder) / "index.html"
    page.write_text(
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_CSS}\n</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{escape(title)}</h1></header>\n{body}\n</main>\n</body>\n</html>\n",
        encoding="utf-8",
    )
    return page


_LEGEND = (
    "Large: retention, accuracy in percent of that of all tokens; small: accuracy, and mean number "
    "of tokens kept. Bold: the highest retention at a budget. Exact: K tokens of every image. "
    "Adaptive: the policy stops by itself, its stop calibrated on other questions to keep K on "
    "average."
)


def _figure(figure: PageFigure) -> str:
    """A figure with its size in points, so that the page does not jump while it loads."""
    with Image.open(figure.path) as image:
        width, height = image.size
    if figure.path.suffix == ".png":  # drawn with two pixels a point
        width, height = (round(100 * pixels / DPI) for pixels in (width, height))
    return (
        f'<figure><img src="{escape(figure.path.name)}" width="{width}" height="{height}" '
        f'alt="{escape(figure.alt)}">\n<figcaption>{escape(figure.caption)}</figcaption></figure>'
    )


def budgets(report: Report) -> dict[float, int]:
    """Finds the counts that some method was held to, from many to few, by their pruning rates."""
    exact = [row for row in report.table if row["mode"] == "exact" and row["method"] != ALL]
    counts = {float(row["pruning_rate"]): round(row["mean_k"]) for row in exact}
    return {rate: counts[rate] for rate in sorted(counts) if rate}


def html_table(report: Report) -> str:
    """The table: retention, accuracy and mean K for each method, mode and budget.

    Retention is bold where no other method at that budget has more, whatever the mode. Rows
    without a budget of the others, as a policy that follows its own stop, stand below.

    Args:
        report: a checked report.

    Returns:
        An HTML table; every text from the report is escaped.
    """
    rates = budgets(report)
    best = {
        rate: max((_shown(r) for r in report.table if _at(r, rate)), key=_order) for rate in rates
    }
    head = "".join(
        f"<th scope=col>{rate:.1f} % pruned<br><small>K ≈ {count}</small></th>"
        for rate, count in rates.items()
    )
    lines = ["<table>", f"<thead><tr><th scope=col>method</th><th scope=col>mode</th>{head}</tr>"]
    lines += ["</thead>", "<tbody>"]
    wide = [row for row in report.table if not any(_at(row, rate) for rate in rates)]
    lines += [_wide_row(row, len(rates)) for row in wide if row["method"] == ALL]
    for method, mode in dict.fromkeys((r["method"], r["mode"]) for r in report.table):
        rows = [r for r in report.table if (r["method"], r["mode"]) == (method, mode)]
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
