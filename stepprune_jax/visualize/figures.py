"""Draws a report: its figures, an animation, and the page that shows them."""

import json
from pathlib import Path

from stepprune_jax.data.json_files import read_json_object
from stepprune_jax.evaluation.report import MANIFEST, Report, read_report
from stepprune_jax.visualize.accuracy import draw_accuracy, draw_costs, draw_families
from stepprune_jax.visualize.animation import draw_selection
from stepprune_jax.visualize.counts import draw_complexity, draw_histogram
from stepprune_jax.visualize.excerpts import check_report, default_record, tightest
from stepprune_jax.visualize.overlays import draw_hero, draw_overlays
from stepprune_jax.visualize.page import PageFigure, write_page
from stepprune_jax.visualize.training import draw_training

# Fields of the manifest that differ between two runs of the same command, or are paths.
_NOT_SHOWN = (
    "kind",
    "seconds",
    "data",
    "grids",
    "metrics_file",
    "questions",
    "model",
    "model_name",
    "ask",
)
_CHOSEN = (
    "Examples were chosen by K and question family alone, without looking at answers or selections."
)


def write_report(
    folder: str | Path,
    report: Report,
    *,
    title: str = "StepPrune: evaluation",
    command: str | None = None,
    config: str | None = None,
) -> Path:
    """Draws the figures of an evaluation and writes the page that shows them.

    The same input gives the same bytes.

    Args:
        folder: folder to write; created if needed. Files of the same names are replaced.
        report: the evaluation.
        title: heading of the page.
        command: the command of the evaluation, shown unchanged.
        config: the configuration, shown unchanged.

    Returns:
        The path of `index.html`.

    Raises:
        FileNotFoundError: an image or the metrics file is missing.
        ValueError: the parts do not belong together (see `check_report`), or a file cannot be read.
    """
    report, folder = check_report(report), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    draw_hero(folder / "overlay_hero.png", report)
    figures = [*_result_figures(folder, report), *_selection_figures(folder, report)]
    if report.metrics_file is not None:
        figures.append(
            PageFigure(
                draw_training(folder / "training.png", report.metrics_file),
                "Training",
                "Curves of the training run against the step: loss, K, agreement of gates and "
                "selection, entropy, and the gradient norm of the stop.",
                "Faint: as logged; strong: running mean. The band is a standard deviation of K.",
            )
        )
    return write_page(folder, report, figures, title=title, command=command, config=config)


def redraw(folder: str | Path, *, command: str | None = None) -> Path:
    """Redraws the report of an evaluation from its saved files, without a model.

    Args:
        folder: the report folder of `evaluate`.
        command: the command of the evaluation, shown unchanged.

    Returns:
        The path of `index.html`, in the same folder.

    Raises:
        FileNotFoundError: the folder, its data, an image or the metrics file are missing.
        ValueError: the folder holds no finished report, or as `write_report`.
    """
    report = read_report(folder)
    facts = read_json_object(Path(folder) / MANIFEST)
    shown = {name: value for name, value in facts.items() if name not in _NOT_SHOWN}
    config = json.dumps(shown, indent=1, ensure_ascii=False)
    return write_report(folder, report, command=command, config=config)


def _result_figures(folder: Path, report: Report) -> list[PageFigure]:
    """Draws the figures about accuracy and K."""
    record = default_record(report)
    low, high = tightest(report)[0], f"{record.count.min()} to {record.count.max()}"
    figures = [
        PageFigure(
            draw_accuracy(folder / "accuracy.png", report.table, report.num_tokens),
            "Retention against tokens kept",
            "Lines of retention against the number of visual tokens kept, one for each method; "
            "the numbers are those of the table.",
            "Fewer tokens to the right. Solid: the same number for every image; dashed: the "
            "policy stops by itself, calibrated to that mean.",
        ),
        *_cost_figure(folder, report),
        PageFigure(
            draw_families(folder / "families.png", report),
            "Accuracy by question family",
            f"Accuracy for each question family at {low.pruning_rate:.1f} % pruned: all tokens, "
            "StepPrune, adaptive and exact, and the best other method.",
            "At the tightest budget; bars are standard errors.",
        ),
        PageFigure(
            draw_histogram(folder / "k_histogram.png", report),
            "How many tokens the policy keeps",
            f"Histogram of K, from {high}, with the accuracy of the questions in each bucket, "
            "by the policy and by all tokens.",
            f"{record.method}, {record.mode}, {record.pruning_rate:.1f} % pruned. Accuracy where "
            "a bucket has at least 20 questions, with its standard error.",
        ),
    ]
    what = "objects, against patches the answer depends on, and by question family"
    if report.scenes is None:
        what = "question family"
    figures.append(
        PageFigure(
            draw_complexity(folder / "k_complexity.png", report),
            "What K depends on",
            f"K of the same policy: {what}.",
            "Boxes: the middle half of the questions; whiskers: the middle 90 %."
            if report.scenes is not None
            else "Mean over the questions of a family.",
        )
    )
    return figures


def _cost_figure(folder: Path, report: Report) -> list[PageFigure]:
    """The figure of what accuracy costs, where that is known."""
    drawn = draw_costs(folder / "cost.png", report.table)
    if drawn is None:
        return []
    alt = "Lines of retention against the time of an answer and against operations, as in the table"
    caption = "Left and up is better. Time is of this machine and batch size, operations are not."
    return [PageFigure(drawn, "Retention against cost", f"{alt}.", caption)]


def _selection_figures(folder: Path, report: Report) -> list[PageFigure]:
    """Draws the images with their kept patches, static and animated."""
    return [
        PageFigure(
            draw_overlays(folder / "overlays.png", report),
            "What the policy keeps",
            "Test images with the kept patches bright and numbered in the order of choice and "
            "the rest dimmed, with question and answer; rows with few, middling and many tokens.",
            "Numbers: order of choice (dots from dark to bright where patches are small). "
            + _CHOSEN,
            images=True,
        ),
        PageFigure(
            draw_selection(folder / "selection.gif", report),
            "The selection, step by step",
            "Animation: patches of test images light up one by one until the policy stops; then "
            "the answer appears.",
            _CHOSEN,
            images=True,
        ),
    ]
