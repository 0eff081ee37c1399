"""The page of a report: one HTML file with its table, and images next to it."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from stepprune_jax.evaluation.report import Report
from stepprune_jax.evaluation.statistics import (
    image_numbers,
    paired_difference,
    scene_counts,
    spearman,
)
from stepprune_jax.visualize.excerpts import default_record
from stepprune_jax.visualize.opening import opening
from stepprune_jax.visualize.page_table import html_table
from stepprune_jax.visualize.style import DPI

_CSS = """
:root {
  color-scheme: light dark; --ground: #eef0f3; --card: #fff; --ink: #1f2430; --soft: #586174;
  --line: #e4e7ec; --tint: #eef5fa; --code: #f5f7fa; --ours: #0069a6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #12151a; --card: #1b1f27; --ink: #e4e7ec; --soft: #a5aebd; --line: #313743;
    --tint: #1c2c3a; --code: #262b35; --ours: #6fbcec;
  }
  /* Black on white becomes white on the card; hues stay what they are. */
  .drawing img { filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen; }
  .images img { filter: brightness(0.88); border-radius: 6px; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); }
body { font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
main { max-width: 992px; margin: 0 auto; padding: 24px 16px 64px; }
section { background: var(--card); border-radius: 10px; padding: 8px 24px 20px; margin: 18px 0; }
h1 { font-size: 1.7rem; margin: 12px 0 4px; } h2 { font-size: 1.15rem; }
.lead { max-width: 50rem; margin: 8px 0; } .note { max-width: 50rem; }
header > .note { max-width: none; }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 12px 0; } a { color: var(--ours); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 18px; }
.cards section { margin: 0; padding-bottom: 6px; } .cards h2 { font-size: 1rem; margin: 10px 0; }
.large { margin: 4px 0; display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; }
.large { align-items: baseline; column-gap: 0.3rem; }
.large b { font-size: 1.75rem; line-height: 1.25; white-space: nowrap; }
.large span { color: var(--soft); } .large.ours b { color: var(--ours); }
figure { margin: 12px 0; } figcaption, small, .note { color: var(--soft); font-size: 0.85rem; }
img { max-width: 100%; height: auto; display: block; margin: 0 auto 6px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--line); }
th:first-child { text-align: left; overflow-wrap: anywhere; min-width: 7em; }
th[scope=row] { font-weight: 500; } th[scope=rowgroup] { padding-top: 18px; }
th small { font-weight: 400; } figcaption a { white-space: nowrap; }
thead th { vertical-align: bottom; position: sticky; top: 0; background: var(--card); }
.ours th, .ours td { background: var(--tint); }
dt { font-weight: 600; } dd { margin: 0 0 8px; }
pre { background: var(--code); padding: 12px; border-radius: 6px; font-size: 0.85rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
pre span { display: inline-block; max-width: 100%; }
@media (max-width: 600px) {
  main { padding: 12px 8px 40px; } section { padding: 4px 12px 14px; } h1 { font-size: 1.4rem; }
  table { font-size: 0.8rem; } th, td { padding: 4px 0 4px 5px; } table small { font-size: 0.7rem; }
  th:first-child { padding-left: 2px; min-width: 5.6em; } thead th { font-size: 0.68rem; }
}
@media (max-width: 350px) { #table { overflow-x: auto; } }
""".strip()


class PageFigure(NamedTuple):
    """A figure of the page.

    Attributes:
        path: the file, in the folder of the page.
        title: heading above it.
        alt: text alternative.
        caption: text below it.
        images: whether it shows images, whose colours must not change.
    """

    path: Path
    title: str
    alt: str
    caption: str
    images: bool = False


def describe(report: Report) -> list[tuple[str, str]]:
    """Describes the default policy at the middle budget by numbers that the table lacks.

    Args:
        report: a checked report.

    Returns:
        Pairs of a name and a value.
    """
    record = default_record(report)
    count = record.count
    facts = [
        (
            f"K of {record.method}, {record.mode}, {record.pruning_rate:.1f} % pruned",
            f"{count.mean():.1f} ± {count.std():.1f} on average, from {count.min()} to "
            f"{count.max()} of {report.num_tokens} tokens; half of the questions keep "
            f"{np.quantile(count, 0.25):.0f} to {np.quantile(count, 0.75):.0f}",
        ),
    ]
    if report.scenes is not None:
        objects, relevant = scene_counts(report.scenes)
        correlations = (
            (spearman(count, objects), "the number of objects in the image"),
            (spearman(count, relevant), "the number of patches the answer depends on"),
        )
        known = [f"{value:.2f} with {what}" for value, what in correlations if value is not None]
        facts.append(("Spearman's rank correlation of K", ", ".join(known) or "K does not vary"))
    for exact in report.records:
        same = (exact.method, exact.budget) == (record.method, record.budget)
        if same and exact.mode == "exact" != record.mode:
            change = paired_difference(
                record.correct, exact.correct, image_numbers(report.questions)
            )
            error = change["standard_error_by_image"]
            spread = "" if error is None else f" ± {error:.1f} (standard error, by image)"
            value = f"{change['difference']:+.1f}{spread} points of accuracy"
            facts.append(("Adaptive minus exact at the same budget", value))
    return facts


class _Section(NamedTuple):
    """A section of the page: its anchor, its heading, its HTML, and its name in the menu."""

    anchor: str
    title: str
    content: str
    menu: str = ""


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
        folder: folder of the figures.
        report: a checked report.
        figures: the figures, in order.
        title: heading of the page.
        command: the command that wrote the report, to be shown; or None.
        config: the configuration as text, to be shown; or None.

    Returns:
        The path of the page.
    """
    facts = "\n".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in describe(report))
    table = f"{html_table(report)}<p class=note>{_LEGEND}</p>"
    sections = [
        _Section("table", "All methods", table, "Table"),
        _Section("numbers", "More about K", f"<dl>{facts}</dl>"),
        *(_Section(figure.path.stem, figure.title, _figure(figure)) for figure in figures),
        _Section("ask", "Ask the policy yourself", _command(report.ask, _ASK), "Ask the policy"),
        _Section("made", "Provenance", _made(report, command, config), "Provenance"),
    ]
    sections = [section for section in sections if section.content]
    if figures:
        first = next(n for n, section in enumerate(sections) if section.title == figures[0].title)
        sections[first] = sections[first]._replace(menu="Figures")
    menu = "\n".join(f'<a href="#{s.anchor}">{s.menu}</a>' for s in sections if s.menu)
    body = "\n".join(
        f'<section id="{section.anchor}">\n<h2>{escape(section.title)}</h2>\n{section.content}\n'
        "</section>"
        for section in sections
    )
    page = Path(folder) / "index.html"
    page.write_text(
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_CSS}\n</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{escape(title)}</h1>\n{opening(report)}\n<nav>\n{menu}\n</nav></header>\n"
        f"{body}\n</main>\n</body>\n</html>\n",
        encoding="utf-8",
        errors="backslashreplace",  # of the command: a name that is not UTF-8
    )
    return page


_ASK = "Answers a question of the test split, and draws the tokens that the policy keeps:"
_LEGEND = (
    "<b>K</b>: visual tokens kept, on average. <b>Retention</b>: accuracy in percent of that with "
    "all tokens; the highest at each budget is bold. <b>Exact</b>: the same number of tokens for "
    "every image, as with all methods without a mode. <b>Adaptive</b>: the policy decides when to "
    "stop, calibrated on other questions to meet the budget on average. <b>Time</b>: milliseconds "
    "per question, measured while answering in batches, without compilation; one ranking of the "
    "tokens serves all budgets of a method, and each row includes it in full. <b>FLOPs</b>: up to "
    "the first token of the answer, by formula."
)


def _command(command: str, what: str) -> str:
    """Formats a command with a line of explanation; empty without a command."""
    return f"<p>{what}</p>{_words(command)}" if command else ""


def _words(command: str) -> str:
    """Formats a command whose lines break between words, not after hyphens of flags."""
    words = " ".join(f"<span>{escape(word)}</span>" for word in command.split(" "))
    return f"<pre>{words}</pre>"


def _made(report: Report, command: str | None, config: str | None) -> str:
    """Formats how the report was made."""
    seeds = sorted({str(row["seed"]) for row in report.table if row.get("seed") is not None})
    made = f"<p>Seed {escape(', '.join(seeds))}.</p>" if seeds else ""
    if command:
        made += _words(command)
    if config:
        made += f"<details><summary>configuration</summary><pre>{escape(config)}</pre></details>"
    return made


def _figure(figure: PageFigure) -> str:
    """Formats a figure with its size in points, so that the page does not jump while loading."""
    with Image.open(figure.path) as image:
        width, height = image.size
    if figure.path.suffix == ".png":  # drawn with two pixels a point
        width, height = (round(100 * pixels / DPI) for pixels in (width, height))
    name, kind = escape(figure.path.name), "images" if figure.images else "drawing"
    return (
        f'<figure class={kind}><a href="{name}"><img src="{name}" width="{width}" '
        f'height="{height}" alt="{escape(figure.alt)}"></a>\n<figcaption>'
        f'{escape(figure.caption)} <a href="{name}">Full size</a></figcaption></figure>'
    )
