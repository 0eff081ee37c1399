"""The third stage over all answer files of a run: scores, with K and time, in one file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepprune_jax.evaluation.answer_files import FOLDER, AnswerFile, read_files
from stepprune_jax.evaluation.benchmarks import BENCHMARKS
from stepprune_jax.evaluation.benchmarks.answers import Answer, read_answers
from stepprune_jax.evaluation.records import write_json
from stepprune_jax.evaluation.tables import pruning_rate

SCORES = "scores.json"


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
        for file in read_files(Path(workdir) / FOLDER / name):
            scores.append(score_file(file, Path(root)))
    if not scores:
        raise FileNotFoundError(
            f"no answers to {', '.join(roots)} in {Path(workdir) / FOLDER}: run the stage generate"
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
    """
    card, rows = file.card, read_answers(file.path)
    kept = np.array([row.fields.get("kept", 0) for row in rows])
    kept = kept[kept > 0] if (kept > 0).any() else kept
    mean = float(kept.mean())
    rate = card.pruning_rate
    result = {
        "benchmark": card.benchmark, "method": card.method, "mode": card.mode,
        "pruning_rate": pruning_rate(mean, card.num_tokens) if rate is None else rate,
        "own_stop": rate is None, "num_tokens": card.num_tokens, "model": card.model,
        "questions": card.questions, "asked": card.asked, "answered": len(rows),
        **_score(file, root, rows),
        "mean_k": mean, "sd_k": float(kept.std()), "min_k": int(kept.min()),
        "max_k": int(kept.max()),
        "ms": float(np.mean([row.fields.get("ms", 0.0) for row in rows])),
    }  # fmt: skip
    return result


def _score(file: AnswerFile, root: Path, rows: Sequence[Answer]) -> dict[str, Any]:
    """The scorer's figures, or why there are none."""
    if len(rows) < file.card.asked:
        problem = f"{len(rows):,} of {file.card.asked:,} questions answered so far"
        return {"headline": None, "parts": {}, "warnings": [], "problem": problem}
    try:
        found = BENCHMARKS[file.card.benchmark].score(root, file.path)
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
        good = all({"benchmark", "method", "headline", "mean_k"} <= row.keys() for row in scores)
    except (ValueError, AttributeError, TypeError):
        good = False
    if not good or not scores:
        raise ValueError(f"{path} is not a list of scores, as eval.py writes them")
    return scores
