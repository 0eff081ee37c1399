"""The third stage over all answer files of a run: scores, with K and time, in one file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.answer_files import ANSWERS, AnswerFile, read_files
from stepprune_jax.benchmarks.answers import Answer, read_answers
from stepprune_jax.data.json_files import write_json
from stepprune_jax.evaluation.accuracy import pruning_rate

SCORES = "scores.json"
# What tables are made of.
_FIELDS = {
    "benchmark", "method", "mode", "pruning_rate", "own_stop", "num_tokens", "questions", "asked",
    "answered", "headline", "warnings", "problem", "mean_k", "sd_k", "ms",
}  # fmt: skip


def score_answers(
    workdir: str | Path, roots: Mapping[str, str | Path], report: Path
) -> list[dict[str, Any]]:
    """Scores every answer file of a run.

    Args:
        workdir: with answers/BENCHMARK/METHOD.jsonl.
        roots: name of each benchmark to the folder with its annotations.
        report: folder for scores.json.

    Returns:
        What the file holds: an object for each answer file, as `score_file` makes it, by benchmark
        and file name.

    Raises:
        FileNotFoundError: there is no answer file.
        ValueError: a card that cannot be read.
    """
    scores = []
    for name, root in roots.items():
        for file in read_files(Path(workdir) / ANSWERS / name):
            scores.append(score_file(file, Path(root)))
    if not scores:
        raise FileNotFoundError(
            f"no answers to {', '.join(roots)} in {Path(workdir) / ANSWERS}: run the stage generate"
        )
    write_json(report / SCORES, scores)
    return scores


def score_file(file: AnswerFile, root: Path) -> dict[str, Any]:
    """Scores an answer file, and counts tokens and time.

    Args:
        file: with its card.
        root: folder with the annotations.

    Returns:
        benchmark, method, mode, pruning_rate (in percent; of a policy's own stop that of its mean
        K), num_tokens, model, questions (their fingerprint), asked, answered; `headline`, `parts`
        and `warnings` of the scorer, or headline null and `problem`, why there is no score; K of
        the questions with a picture: mean_k, sd_k, min_k, max_k; `ms`, the mean time of a question.
        K and time are null where nothing was answered.
    """
    card, rows = file.provenance, _read_rows(file)
    measured = _measured(rows)
    rate = card.pruning_rate
    if rate is None and rows:
        rate = pruning_rate(measured["mean_k"], card.num_tokens)
    return {
        "benchmark": card.benchmark, "method": card.method, "mode": card.mode,
        "pruning_rate": rate, "own_stop": card.pruning_rate is None,
        "num_tokens": card.num_tokens, "model": card.model, "questions": card.questions,
        "asked": card.asked, "answered": len(rows), **_score(file, root, rows), **measured,
    }  # fmt: skip


def _read_rows(file: AnswerFile) -> list[Answer]:
    """The whole lines of a file in which a run may have been stopped, or may be writing."""
    try:
        return read_answers(file.path, broken=[])
    except ValueError:  # there is no whole line; or one is none of ours, which the scorer tells
        return []


def _measured(rows: Sequence[Answer]) -> dict[str, float | int | None]:
    """K and time over the lines of a file."""
    if not rows:
        return dict.fromkeys(("mean_k", "sd_k", "min_k", "max_k", "ms"))
    kept = np.array([row.fields.get("kept", 0) for row in rows])
    kept = kept[kept > 0] if (kept > 0).any() else kept
    return {
        "mean_k": float(kept.mean()), "sd_k": float(kept.std()), "min_k": int(kept.min()),
        "max_k": int(kept.max()),
        "ms": float(np.mean([row.fields.get("ms", 0.0) for row in rows])),
    }  # fmt: skip


def _score(file: AnswerFile, root: Path, rows: Sequence[Answer]) -> dict[str, Any]:
    """The scorer's figures, or why there are none."""
    try:
        if len(rows) < file.provenance.asked:
            raise ValueError(
                f"{len(rows):,} of {file.provenance.asked:,} questions answered so far"
            )
        found = BENCHMARKS[file.provenance.benchmark].score(root, file.path)
    except (OSError, ValueError) as error:
        return {"headline": None, "parts": {}, "warnings": [], "problem": str(error)}
    return {**found._asdict(), "problem": None}


def read_scores(workdir: str | Path) -> list[dict[str, Any]]:
    """Reads the scores of a run.

    Args:
        workdir: of the run.

    Returns:
        What `score_answers` returned.

    Raises:
        FileNotFoundError: the run has none.
        ValueError: the file is not a list of scores.
    """
    path = Path(workdir) / "report" / SCORES
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: run eval.py with this --workdir first")
    try:
        scores = json.loads(path.read_text(encoding="utf-8"))
        good = all(row.keys() >= _FIELDS for row in scores)
    except (ValueError, AttributeError, TypeError):
        good = False
    if not good or not scores:
        raise ValueError(f"{path} is not a list of scores, as eval.py writes them")
    return scores
