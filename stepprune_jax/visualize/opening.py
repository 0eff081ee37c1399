"""The opening of a report's page: questions, model, and the two main results."""

from html import escape

import numpy as np

from stepprune_jax.evaluation.accuracy import families, full_row
from stepprune_jax.evaluation.names import DEFAULT, OWN_STOP
from stepprune_jax.evaluation.records import Records
from stepprune_jax.evaluation.report import Report
from stepprune_jax.evaluation.statistics import image_numbers, paired_difference
from stepprune_jax.visualize.excerpts import others, tightest
from stepprune_jax.visualize.page_table import UNKNOWN

_EXAMPLES = 3  # questions quoted in the opening


def opening(report: Report) -> str:
    """Formats the questions, the model, the meaning of K, and the two main results.

    Args:
        report: a checked report.

    Returns:
        HTML; every text from the report is escaped. A result that the report's rows do not provide
        is omitted.
    """
    cards = [card for card in (_own_stop(report), _tightest(report)) if card]
    return "\n".join([_asked(report), "<div class=cards>", *cards, "</div>"])


def _asked(report: Report) -> str:
    """Formats the questions, the model, and the meaning of K."""
    members = families(report.questions).values()
    first = [report.questions[int(np.argmax(inside))].text for inside in members]
    examples = " ".join(f"“{escape(text)}”" for text in first[:_EXAMPLES])
    model = f"<b>{escape(report.model)}</b>" if report.model else "the model"
    images = len({question.image for question in report.questions})
    accuracy = _in_table(report, full_row(report.records), "accuracy")
    return (
        f"<p class=lead>{len(report.questions):,} questions about {images:,} images, answered by "
        f"{model} with frozen weights. {_sizes(report)}; "
        "<b>K</b> is the number of them that the language model reads. <b>Retention</b> is "
        f"accuracy in percent of the accuracy with all of them, which is {accuracy}.</p>\n"
        f"<p class=note>For example: {examples}</p>"
    )


def _sizes(report: Report) -> str:
    """How many visual tokens an image has."""
    low, high = report.sizes.min(), report.sizes.max()
    if low == high:
        return f"Each image has {report.num_tokens:,} visual tokens"
    return f"An image has {low:,} to {high:,} visual tokens, {report.num_tokens:,} on average"


def _own_stop(report: Report) -> str:
    """Formats the result of the policy's own stop."""
    record = next((row for row in report.records if row.method == OWN_STOP), None)
    if record is None:
        return ""
    count = record.count
    low, high = (f"{np.quantile(count, share):.0f}" for share in (0.25, 0.75))
    return _card(
        "Where the policy stops by itself",
        [
            ("ours", f"{count.mean():.1f}", f"of {report.num_tokens:,} tokens on average (K)"),
            ("ours", _in_table(report, record, "retention"), "retention"),
        ],
        f"K depends on the question: it ranges from {count.min()} to {count.max()}, and half of "
        f"the questions keep {low} to {high}. {_in_table(report, record, 'accuracy')} of the "
        "answers are correct.",
    )


def _tightest(report: Report) -> str:
    """Formats the default policy against the best other method, at the tightest budget."""
    ours, *exact = [row for row in tightest(report) if row.method == DEFAULT]
    held = round(ours.budget * report.num_tokens / ours.num_tokens)
    compared = others(report, ours.budget)
    numbers = [
        ("ours", _in_table(report, ours, "retention"), f"retention with {DEFAULT}, {ours.mode}")
    ]
    notes = []
    if compared:
        best = max(compared, key=lambda row: row.correct.mean())
        what = "the best other method" if len(compared) > 1 else "the other method"
        numbers.append(("", _in_table(report, best, "retention"), f"with {best.method}, {what}"))
        change = paired_difference(ours.correct, best.correct, image_numbers(report.questions))
        error = change["standard_error_by_image"]
        spread = "" if error is None else f" ± {error:.1f}"
        what = "" if error is None else " (standard error, clustered by image)"
        notes.append(
            f"The difference in accuracy is {change['difference']:+.1f}{spread} points{what}."
        )
    if exact:
        notes.append(
            f"{_exactly(report, held)}, {DEFAULT} retains "
            f"{_in_table(report, exact[0], 'retention')}."
        )
    title = f"At the tightest budget: {held:,} of {report.num_tokens:,} tokens"
    return _card(title, numbers, " ".join(notes))


def _exactly(report: Report, held: int) -> str:
    """What an exact budget is."""
    if np.ptp(report.sizes) == 0:
        return f"With exactly {held:,} tokens for every image"
    return f"With the same share of every image's tokens, {held:,} on average"


def _card(title: str, numbers: list[tuple[str, str, str]], note: str) -> str:
    """Formats a result: large numbers, each with a class and a description, and a note."""
    large = "".join(
        f'<p class="large {kind}"><b>{number}</b> <span>{escape(what)}</span></p>'
        for kind, number, what in numbers
    )
    note = f"<p class=note>{escape(note)}</p>"
    return f"<section>\n<h2>{title}</h2>\n{large}\n{note}\n</section>"


def _in_table(report: Report, record: Records, field: str) -> str:
    """Formats a percentage of a record's row as in the table."""
    head = record.method, record.mode, record.pruning_rate
    rows = [r for r in report.table if (r["method"], r["mode"], r.get("pruning_rate")) == head]
    value = rows[0][field] if rows else None
    return UNKNOWN if value is None else f"{value:.1f}\N{NO-BREAK SPACE}%"
