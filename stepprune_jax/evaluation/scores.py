"""Scores of the answer files of a run, with K, time and operations, in one file."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from stepprune_jax.benchmarks import BENCHMARKS
from stepprune_jax.benchmarks.answer_files import BOUND, AnswerFile
from stepprune_jax.benchmarks.answers import GivenAnswer, read_answers
from stepprune_jax.data.json_files import JsonObject, read_json_list
from stepprune_jax.evaluation.names import ALL, DOWNSAMPLED
from stepprune_jax.settings import is_count, is_number
from stepprune_jax.user_input import UserError

SCORES = "scores.json"
# Fields that tables read, each with its check.
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
    headline, `problem` is the reason. Figures are None if no answer has them. Of a learned stop,
    `at_floor` and `at_cap` are the shares of counts at the minimum and at T_max, if there are any.
    """
    provenance, answers, problem = file.provenance, [], None
    try:
        answers = _whole_lines(file)
    except UserError as error:  # a line that another program may have written
        problem = str(error)
    return {
        "benchmark": provenance.benchmark,
        "method": provenance.method,
        "mode": provenance.mode,
        "budget": provenance.budget,
        "num_tokens": provenance.num_tokens,
        "model": provenance.model,
        "questions": provenance.questions,
        "seed": seed,
        "asked": provenance.asked,
        "answered": len(answers),
        **_score(file, root, len(answers), problem),
        **_measured(answers),
    }


def score_hard(files: Sequence[AnswerFile], root: Path) -> dict[Path, JsonObject]:
    """Scores complete answer files of a benchmark on the questions that pruning can get wrong.

    The questions follow VTC-Bench (https://arxiv.org/abs/2510.07143): their answer is correct with
    all tokens, and wrong if the image is downsampled to the budget of the file. A question that a
    coarser image also answers does not distinguish methods.

    Args:
        files: the files, among them one of all tokens and some of `DOWNSAMPLED`.
        root: folder of the annotations.

    Returns:
        For each file with such questions: `hard`, the percentage of correct answers, and
        `hard_questions`, the number of questions.
    """
    correct_by_file: dict[Path, dict[tuple[str, object], bool]] = {}
    for file in files:
        with contextlib.suppress(OSError, ValueError):  # as the score reports
            grades = BENCHMARKS[file.provenance.benchmark].judge(root, file.path)
            keys = [(answer.id, answer.fields.get("prompt")) for answer in read_answers(file.path)]
            graded = zip(keys, grades, strict=True)
            correct_by_file[file.path] = {
                key: grade >= 0.5 for key, grade in graded if grade is not None
            }
    correct_by_row = {
        (f.provenance.method, f.provenance.budget): correct_by_file.get(f.path, {}) for f in files
    }
    with_all_tokens = next(
        (
            correct_by_file
            for (method, _), correct_by_file in correct_by_row.items()
            if method == ALL
        ),
        {},
    )
    scores: dict[Path, JsonObject] = {}
    for file in files:
        downsampled = correct_by_row.get((DOWNSAMPLED, file.provenance.budget), {})
        hard_keys = [
            key
            for key, num_correct in with_all_tokens.items()
            if num_correct and not downsampled.get(key, True)
        ]
        if hard_keys and file.path in correct_by_file:
            num_correct = sum(correct_by_file[file.path].get(key, False) for key in hard_keys)
            share = round(100 * num_correct / len(hard_keys), 2)
            scores[file.path] = {"hard": share, "hard_questions": len(hard_keys)}
    return scores


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
    recorded_counts = [answer.fields.get("kept") for answer in answers]
    is_shown = about_images(answers)
    kept = np.array([count if is_count(count, 0) else 0 for count in recorded_counts])[is_shown]
    bound = np.array([str(answer.fields.get(BOUND)) for answer in answers])[is_shown]
    names = {"at_floor": "minimum", "at_cap": "T_max"}
    shares = {name: float(np.mean(bound == value)) for name, value in names.items()}
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
        **(shares if any(shares.values()) else {}),
    }


def _score(file: AnswerFile, root: Path, answered: int, problem: str | None) -> JsonObject:
    """Returns the scorer's figures, or the reason why there are none."""
    num_questions = file.provenance.asked
    problem = problem or f"{answered:,} of {num_questions:,} questions answered so far"
    if answered >= num_questions:
        try:
            score = BENCHMARKS[file.provenance.benchmark].score(root, file.path)
            return {**score._asdict(), "problem": None}
        except (OSError, UserError) as error:
            problem = str(error)
    return {"headline": None, "parts": {}, "warnings": [], "problem": problem}


def _is_score(score: JsonObject) -> bool:
    """Returns whether an object has the fields that tables are built from."""
    is_valid = all(is_valid_value(score[name]) for name, is_valid_value in _FIELDS.items())
    # Only of a run that downsamples, and of a learned stop.
    optional = ("hard", "hard_questions", "at_floor", "at_cap")
    is_valid = is_valid and all(is_number(score.get(name, 0)) for name in optional)
    return is_valid and (score["mean_k"] is None) == (score["sd_k"] is None)


def read_scores(workdir: str | Path) -> list[JsonObject]:
    """Reads the scores of a run, as `score_file` returns them."""
    path = Path(workdir) / "report" / SCORES
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: run eval.py with this --workdir first")
    try:
        scores = read_json_list(path, "score")
        are_valid = all(map(_is_score, scores))
    except (UserError, AttributeError, KeyError, TypeError):
        are_valid = False
    if not are_valid:
        raise UserError(f"{path} is not a list of scores, as eval.py writes them")
    return scores
