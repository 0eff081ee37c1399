"""Scores of the answer files of a run, with K, time and operations, in one file."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.answer_files import AnswerFile
from stepprune_jax.benchmarks.answers import GivenAnswer, read_answers
from stepprune_jax.data.json_files import JsonObject, read_json_list
from stepprune_jax.evaluation.names import ALL, DOWNSAMPLED
from stepprune_jax.settings import is_count, is_number
from stepprune_jax.user_input import UserError

SCORES = "scores.json"
# The fields from which tables are built.
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "benchmark": lambda value: value in BENCHMARKS,
    **dict.fromkeys(("method", "mode", "questions"), lambda value: isinstance(value, str)),
    "problem": lambda value: value is None or isinstance(value, str),
    "warnings": lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value),
    "num_tokens": is_count,
    "budget": lambda value: value is None or is_count(value),
    **dict.fromkeys(("asked", "answered", "seed"), lambda value: is_count(value, 0)),
    **dict.fromkeys(
        ("headline", "mean_k", "sd_k", "ms", "gflops"),
        lambda value: value is None or is_number(value),
    ),
}


def score_file(file: AnswerFile, root: Path, seed: int) -> JsonObject:
    """Scores an answer file, and averages tokens, time and operations.

    `mean_k`, `sd_k`, `min_k`, `max_k` and `gflops` are of the questions with an image. Without a
    headline, `problem` is the reason. Figures are None if no answer has them.
    """
    made, answers, problem = file.provenance, [], None
    try:
        answers = _whole_lines(file)
    except UserError as error:  # a line that another program may have written
        problem = str(error)
    return {
        "benchmark": made.benchmark,
        "method": made.method,
        "mode": made.mode,
        "budget": made.budget,
        "num_tokens": made.num_tokens,
        "model": made.model,
        "questions": made.questions,
        "seed": seed,
        "asked": made.asked,
        "answered": len(answers),
        **_score(file, root, len(answers), problem),
        **_measured(answers),
    }


def score_hard(files: Sequence[AnswerFile], root: Path) -> dict[Path, JsonObject]:
    """Scores complete answer files of a benchmark on the questions that need what pruning may drop.

    They are those of VTC-Bench (https://arxiv.org/abs/2510.07143): right with all tokens, and wrong
    where the image is downsampled to the file's own budget. What a coarser image answers as well
    does not tell methods apart.

    Args:
        files: the files, among them one of all tokens and some of `DOWNSAMPLED`.
        root: folder of the annotations.

    Returns:
        By file, as far as they are known: `hard`, the percentage of these questions that are right,
        and `hard_questions`, their number.
    """
    right: dict[Path, dict[tuple[str, object], bool]] = {}
    for file in files:
        with contextlib.suppress(OSError, ValueError):  # as the score reports
            grades = BENCHMARKS[file.provenance.benchmark].judge(root, file.path)
            keys = [(answer.id, answer.fields.get("prompt")) for answer in read_answers(file.path)]
            known = zip(keys, grades, strict=True)
            right[file.path] = {key: grade >= 0.5 for key, grade in known if grade is not None}
    made = {(f.provenance.method, f.provenance.budget): right.get(f.path, {}) for f in files}
    whole = next((right for (method, _), right in made.items() if method == ALL), {})
    found: dict[Path, JsonObject] = {}
    for file in files:
        coarse = made.get((DOWNSAMPLED, file.provenance.budget), {})
        hard = [key for key, good in whole.items() if good and not coarse.get(key, True)]
        if hard and file.path in right:
            good = sum(right[file.path].get(key, False) for key in hard)
            share = round(100 * good / len(hard), 2)
            found[file.path] = {"hard": share, "hard_questions": len(hard)}
    return found


def _whole_lines(file: AnswerFile) -> list[GivenAnswer]:
    """Reads the complete lines of a file that a run may have torn, or is still writing."""
    return read_answers(file.path, broken=[]) if b"\n" in file.path.read_bytes() else []


def about_images(answers: Sequence[GivenAnswer]) -> Bool[np.ndarray, "q"]:
    """Marks the answers to questions with an image, which have operations; all if none has."""
    counted = np.array(["gflops" in answer.fields for answer in answers], bool)
    return counted | ~counted.any()


def _measured(answers: Sequence[GivenAnswer]) -> dict[str, float | int | None]:
    """Summarises K, time and operations over the lines of a file."""
    if not answers:
        return dict.fromkeys(("mean_k", "sd_k", "min_k", "max_k", "ms", "gflops"))
    # Another program may have written the file.
    given = [answer.fields.get("kept") for answer in answers]
    kept = np.array([count if is_count(count, 0) else 0 for count in given])[about_images(answers)]
    times, flops = (
        [value for value in (answer.fields.get(name) for answer in answers) if is_number(value)]
        for name in ("ms", "gflops")
    )
    return {
        "mean_k": float(kept.mean()),
        "sd_k": float(kept.std()),
        "min_k": int(kept.min()),
        "max_k": int(kept.max()),
        "ms": float(np.mean(times)) if times else None,
        "gflops": float(f"{np.mean(flops):.4g}") if flops else None,
    }


def _score(file: AnswerFile, root: Path, answered: int, problem: str | None) -> JsonObject:
    """Returns the scorer's figures, or the reason why there are none."""
    asked = file.provenance.asked
    problem = problem or f"{answered:,} of {asked:,} questions answered so far"
    if answered >= asked:
        try:
            score = BENCHMARKS[file.provenance.benchmark].score(root, file.path)
            return {**score._asdict(), "problem": None}
        except (OSError, UserError) as error:
            problem = str(error)
    return {"headline": None, "parts": {}, "warnings": [], "problem": problem}


def _is_score(score: JsonObject) -> bool:
    """Returns whether an object has the fields that tables are built from."""
    good = all(holds(score[name]) for name, holds in _FIELDS.items())
    # Only of a run that downsamples.
    good = good and all(is_number(score.get(name, 0)) for name in ("hard", "hard_questions"))
    return good and (score["mean_k"] is None) == (score["sd_k"] is None)


def read_scores(workdir: str | Path) -> list[JsonObject]:
    """Reads the scores of a run, as `score_file` returns them."""
    path = Path(workdir) / "report" / SCORES
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: run eval.py with this --workdir first")
    try:
        scores = read_json_list(path, "score")
        good = all(map(_is_score, scores))
    except (UserError, AttributeError, KeyError, TypeError):
        good = False
    if not good:
        raise UserError(f"{path} is not a list of scores, as eval.py writes them")
    return scores
