"""Scores the answer files of a run, and summarises kept tokens, time and operations."""

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
# Fields that tables read, and whether a value is valid. Users may edit or merge the file of scores.
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
    """Scores an answer file, and averages kept tokens, time and operations.

    Args:
        file: the answer file.
        root: folder of the benchmark's annotations.
        seed: seed of the run, which is stored with the score.

    Returns:
        A JSON object. Its "headline" is the score, or None with the reason in "problem". "mean_k",
        "sd_k", "min_k", "max_k" (kept tokens) and "gflops" cover the questions with an image. A
        figure is None if no answer has it. For a learned stop, "at_floor" and "at_cap" are the
        fractions of counts at the minimum and at T_max; they are absent if both are 0.
    """
    provenance, answers, problem = file.provenance, [], None
    try:
        answers = _read_complete_lines(file)
    except UserError as error:  # another program may have written a line
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
        **_summarize(answers),
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
        with contextlib.suppress(OSError, ValueError):  # `score_file` reports these errors
            grades = BENCHMARKS[file.provenance.benchmark].judge(root, file.path)
            keys = [(answer.id, answer.fields.get("prompt")) for answer in read_answers(file.path)]
            graded = zip(keys, grades, strict=True)
            correct_by_file[file.path] = {
                key: grade >= 0.5 for key, grade in graded if grade is not None
            }
    correct_by_row = {
        (f.provenance.method, f.provenance.budget): correct_by_file.get(f.path, {}) for f in files
    }
    all_tokens_rows = [x for (method, _), x in correct_by_row.items() if method == ALL]
    is_correct_with_all_tokens = all_tokens_rows[0] if all_tokens_rows else {}
    scores: dict[Path, JsonObject] = {}
    for file in files:
        is_correct_downsampled = correct_by_row.get((DOWNSAMPLED, file.provenance.budget), {})
        hard_keys = [
            key
            for key, is_correct in is_correct_with_all_tokens.items()
            if is_correct and not is_correct_downsampled.get(key, True)
        ]
        if hard_keys and file.path in correct_by_file:
            num_correct = sum(correct_by_file[file.path].get(key, False) for key in hard_keys)
            percentage = round(100 * num_correct / len(hard_keys), 2)
            scores[file.path] = {"hard": percentage, "hard_questions": len(hard_keys)}
    return scores


def _read_complete_lines(file: AnswerFile) -> list[GivenAnswer]:
    """Reads the complete lines of a file. Its last line is broken while a run writes it."""
    return read_answers(file.path, broken=[]) if b"\n" in file.path.read_bytes() else []


def about_images(answers: Sequence[GivenAnswer]) -> Bool[np.ndarray, "q"]:
    """Returns a mask of the answers to questions with an image.

    Such answers have operations. If no answer has operations, the mask is all True.
    """
    has_flops = np.array(["gflops" in answer.fields for answer in answers], bool)
    return has_flops | ~has_flops.any()


def _summarize(answers: Sequence[GivenAnswer]) -> dict[str, float | int | None]:
    """Returns mean and spread of kept tokens, and means of time and operations, of answers."""
    if not answers:
        return dict.fromkeys(("mean_k", "sd_k", "min_k", "max_k", "ms", "gflops"))
    counts = [answer.fields.get("kept") for answer in answers]
    has_image = about_images(answers)
    # Another program may have written the file, so a count may be missing.
    kept = np.array([count if is_count(count, 0) else 0 for count in counts])[has_image]
    bounds = np.array([str(answer.fields.get(BOUND)) for answer in answers])[has_image]
    bound_names = {"at_floor": "minimum", "at_cap": "T_max"}
    fractions = {name: float(np.mean(bounds == value)) for name, value in bound_names.items()}
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
        **(fractions if any(fractions.values()) else {}),
    }


def _score(file: AnswerFile, root: Path, num_answered: int, problem: str | None) -> JsonObject:
    """Returns the fields of a benchmark's `Score`, and the "problem" that prevented a score.

    Args:
        file: the answer file.
        root: folder of the benchmark's annotations.
        num_answered: number of answers in the file.
        problem: fault of the file, or None.
    """
    num_questions = file.provenance.asked
    problem = problem or f"{num_answered:,} of {num_questions:,} questions answered so far"
    if num_answered >= num_questions:
        try:
            score = BENCHMARKS[file.provenance.benchmark].score(root, file.path)
            return {**score._asdict(), "problem": None}
        except (OSError, UserError) as error:
            problem = str(error)
    return {"headline": None, "parts": {}, "warnings": [], "problem": problem}


def _is_score(score: JsonObject) -> bool:
    """Returns whether an object has the fields that tables are built from."""
    is_valid = all(is_valid_value(score[name]) for name, is_valid_value in _FIELDS.items())
    # The first two exist in runs that downsample, the last two for a learned stop.
    optional = ("hard", "hard_questions", "at_floor", "at_cap")
    is_valid = is_valid and all(is_number(score.get(name, 0)) for name in optional)
    return is_valid and (score["mean_k"] is None) == (score["sd_k"] is None)


def read_scores(workdir: str | Path) -> list[JsonObject]:
    """Reads the scores of a run from its report.

    Args:
        workdir: folder of the run.

    Returns:
        Objects as `score_file` returns them.

    Raises:
        FileNotFoundError: the run has no scores yet.
        ValueError: the file is damaged.
    """
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
