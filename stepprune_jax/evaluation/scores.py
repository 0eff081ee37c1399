"""Scores of all answer files of a run, with K and time, in one file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.answer_files import (
    AnswerFile,
    budget_of_rate,
    pruning_rate,
    read_files,
)
from stepprune_jax.benchmarks.answers import Answer, read_answers
from stepprune_jax.data.json_files import read_json_list, write_json
from stepprune_jax.settings import is_count, is_number

SCORES = "scores.json"
# The file from which tables are built.
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "benchmark": lambda value: value in BENCHMARKS,
    **dict.fromkeys(("method", "mode", "questions"), lambda value: isinstance(value, str)),
    "problem": lambda value: value is None or isinstance(value, str),
    "warnings": lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value),
    "num_tokens": is_count,
    **dict.fromkeys(("asked", "answered"), lambda value: is_count(value, 0)),
    **dict.fromkeys(
        ("pruning_rate", "headline", "mean_k", "sd_k", "ms"),
        lambda value: value is None or is_number(value),
    ),
}


def score_answers(
    answers: Path, roots: Mapping[str, str | Path], report: Path
) -> list[dict[str, Any]]:
    """Scores every answer file of a run.

    Args:
        answers: folder with BENCHMARK/METHOD.jsonl.
        roots: folder with the annotations of each benchmark, by name.
        report: folder for scores.json.

    Returns:
        The contents of the file: an object for each answer file, from `score_file`, ordered by
        benchmark and file name.

    Raises:
        FileNotFoundError: there is no answer file.
        ValueError: a provenance that cannot be read.
    """
    scores = []
    for name, root in roots.items():
        for file in read_files(answers / name):
            scores.append(score_file(file, Path(root)))
    if not scores:
        raise FileNotFoundError(
            f"no answers to {', '.join(roots)} in {answers}: run the stage generate"
        )
    write_json(report / SCORES, scores)
    return scores


def score_file(file: AnswerFile, root: Path) -> dict[str, Any]:
    """Scores an answer file, and counts tokens and time.

    Args:
        file: the answer file.
        root: folder with the annotations.

    Returns:
        benchmark, method, mode, budget (tokens; null for a policy's own stop), pruning_rate (in
        percent; from the mean K for a policy's own stop), num_tokens, model, questions (their
        fingerprint), asked, answered; `headline`, `parts` and `warnings` of the scorer, or a null
        headline and `problem`, the reason; K of the questions with an image: mean_k, sd_k, min_k,
        max_k; `ms`, the mean time of a question. K and time are null if nothing was answered, time
        also if the answers do not record it.
    """
    made, answers = file.provenance, _whole_lines(file)
    measured = _measured(answers)
    rate = made.pruning_rate
    if rate is None and answers:
        rate = pruning_rate(measured["mean_k"], made.num_tokens)
    return {
        "benchmark": made.benchmark,
        "method": made.method,
        "mode": made.mode,
        "budget": made.budget,
        "pruning_rate": rate,
        "num_tokens": made.num_tokens,
        "model": made.model,
        "questions": made.questions,
        "asked": made.asked,
        "answered": len(answers),
        **_score(file, root, answers),
        **measured,
    }


def _whole_lines(file: AnswerFile) -> list[Answer]:
    """Reads the complete lines of a file that a run may have torn, or is still writing."""
    try:
        return read_answers(file.path, broken=[])
    except ValueError:  # there is no complete line; or a foreign one, which the scorer reports
        return []


def _measured(answers: Sequence[Answer]) -> dict[str, float | int | None]:
    """Summarises K and time over the lines of a file."""
    if not answers:
        return dict.fromkeys(("mean_k", "sd_k", "min_k", "max_k", "ms"))
    # Another program may have written the file.
    given = [answer.fields.get("kept") for answer in answers]
    kept = np.array([count if is_count(count, 0) else 0 for count in given])
    kept = kept[kept > 0] if (kept > 0).any() else kept
    return {
        "mean_k": float(kept.mean()),
        "sd_k": float(kept.std()),
        "min_k": int(kept.min()),
        "max_k": int(kept.max()),
        "ms": mean_ms(answers),
    }


def mean_ms(answers: Iterable[Answer]) -> float | None:
    """Averages the milliseconds of the answers that record them; None if none does."""
    given = [answer.fields.get("ms") for answer in answers]
    times = [ms for ms in given if is_number(ms)]
    return float(np.mean(times)) if times else None


def _score(file: AnswerFile, root: Path, answers: Sequence[Answer]) -> dict[str, Any]:
    """Returns the scorer's figures, or the reason why there are none."""
    asked = file.provenance.asked
    try:
        if len(answers) < asked:
            raise ValueError(f"{len(answers):,} of {asked:,} questions answered so far")
        score = BENCHMARKS[file.provenance.benchmark].score(root, file.path)
    except (OSError, ValueError) as error:
        return {"headline": None, "parts": {}, "warnings": [], "problem": str(error)}
    return {**score._asdict(), "problem": None}


def _is_score(score: dict[str, Any]) -> bool:
    """Returns whether an object has the fields that tables are built from."""
    good = all(holds(score[name]) for name, holds in _FIELDS.items())
    good = good and (score["mean_k"] is None) == (score["sd_k"] is None)
    return good and (score.get("budget") is None or is_count(score["budget"]))


def read_scores(workdir: str | Path) -> list[dict[str, Any]]:
    """Reads the scores of a run.

    Args:
        workdir: workdir of the run.

    Returns:
        The result of `score_answers`.

    Raises:
        FileNotFoundError: the run has none.
        ValueError: the file is not a list of scores.
    """
    path = Path(workdir) / "report" / SCORES
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: run eval.py with this --workdir first")
    try:
        scores = read_json_list(path, "score")
        good = all(map(_is_score, scores))
    except (ValueError, AttributeError, KeyError, TypeError):
        good = False
    if not good:
        raise ValueError(f"{path} is not a list of scores, as eval.py writes them")
    for score in scores:
        if "budget" not in score:  # written before budgets were counts
            rate = None if score.get("own_stop") else score["pruning_rate"]
            score["budget"] = budget_of_rate(score["method"], rate, score["num_tokens"])
    return scores
