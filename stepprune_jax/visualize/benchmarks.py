"""Figures of the public benchmarks, from answer files only: K, and examples of kept patches."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

import numpy as np
from PIL import Image

from stepprune_jax.benchmarks import Benchmark
from stepprune_jax.benchmarks.answer_files import AnswerFile
from stepprune_jax.benchmarks.answers import Answer, read_answers
from stepprune_jax.benchmarks.questions import IMAGE_MARK, BenchmarkQuestion
from stepprune_jax.evaluation.names import ALL, DEFAULT, OWN_STOP
from stepprune_jax.evaluation.report import square_patches
from stepprune_jax.visualize import style
from stepprune_jax.visualize.counts import Curve, draw_counts
from stepprune_jax.visualize.overlays import Overlay, draw_rows

_COLUMNS = 4


def default_file(files: Sequence[AnswerFile]) -> AnswerFile | None:
    """Finds the default policy at the middle budget; exact if it does not stop by itself."""
    for mode in ("adaptive", "exact"):
        mine = [f for f in files if (f.provenance.method, f.provenance.mode) == (DEFAULT, mode)]
        mine.sort(key=lambda file: -file.provenance.budget)
        if mine:
            return mine[len(mine) // 2]
    return next((f for f in files if f.provenance.method == OWN_STOP), None)


def draw_benchmark_counts(
    path: Path, benchmark: Benchmark, root: Path, files: Sequence[AnswerFile]
) -> Path | None:
    """Draws the number of tokens that the default policy keeps, and the quality of its answers.

    Only questions with an image count. If answers cannot be graded here, as for VQAv2's test-dev,
    the curves are omitted.

    Args:
        path: the PNG to write.
        benchmark: the benchmark.
        root: folder with its annotations.
        files: its complete answer files.

    Returns:
        The path; None without an answer file of the default policy.
    """
    mine = default_file(files)
    if mine is None:
        return None
    rows = read_answers(mine.path)
    count = np.array([row.fields["kept"] for row in rows])
    shown = count > 0
    if not shown.any():
        return None
    curves = []
    whole = next((file for file in files if file.provenance.method == ALL), None)
    compared = ((whole, style.COLOURS[ALL], "D"), (mine, style.COLOURS[DEFAULT], "o"))
    for file, colour, marker in compared:
        worth = None if file is None else judged(benchmark, root, file)
        if worth is not None:
            card = file.provenance
            name = card.method if file is whole else f"{card.method}, {card.mode}"
            curves.append(Curve(f"accuracy, {name}", colour, marker, worth[shown]))
    tokens = mine.provenance.num_tokens
    return draw_counts(path, count[shown], tokens, curves, benchmark.title)


def judged(benchmark: Benchmark, root: Path, file: AnswerFile) -> np.ndarray | None:
    """Grades each answer from 0 to 1; None if one of them cannot be graded here."""
    try:
        worth = benchmark.judge(root, file.path)
    except (OSError, ValueError):
        return None
    return None if None in worth else np.array(worth)


def draw_benchmark_overlays(
    path: Path,
    benchmark: Benchmark,
    root: Path,
    file: AnswerFile,
    questions: Sequence[BenchmarkQuestion],
) -> Path | None:
    """Draws the samples of an answer file: images with their kept patches.

    Args:
        path: the PNG to write.
        benchmark: the benchmark.
        root: folder with its annotations.
        file: a complete file; lines with an `order` are the samples, chosen before answering.
        questions: all questions of the benchmark.

    Returns:
        The path; None if the file has no samples.
    """
    rows = read_answers(file.path)
    worth = judged(benchmark, root, file)
    side = math.isqrt(file.provenance.num_tokens)  # LLaVA's images are square
    first = file.provenance.num_tokens - side * side  # 1 if the class token is kept
    examples = [
        _overlay(
            benchmark, row, question, side, first, None if worth is None else bool(worth[n] >= 0.5)
        )
        for n, (row, question) in enumerate(zip(rows, questions, strict=True))
        if "order" in row.fields
    ]
    if not examples:
        return None
    groups = [examples[n : n + _COLUMNS] for n in range(0, len(examples), _COLUMNS)]
    return draw_rows(path, [("", group) for group in groups])


def _overlay(
    benchmark: Benchmark,
    row: Answer,
    question: BenchmarkQuestion,
    side: int,
    first: int,
    right: bool | None,
) -> Overlay:
    """Builds the overlay of a sample."""
    image = question.image
    if isinstance(image, bytes):
        image = Image.open(io.BytesIO(image))
    return Overlay(
        image=image,
        patches=square_patches(row.fields["order"], (side, side), first),
        title=f"K = {row.fields['kept']}",
        category=benchmark.title,
        text=question.prompt.removeprefix(f"{IMAGE_MARK}\n"),
        answer=shorten(row.text, 28, placeholder="…"),
        right=right,
        grid=side,
    )
